"""The memory on disk: one Parquet file per replica, one row per remembered answer.

    FOLDER/shard_00000_of_00002.parquet
        prompt_id, question, correct, step, sample, label, feature, answer, response, layer_logits
    FOLDER/_shard_00000_of_00002.sha256         of that file, so that no damage goes unseen

pandas and DuckDB read them. A prompt's rows stand together, the oldest first. Any number of replicas
can load what any number wrote. Needs pyarrow. Knows no checkpoint: the folder is the caller's.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_meds.errors import UserError
from megatron_meds.meds.memory import Key, MistakeMemory, Note, Remembered
from megatron_meds.meds.sharding import owner

if TYPE_CHECKING:
    import pyarrow

FOLDER = "memory"
"""Where a run keeps the shards within a checkpoint."""
_NAME = re.compile(r"shard_(\d{5})_of_(\d{5})\.parquet")
_BATCH_ROWS = 65_536


class MemoryFileError(UserError, RuntimeError):
    """A file of the memory is missing or cannot be read; names it."""


def shard_name(replica: int, replicas: int) -> str:
    """File of one replica's share."""
    return f"shard_{replica:05d}_of_{replicas:05d}.parquet"


def save_memory(memory: MistakeMemory, folder: Path, replica: int = 0, replicas: int = 1) -> Path:
    """Write a replica's share into the folder and through to the disk; the file is whole or absent.

    Every replica writes its own, an empty one too. Returns the file.

    Raises:
        OSError: it cannot be written.
    """
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / shard_name(replica, replicas)
    partial, digest = (folder / f".{target.name}.{os.getpid()}{end}" for end in ("", ".sha256"))
    try:
        with partial.open("wb") as file:
            with pyarrow.parquet.ParquetWriter(file, _schema(), compression="zstd") as writer:
                for table in _tables(memory):
                    writer.write_table(table)
            file.flush()
            os.fsync(file.fileno())
        with digest.open("w") as file:
            file.write(_sha256(partial) + "\n")
            file.flush()
            os.fsync(file.fileno())
        digest.replace(_digest_of(target))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
        digest.unlink(missing_ok=True)
    return target


def load_memory(memory: MistakeMemory, folder: Path, replica: int = 0, replicas: int = 1) -> None:
    """Fill an empty memory with the prompts that this replica owns, whoever wrote them.

    The next visit gives the sizes it would have given without the stop.

    Raises:
        MemoryFileError: a shard is missing, cannot be read or is not the memory's; names it.
        ValueError: the memory is not empty.
    """
    if len(memory):
        raise ValueError("the memory is not empty: load into a new one")
    files = shard_files(folder)
    if len(files) == replicas:
        files = [files[replica]]  # the owner was the same
    for file in files:
        for key, rows in read_shard(file):
            if owner(key[0], replicas) == replica:
                memory.restore(key, rows)


def shard_files(folder: Path) -> list[Path]:
    """All shards of a folder, by replica.

    Raises:
        MemoryFileError: there are none, one is missing, or they are of different numbers of replicas.
    """
    names = {path.name: _NAME.fullmatch(path.name) for path in folder.glob("shard_*.parquet")}
    counts = sorted({int(match[2]) for match in names.values() if match})
    if not counts:
        raise MemoryFileError(f"{folder} holds no shard of the memory (shard_*.parquet)")
    if len(counts) > 1:
        raise MemoryFileError(f"{folder} holds shards of {counts} replicas mixed: keep those of one save")
    wanted = [shard_name(replica, counts[0]) for replica in range(counts[0])]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise MemoryFileError(f"{folder}: {', '.join(missing)} missing; take another checkpoint")
    return [folder / name for name in wanted]


