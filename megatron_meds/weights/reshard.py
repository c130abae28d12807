"""Cutting Hugging Face tensors into tensor-parallel shards, and joining them again.

One function, `pieces`, says where each run of a shard comes from; splitting, joining and partial
reads from disk all follow it, so that they cannot disagree. Pure tensor functions: no process
group, no Megatron, no file. Everything is a copy of whole numbers of rows or columns, hence exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_meds.weights.families import Cut, Entry


@dataclass(frozen=True)
class Piece:
    """A run of one Hugging Face tensor: `tensor[start:stop]` along `dim`."""

    tensor: int
    """Which of the entry's tensors."""
    dim: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def padded_rows(vocabulary: int, size: int) -> int:
    """The smallest number of rows, at least `vocabulary`, that `size` ranks share equally."""
    return -(-vocabulary // size) * size


def pieces(entry: Entry, size: int, rank: int, vocabulary_rows: int | None = None) -> list[Piece]:
    """What the shard of `rank` among `size` tensor ranks is made of, in order along its cut dimension.

    Args:
        vocabulary_rows: rows of the padded vocabulary over all ranks, for a `VOCABULARY` cut (None:
            the smallest). Rows beyond the real vocabulary have no piece: they are zeros.

    Raises:
        ValueError: the rows, columns or key/value heads cannot be shared out equally. Key/value heads
            fewer than the ranks are fine where they divide them: Megatron cuts inside the groups
            then, and gathers at run time.
    """
    rows = [tensor.shape[0] for tensor in entry.tensors]
    match entry.cut:
        case Cut.REPLICATED:
            return [Piece(0, 0, 0, rows[0])]
        case Cut.ROWS | Cut.GATE_UP:
            return [Piece(i, 0, *_run(entry, n, size, rank)) for i, n in enumerate(rows)]
        case Cut.COLUMNS:
            return [Piece(0, 1, *_run(entry, entry.tensors[0].shape[1], size, rank))]
        case Cut.VOCABULARY:
            start, stop = _vocabulary_run(entry, size, rank, vocabulary_rows)
            return [Piece(0, 0, min(start, rows[0]), min(stop, rows[0]))]
        case Cut.QKV:
            if entry.groups % size and size % entry.groups:
                raise ValueError(
                    f"{entry.name}: {entry.groups} key/value heads can neither be shared out over {size} "
                    f"tensor ranks nor be divided among them"
                )
            return list(_qkv_pieces(entry, rows, *_run(entry, sum(rows), size, rank)))


def shard_shape(entry: Entry, size: int, vocabulary_rows: int | None = None) -> tuple[int, ...]:
    """Shape of one rank's shard; the same on every rank."""
    first = entry.tensors[0].shape
    if entry.cut is Cut.VOCABULARY:
        start, stop = _vocabulary_run(entry, size, 0, vocabulary_rows)
        return (stop - start, *first[1:])
    runs = pieces(entry, size, 0)
    length = sum(len(piece) for piece in runs)
    return (first[0], length) if runs[0].dim == 1 else (length, *first[1:])


def assemble(
    entry: Entry,
    size: int,
    rank: int,
    read: Callable[[Piece], torch.Tensor],
    vocabulary_rows: int | None = None,
) -> torch.Tensor:
    """Build the shard of `rank` from the pieces that `read` returns; missing vocabulary rows are zeros.

    Raises:
        ValueError: pieces of one shard differ in dtype.
    """
    runs = pieces(entry, size, rank, vocabulary_rows)
    parts = [read(piece) for piece in runs]
    dtypes = {part.dtype for part in parts}
    if len(dtypes) != 1:
        raise ValueError(f"{entry.name} is made of tensors of different dtypes: {sorted(map(str, dtypes))}")
    shard = parts[0].new_zeros(shard_shape(entry, size, vocabulary_rows))
    offset = 0
    for piece, part in zip(runs, parts, strict=True):
        shard.narrow(piece.dim, offset, len(piece)).copy_(part)
        offset += len(piece)
    return shard


def split(
    entry: Entry, tensors: Sequence[torch.Tensor], size: int, vocabulary_rows: int | None = None
) -> list[torch.Tensor]:
    """Cut an entry's Hugging Face tensors into the shards of `size` tensor ranks.

    Args:
        tensors: in the order of `entry.tensors`, with their shapes.
        vocabulary_rows: as in `pieces`.

    Raises:
        ValueError: a tensor has another shape than its entry, or cannot be cut.
    """
    for expected, tensor in zip(entry.tensors, tensors, strict=True):
        if tuple(tensor.shape) != expected.shape:
            raise ValueError(f"{expected.name} has shape {tuple(tensor.shape)}, not {expected.shape}")

    def read(piece: Piece) -> torch.Tensor:
        return tensors[piece.tensor].narrow(piece.dim, piece.start, len(piece))

    return [assemble(entry, size, rank, read, vocabulary_rows) for rank in range(size)]


def join(entry: Entry, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inverse of `split`: new tensors in the order of `entry.tensors`, padding left out.

    Args:
        shards: by tensor rank; for a `REPLICATED` entry those after the first are not looked at,
            and need not be there.

    Raises:
        ValueError: a shard has another shape than its entry asks for.
    """
    if entry.cut is Cut.REPLICATED:
        shards = shards[:1]
    size = len(shards)
    vocabulary_rows = shards[0].shape[0] * size if entry.cut is Cut.VOCABULARY else None
    expected = shard_shape(entry, size, vocabulary_rows)
    tensors = [shards[0].new_empty(tensor.shape) for tensor in entry.tensors]
    for rank, shard in enumerate(shards):
        if tuple(shard.shape) != expected:
            raise ValueError(f"{entry.name}: rank {rank} holds {tuple(shard.shape)}, not {expected}")
        offset = 0
        for piece in pieces(entry, size, rank, vocabulary_rows):
            part = shard.narrow(piece.dim, offset, len(piece))
            tensors[piece.tensor].narrow(piece.dim, piece.start, len(piece)).copy_(part)
            offset += len(piece)
    return tensors


def _run(entry: Entry, length: int, size: int, rank: int) -> tuple[int, int]:
    if length % size:
        raise ValueError(
            f"{entry.name}: {length} {'columns' if entry.cut is Cut.COLUMNS else 'rows'} "
            f"cannot be shared out equally over {size} tensor ranks"
        )
    share = length // size
    return rank * share, (rank + 1) * share


def _vocabulary_run(entry: Entry, size: int, rank: int, padded: int | None) -> tuple[int, int]:
    real = entry.tensors[0].shape[0]
    padded = padded_rows(real, size) if padded is None else padded
    if padded < real:
        raise ValueError(f"{entry.name}: {padded} padded rows cannot hold a vocabulary of {real}")
    return _run(entry, padded, size, rank)


def _qkv_pieces(entry: Entry, rows: list[int], start: int, stop: int) -> Iterator[Piece]:
    """The part between rows `start` and `stop` of [q.., k, v] laid end to end, group by group."""
    position = 0
    for group in range(entry.groups):
        for tensor, total in enumerate(rows):
            block = total // entry.groups
            low, high = max(start, position), min(stop, position + block)
            if low < high:
                shift = group * block - position
                yield Piece(tensor, 0, low + shift, high + shift)
            position += block
