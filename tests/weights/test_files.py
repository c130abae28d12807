"""Reading and writing safetensors folders: exact, bounded, complete or absent."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_meds.weights.files import INDEX, SINGLE, Checkpoint, FolderWriter, TensorInfo

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.randn(5, 2).to(torch.bfloat16),
    "c": torch.randn(7).to(torch.float16),
    "d": torch.tensor(3.0),
}
PLAN = [TensorInfo(name, tuple(t.shape), t.dtype) for name, t in TENSORS.items()]


def write(target: Path, max_shard_bytes: int, names: str = "abcd", **options) -> None:
    with FolderWriter(target, PLAN, max_shard_bytes, **options) as writer:
        for name in names:
            writer.add(name, TENSORS[name])


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """What the safetensors library itself finds in a folder."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.mark.parametrize("max_shard_bytes", [1, 50, 68, 10_000])
def test_the_safetensors_library_reads_what_was_streamed(tmp_path, max_shard_bytes):
    write(tmp_path / "out", max_shard_bytes)
    found = stored(tmp_path / "out")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_files_stay_under_the_limit_but_for_a_tensor_that_is_larger(tmp_path):
    write(tmp_path / "out", 36)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    by_file: dict[str, list[str]] = {}
    for name, file in index["weight_map"].items():
        by_file.setdefault(file, []).append(name)
    assert list(by_file.values()) == [["a"], ["b", "c"], ["d"]]
    assert set(by_file) == {f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)}


def test_one_file_needs_no_index(tmp_path):
    write(tmp_path / "out", 10_000)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [SINGLE]


def test_slices_are_read_without_the_rest(tmp_path):
    write(tmp_path / "out", 40)
    with Checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.info("a") == PLAN[0]
        assert torch.equal(checkpoint.read("a", 1, 1, 3), TENSORS["a"][:, 1:3])
        assert torch.equal(checkpoint.read("b", 0, 2, 4), TENSORS["b"][2:4])
        assert torch.equal(checkpoint.read("d"), TENSORS["d"])
        assert checkpoint.bytes_read == 3 * 2 * 4 + 2 * 2 * 2 + 4


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def interrupted():
        with FolderWriter(tmp_path / "out", PLAN, 40) as writer:
            writer.add("a", TENSORS["a"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_lacks_tensors_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="b and the tensors after it never came"):
        write(tmp_path / "out", 40, names="a")
    assert not (tmp_path / "out").exists()


def test_a_tensor_out_of_order_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"name='a'.*not.*name='b'"):
        write(tmp_path / "out", 40, names="ba")
    assert not (tmp_path / "out").exists()


def test_what_was_killed_half_way_is_written_anew(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "left.safetensors").touch()
    write(tmp_path / "out", 10_000)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "left.safetensors").exists()


def test_a_target_that_is_there_is_kept_unless_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").touch()
    with pytest.raises(FileExistsError, match="out exists; remove it or choose another target"):
        write(tmp_path / "out", 10_000)
    assert (tmp_path / "out" / "config.json").exists()
    write(tmp_path / "out", 10_000, overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [SINGLE]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_something_else_is_never_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="out is not a model folder"):
        write(tmp_path / "out", 10_000, overwrite=True)
    assert (tmp_path / "out" / "thesis.tex").exists()


def test_a_folder_without_safetensors_is_refused_with_a_hint(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"It has pytorch_model\.bin: save it again with safetensors"):
        Checkpoint(tmp_path)


def test_a_file_that_the_index_names_must_be_there(tmp_path):
    write(tmp_path / "out", 36)
    (tmp_path / "out" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names model-00002-of-00003\.safetensors, absent"):
        Checkpoint(tmp_path / "out")


def test_quantised_tensors_are_refused_by_name(tmp_path):
    save_file({"w": torch.zeros(4, dtype=torch.int8)}, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ValueError, match="tensor w is I8"):
        checkpoint.info("w")