def read_shard(file: Path) -> Iterator[tuple[Key, Remembered]]:
    """(prompt id, correct) and its rows, prompt after prompt, without holding the whole file.

    Raises:
        MemoryFileError: it cannot be read, or has other columns; names it.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        if _digest_of(file).read_text().strip() != _sha256(file):
            raise MemoryFileError(
                f"{file}: cannot be read: it is not as it was written; take another checkpoint"
            )
        with pyarrow.parquet.ParquetFile(file) as source:
            absent = [name for name in _schema().names if name not in source.schema_arrow.names]
            if absent:
                raise MemoryFileError(f"{file}: no column {absent[0]}; it is no shard of this memory")
            pending: Any = None
            for batch in source.iter_batches(_BATCH_ROWS, columns=_schema().names):
                part = pyarrow.Table.from_batches([batch])
                pending = part if pending is None else pyarrow.concat_tables([pending, part])
                *whole, last = _starts(pending)
                for start, end in whole:
                    yield _remembered(pending.slice(start, end - start))
                pending = pending.slice(last[0])
            if pending is not None and pending.num_rows:
                yield _remembered(pending)
    except (pyarrow.ArrowException, OSError) as error:
        raise MemoryFileError(f"{file}: cannot be read: {error}; take another checkpoint") from error


def _digest_of(shard: Path) -> Path:
    """The file beside a shard that tells its checksum; readers of Parquet folders pass over its name."""
    return shard.with_name(f"_{shard.stem}.sha256")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _starts(table: Any) -> list[tuple[int, int]]:
    """(start, end) of each prompt's run of rows."""
    ids = table.column("prompt_id").to_numpy(zero_copy_only=False)
    right = table.column("correct").to_numpy(zero_copy_only=False)
    changes = np.flatnonzero((ids[1:] != ids[:-1]) | (right[1:] != right[:-1])) + 1
    edges = [0, *changes.tolist(), len(ids)]
    return list(pairwise(edges))


def _remembered(table: Any) -> tuple[Key, Remembered]:
    """A prompt's rows from a table that holds nothing else."""
    table = table.combine_chunks()

    def numbers(name: str) -> np.ndarray:
        return table.column(name).to_numpy(zero_copy_only=False).copy()

    def matrix(name: str, dtype: type) -> np.ndarray:
        flat = table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return (
            flat.astype(dtype).reshape(table.num_rows, -1)
            if flat.size
            else np.empty((table.num_rows, 0), dtype)
        )

    texts = zip(table.column("answer").to_pylist(), table.column("response").to_pylist(), strict=True)
    rows = Remembered(
        features=matrix("feature", np.float32),
        labels=numbers("label"),
        steps=numbers("step"),
        samples=numbers("sample"),
        notes=[Note(answer, response) for answer, response in texts],
        layers=matrix("layer_logits", np.float16),
        question=table.column("question")[0].as_py(),
    )
    return (table.column("prompt_id")[0].as_py(), table.column("correct")[0].as_py()), rows


def _schema() -> pyarrow.Schema:
    import pyarrow

    return pyarrow.schema(
        [
            ("prompt_id", pyarrow.string()),
            ("question", pyarrow.string()),
            ("correct", pyarrow.bool_()),
            ("step", pyarrow.int64()),
            ("sample", pyarrow.int32()),
            ("label", pyarrow.int32()),
            ("feature", pyarrow.list_(pyarrow.float32())),
            ("answer", pyarrow.string()),
            ("response", pyarrow.string()),
            ("layer_logits", pyarrow.list_(pyarrow.float32())),
        ]
    )


def _tables(memory: MistakeMemory) -> Iterator[pyarrow.Table]:
    """The memory's rows in tables of about _BATCH_ROWS."""
    keys: list[Key] = []
    count = 0
    for key in memory:
        keys.append(key)
        count += len(memory[key])
        if count >= _BATCH_ROWS:
            yield _table(memory, keys)
            keys, count = [], 0
    if keys:
        yield _table(memory, keys)


def _table(memory: MistakeMemory, keys: list[Key]) -> pyarrow.Table:
    import pyarrow

    parts = [memory[key] for key in keys]
    lengths = [len(part) for part in parts]

    def repeat(values: list[Any]) -> list[Any]:
        return [value for value, n in zip(values, lengths, strict=True) for _ in range(n)]

    def lists(matrices: list[np.ndarray]) -> pyarrow.ListArray:
        widths = [m.shape[1] for m in matrices for _ in range(len(m))]
        offsets = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)]).astype(np.int32)
        flat = np.concatenate([m.astype(np.float32).reshape(-1) for m in matrices])
        return pyarrow.ListArray.from_arrays(offsets, pyarrow.array(flat, pyarrow.float32()))

    columns = {
        "prompt_id": repeat([key[0] for key in keys]),
        "question": repeat([part.question for part in parts]),
        "correct": repeat([key[1] for key in keys]),
        "step": np.concatenate([part.steps for part in parts]),
        "sample": np.concatenate([part.samples for part in parts]),
        "label": np.concatenate([part.labels for part in parts]),
        "feature": lists([part.features for part in parts]),
        "answer": [note.answer for part in parts for note in part.notes],
        "response": [note.response for part in parts for note in part.notes],
        "layer_logits": lists([part.layers for part in parts]),
    }
    return pyarrow.table(columns, schema=_schema())
