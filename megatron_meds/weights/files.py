"""Hugging Face folders on disk: safetensors read in slices, and written tensor by tensor.

A reader maps the files and copies out only the runs that are asked for. A writer knows all names,
shapes and dtypes beforehand, writes each file's header first and then streams the tensors in, so
that it holds one tensor at a time; the folder appears under its name only when it is whole.
Knows nothing of model families or of Megatron.

File format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of safetensors that hold plain weights; quantised ones are refused."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}
GIB = 2**30

COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.tiktoken",
    "LICENSE*",
    "NOTICE*",
)
"""Files of a model folder, besides config.json, that go wherever its weights go."""


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and dtype of a tensor that is to be sent or written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """The safetensors of a Hugging Face folder, read in slices; a context manager.

    Attributes:
        names: every stored tensor's name.
        bytes_read: bytes copied out so far.
    """

    def __init__(self, folder: Path) -> None:
        """Open `folder`; tensors are read later.

        Raises:
            FileNotFoundError: no safetensors there, or a file that the index names is absent.
            ValueError: the index is not one.
        """
        self.folder = Path(folder)
        self.bytes_read = 0
        self._open: dict[str, Any] = {}
        self._where = self._find()

    @property
    def names(self) -> list[str]:
        return list(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a stored tensor, from its file's header.

        Raises:
            ValueError: it is of a quantised or integer dtype.
            KeyError: it is not stored.
        """
        part = self._slice(name)
        code = part.get_dtype()
        if code not in DTYPES:
            raise ValueError(
                f"{self.folder}: tensor {name} is {code}; only {', '.join(DTYPES)} weights can be used. "
                f"Dequantise the checkpoint first."
            )
        return TensorInfo(name, tuple(part.get_shape()), DTYPES[code])

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Copy `tensor[start:stop]` along `dim` into memory (CPU, the stored dtype); by default all of it."""
        part = self._slice(name)
        if not part.get_shape():
            tensor = self._file(name).get_tensor(name)
        else:
            tensor = part[(slice(None),) * dim + (slice(start, stop),)]
        self.bytes_read += tensor.nbytes
        return tensor

    def _find(self) -> dict[str, str]:
        """File of each tensor."""
        index = self.folder / INDEX
        if index.is_file():
            where = json.loads(index.read_text()).get("weight_map")
            if not isinstance(where, dict) or not where:
                raise ValueError(f"{index} has no weight_map")
            absent = sorted(file for file in set(where.values()) if not (self.folder / file).is_file())
            if absent:
                raise FileNotFoundError(f"{index} names {', '.join(absent)}, absent from {self.folder}")
            return where
        if (self.folder / SINGLE).is_file():
            with safe_open(self.folder / SINGLE, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE)
        others = sorted(path.name for path in self.folder.glob("*.bin"))
        hint = f" It has {others[0]}: save it again with safetensors." if others else ""
        raise FileNotFoundError(f"neither {SINGLE} nor {INDEX} in {self.folder}.{hint}")

    def _file(self, name: str) -> Any:
        if name not in self._where:
            raise KeyError(f"{self.folder} stores no tensor {name}")
        file = self._where[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt").__enter__()
        return self._open[file]

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(name)


class FolderWriter:
    """Writes a model folder tensor by tensor, in the order of `tensors`; a context manager.

    All goes into `TARGET.partial`, which takes the target's name on a clean exit, after every
    tensor has come; on an error it is removed.
    """

    def __init__(
        self, target: Path, tensors: Sequence[TensorInfo], max_shard_bytes: int, overwrite: bool = False
    ) -> None:
        """Plan the files; nothing is written before the context is entered.

        Args:
            tensors: all that will be added, in that order.
            max_shard_bytes: size of a safetensors file (a larger tensor gets a file of its own).
            overwrite: replace a folder that is there.

        Raises:
            FileExistsError: the target is there.
        """
        check_target(target, overwrite)
        self.target = target
        self.partial = target.with_name(target.name + ".partial")
        self._files = _plan_files(tensors, max_shard_bytes)
        self._due = [(file, tensor) for file, group in self._files.items() for tensor in group]
        self._next = 0
        self._stream: BinaryIO | None = None

    def __enter__(self) -> FolderWriter:
        shutil.rmtree(self.partial, ignore_errors=True)  # what an interrupted writer left
        self.partial.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_stream()
        if error is None:
            self._finish()
        else:
            shutil.rmtree(self.partial, ignore_errors=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor.

        Raises:
            ValueError: it is not the one that was announced at this place.
        """
        if self._next == len(self._due):
            raise ValueError(f"tensor {name} was not announced: all {len(self._due)} have been written")
        file, expected = self._due[self._next]
        given = TensorInfo(name, tuple(tensor.shape), tensor.dtype)
        if given != expected:
            raise ValueError(f"tensor {self._next} should be {expected}, not {given}")
        if self._next == 0 or file != self._due[self._next - 1][0]:
            self._open_stream(file)
        assert self._stream is not None
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._stream.write(memoryview(raw.numpy()))
        self._next += 1

    def _open_stream(self, file: str) -> None:
        self._close_stream()
        self._stream = (self.partial / file).open("wb")
        self._stream.write(_header(self._files[file]))

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._stream = None

    def _finish(self) -> None:
        if self._next != len(self._due):
            due = self._due[self._next][1].name
            raise ValueError(f"{self.target} is not written: {due} and the tensors after it never came")
        if list(self._files) != [SINGLE]:
            total = sum(tensor.bytes for _, tensor in self._due)
            where = {tensor.name: file for file, tensor in self._due}
            write_json(self.partial / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        rename_whole(self.partial, self.target)


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse a target that is there, unless it may be overwritten and is a model folder (or empty).

    Raises:
        FileExistsError: saying so.
    """
    if not target.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists; remove it or choose another target")
    if not target.is_dir() or (any(target.iterdir()) and not (target / "config.json").is_file()):
        raise FileExistsError(f"{target} is not a model folder and will not be overwritten")


def rename_whole(partial: Path, target: Path) -> None:
    """Give a finished folder its name; a folder that had the name is removed after that."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def copy_companions(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy config.json, its dtype set to `dtype` (None: as it is), and the tokenizer's and
    generation files."""
    config = json.loads((source / "config.json").read_text())
    if dtype is not None:
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
        config |= dict.fromkeys(keys, str(dtype).removeprefix("torch."))
    write_json(target / "config.json", config)
    for path in companions(source):
        shutil.copyfile(path, target / path.name)


def companions(source: Path) -> list[Path]:
    """The COMPANIONS that `source` has."""
    found = {path for pattern in COMPANIONS for path in source.glob(pattern) if path.is_file()}
    return sorted(found)


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _plan_files(tensors: Sequence[TensorInfo], max_bytes: int) -> dict[str, list[TensorInfo]]:
    """Fill files one after the other; a tensor larger than `max_bytes` gets one of its own."""
    groups: list[list[TensorInfo]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= tensor.bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {
        f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)
    }


def _header(tensors: Sequence[TensorInfo]) -> bytes:
    """A safetensors file's head: 8 bytes of length, then JSON padded with spaces to 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.bytes],
        }
        offset += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
