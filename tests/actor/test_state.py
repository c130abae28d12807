"""A policy's state on disk: any layout loads what another saved, and training goes on bit by bit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from tests.tiny import VOCABULARY

BODIES = "tests.distributed.bodies_state"
PIPELINE, BOTH, REPLICAS = {"pipeline": 2}, {"tensor": 2, "pipeline": 2}, {}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a saved state, read by torch alone, without the rows that pad the vocabulary."""
    reader = torch_checkpoint.FileSystemReader(folder / "megatron")
    described = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in described.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    torch_checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return {
        key: tensor[:VOCABULARY] if "word_embeddings" in key or "output_layer" in key else tensor
        for key, tensor in tensors.items()
    }


def of_one_rank(results: list[dict], name: str):
    (value,) = [result[name] for result in results if result[name] is not None]
    return value


@pytest.fixture(scope="module")
def saved(ranks, tiny, tmp_path_factory):
    """saved(kind, layout) -> (folder of the state after two steps, the policy then and a step later)."""
    made: dict[tuple, tuple] = {}

    def save(kind: str, layout: dict):
        key = (kind, *sorted(layout.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("saved") / "actor"
            results = ranks(4).run(f"{BODIES}:train_and_save", layout=layout, model=tiny(kind), folder=folder)
            made[key] = folder, {name: of_one_rank(results, name) for name in results[0]}
        return made[key]

    return save


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("qwen2", PIPELINE, BOTH),
        ("qwen2", PIPELINE, REPLICAS),
        ("qwen2", PIPELINE, {"pipeline": 4}),
        ("qwen2", PIPELINE, {"pipeline": 2, "virtual": 2}),
        ("qwen3", BOTH, PIPELINE),
        ("qwen3", BOTH, {"tensor": 2, "sequence": True}),
    ],
    ids=str,
)
def test_another_layout_loads_weights_moments_and_goes_on(ranks, tiny, saved, tmp_path, kind, before, after):
    folder, then = saved(kind, before)
    results = ranks(4).run(
        f"{BODIES}:load_and_go_on", layout=after, model=tiny(kind), folder=folder, again=tmp_path / "again"
    )
    now = {name: of_one_rank(results, name) for name in results[0]}
    torch.testing.assert_close(now["weights"], then["weights"], rtol=0, atol=0)
    for here, there in zip(now["scores"], then["scores"], strict=True):
        np.testing.assert_allclose(here, there, atol=1e-5)
    torch.testing.assert_close(now["later"], then["later"], rtol=1e-3, atol=1e-4)

    first, again = tensors_of(folder), tensors_of(tmp_path / "again")
    assert sum(key.startswith("optimizer.state.exp_avg_sq.") for key in first) > 20
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_moments_are_stored_under_the_names_of_their_parameters(saved):
    """Trained alike in two layouts, the tensors of one name are alike and those of others are not."""
    one, other = (tensors_of(saved("qwen2", layout)[0]) for layout in (PIPELINE, REPLICAS))
    assert one.keys() == other.keys()
    moments = {key: value for key, value in one.items() if "exp_avg." in key}
    for key, value in moments.items():
        assert value.abs().max() > 0
        torch.testing.assert_close(other[key], value, rtol=1e-3, atol=1e-5)
        like = [k for k, v in moments.items() if k != key and v.shape == value.shape]
        assert not any(torch.allclose(moments[k], value, rtol=1e-3, atol=1e-5) for k in like)


@pytest.mark.parametrize(
    ("layout", "actor"),
    [
        (REPLICAS, {}),
        (PIPELINE, {}),
        (BOTH, {"distributed_optimizer": False}),
        ({"pipeline": 2, "virtual": 2}, {}),
        (REPLICAS, {"precision": "bf16"}),
        (PIPELINE, {"precision": "bf16", "distributed_optimizer": False}),
    ],
    ids=str,
)
def test_twice_n_steps_equal_n_a_resume_and_n_bit_by_bit(ranks, tiny, tmp_path, layout, actor):
    differing = ranks(4).run(
        f"{BODIES}:resume_bit_by_bit", layout=layout, model=tiny("qwen2"), folder=tmp_path / "actor", **actor
    )
    assert differing == [[]] * 4


