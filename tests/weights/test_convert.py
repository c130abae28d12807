"""`megatron-meds convert` from a Hugging Face folder to another."""

import json
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from megatron_meds.cli.convert import convert
from megatron_meds.errors import UserError
from megatron_meds.weights.convert import convert_huggingface
from tests.tiny import KINDS

APP = typer.Typer()
APP.command()(convert)


def run(*arguments: str | Path):
    return CliRunner().invoke(APP, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


def complaint(*arguments: str | Path) -> str:
    """What the user is told (the command line prints it and ends with exit code 2)."""
    error = run(*arguments).exception
    assert isinstance(error, UserError)
    return str(error)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_every_family_are_cast_and_all_else_is_kept(kind, tiny, tmp_path):
    source, target = tiny(kind), tmp_path / "out"
    assert run(source, target, "--dtype", "bf16").exit_code == 0
    before, after = stored(source), stored(target)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name].to(torch.bfloat16)) for name in before)
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    assert now == was | {"dtype": "bfloat16"}
    assert AutoModelForCausalLM.from_pretrained(target, dtype="auto").dtype == torch.bfloat16


def test_without_options_a_sharded_folder_becomes_one_equal_file(tiny, tmp_path):
    source = tiny("qwen3", max_shard_size="50KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    result = run(source, tmp_path / "out")
    assert result.exit_code == 0
    assert "GiB of tensors" in result.output
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    before, after = stored(source), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_tokenizer_and_licence_come_along_and_other_weights_do_not(tiny, tmp_path):
    source, target = tmp_path / "in", tmp_path / "out"
    convert_huggingface(tiny("llama"), source)
    companions = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE", "merges.txt"]
    for name in [*companions, "pytorch_model.bin", "notes.txt"]:
        (source / name).write_text(name)
    convert_huggingface(source, target)
    assert {path.name for path in target.iterdir()} == {
        *companions,
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert all((target / name).read_text() == name for name in companions)


def test_a_target_that_is_there_is_refused_unless_overwritten(tiny, tmp_path):
    source, target = tiny("llama"), tmp_path / "out"
    target.mkdir()
    assert "exists; remove it or choose another target" in complaint(source, target)
    assert run(source, target, "--overwrite").exit_code == 0
    assert stored(target).keys() == stored(source).keys()


def test_the_source_is_no_target(tiny, tmp_path):
    source = tmp_path / "in"
    convert_huggingface(tiny("llama"), source)
    assert "same folder" in complaint(source, source, "--overwrite")
    assert stored(source).keys() == stored(tiny("llama")).keys()


def test_a_source_that_is_no_model_folder_is_refused(tmp_path):
    assert "no Hugging Face folder" in complaint(tmp_path, tmp_path / "out")
    assert "no Hugging Face folder" in complaint(tmp_path / "absent", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_config_but_no_weights_is_refused(tiny, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_bytes((tiny("llama") / "config.json").read_bytes())
    assert "neither model.safetensors nor" in complaint(tmp_path / "in", tmp_path / "out")
