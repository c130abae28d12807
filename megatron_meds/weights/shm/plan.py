"""Which tensor lies where in the buffer: worked out on both sides from the same list.

The buffer is cut into slots of equal size. Bucket k goes to slot k modulo the slots, so that the
sender may fill one while the receiver loads from the other. Pure arithmetic: no memory, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes."""


@dataclass(frozen=True)
class Place:
    """One tensor in its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name of it, such as `bfloat16`."""
    offset: int
    """Bytes from the start of the buffer."""
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """The buffer and every bucket that passes through it in one sync."""

    slot_bytes: int
    slots: int
    buckets: tuple[tuple[Place, ...], ...]

    @property
    def size(self) -> int:
        """Bytes of the whole buffer."""
        return self.slot_bytes * self.slots


@dataclass(frozen=True)
class Entry:
    """A tensor to be placed."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def make_plan(entries: Sequence[Entry], bucket_bytes: int) -> Plan:
    """Pack the tensors, in their order, into buckets of at most `bucket_bytes`.

    A tensor larger than that gets a bucket of its own, and the slots are large enough for it. Two
    slots, or one where a single bucket holds everything.

    Raises:
        ValueError: there is no tensor, or a name appears twice.
    """
    if not entries:
        raise ValueError("there is no tensor to send")
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"tensor {twice} is listed twice")
    groups: list[list[Entry]] = []
    filled = 0
    for entry in entries:
        size = _aligned(entry.nbytes)
        if not groups or filled + size > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += size
    slot_bytes = max(sum(_aligned(entry.nbytes) for entry in group) for group in groups)
    slots = min(len(groups), 2)
    return Plan(
        slot_bytes,
        slots,
        tuple(_place(group, (k % slots) * slot_bytes) for k, group in enumerate(groups)),
    )


def _place(group: Sequence[Entry], offset: int) -> tuple[Place, ...]:
    places = []
    for entry in group:
        places.append(Place(entry.name, entry.shape, entry.dtype, offset, entry.nbytes))
        offset += _aligned(entry.nbytes)
    return tuple(places)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