@pytest.mark.parametrize("distributed", [True, False])
def test_a_policy_that_has_learnt_nothing_yet_is_saved_and_loaded(ranks, tiny, tmp_path, distributed):
    differing = ranks(2).run(
        f"{BODIES}:resume_bit_by_bit",
        layout={},
        model=tiny("qwen2"),
        folder=tmp_path / "actor",
        before=0,
        distributed_optimizer=distributed,
    )
    assert differing == [[]] * 2


def test_settings_changed_at_a_resume_hold(ranks, tiny, tmp_path):
    held = ranks(2).run(
        f"{BODIES}:resume_with_other_settings", layout={}, model=tiny("qwen2"), folder=tmp_path / "actor"
    )
    for settings in held:
        assert settings == {"lr": {5e-3}, "weight_decay": {0.2, 0.0}, "beta1": {0.8}, "schedule_steps": 4}


@pytest.mark.parametrize(
    ("kind", "actor", "message"),
    [
        (
            "qwen3",
            {},
            "it is of another model, with family qwen2 instead of qwen3, head_dim 16 instead of 32",
        ),
        ("qwen2", {"distributed_optimizer": False}, "set actor.distributed_optimizer=true"),
        ("qwen2", {"precision": "bf16"}, "set actor.precision=fp32"),
    ],
    ids=["model", "optimizer", "precision"],
)
def test_what_does_not_fit_is_refused_on_every_rank_with_the_remedy(ranks, tiny, saved, kind, actor, message):
    folder, _ = saved("qwen2", PIPELINE)
    told = ranks(4).run(
        f"{BODIES}:load_what_does_not_fit", layout=PIPELINE, model=tiny(kind), folder=folder, **actor
    )
    assert all(message in text for text in told), told[0]


def test_a_folder_without_a_state_is_refused(ranks, tiny, tmp_path):
    told = ranks(2).run(
        f"{BODIES}:load_what_does_not_fit", layout={}, model=tiny("qwen2"), folder=tmp_path / "nothing"
    )
    assert all("not a policy's state: it has no policy.json" in text for text in told), told[0]


def test_a_damaged_file_is_named_on_every_rank(ranks, tiny, saved, tmp_path):
    folder, _ = saved("qwen2", PIPELINE)
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "megatron" / "__0_0.distcp").write_bytes(b"")
    told = ranks(4).run(
        f"{BODIES}:load_what_does_not_fit", layout=PIPELINE, model=tiny("qwen2"), folder=tmp_path / "damaged"
    )
    assert all("damaged was not loaded: rank" in text for text in told), told[0]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_on_one_rank_is_told_to_all_and_leaves_the_last_checkpoint(
    ranks, tiny, tmp_path, failing
):
    results = ranks(2).run(
        f"{BODIES}:fill_the_disk",
        layout={"tensor": 2},
        model=tiny("qwen2"),
        run=tmp_path,
        failing=failing,
        limit=20_000,
        timeout=120.0,
    )
    for result in results:
        first, refused, still, third = result["told"]
        assert (first, still, third) == ("step_000001", "step_000001", "step_000003")
        assert "the checkpoint of step 2 was not written" in refused
        assert "File too large" in refused
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_000003"]


def test_a_checkpoint_stands_alone_and_becomes_a_hugging_face_folder(ranks, tiny, tmp_path):
    model = tiny("qwen3", dtype=torch.bfloat16)
    (model / "tokenizer_config.json").write_text("{}")
    run, live, target = tmp_path / "run", tmp_path / "live", tmp_path / "converted"
    ranks(4).run(f"{BODIES}:save_a_run", layout=BOTH, model=model, run=run, live=live, precision="bf16")
    step = run / "checkpoints" / "step_000001"
    command = [sys.executable, "-c", "from megatron_meds.cli.main import main; main()"]
    done = subprocess.run(
        [*command, "convert", str(step), str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in live.iterdir())
    here, there = load_file(target / "model.safetensors"), load_file(live / "model.safetensors")
    assert here.keys() == there.keys()
    torch.testing.assert_close(here, there, rtol=0, atol=0)
    assert json.loads((target / "config.json").read_text()) == json.loads((live / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(target)
