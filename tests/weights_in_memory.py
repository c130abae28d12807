"""A source of weights without an actor: a Hugging Face state dict; and ranks without processes."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Listed:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class StateDict:
    """Weights in memory, streamed in their order; what is in `weights` when asked counts."""

    def __init__(self, weights: Mapping[str, torch.Tensor], is_sender: bool = True) -> None:
        self.weights = dict(weights)
        self.is_sender = is_sender
        self.passes = 0
        """Streams that were stepped to their end."""

    def manifest(self) -> list[Listed]:
        return [Listed(name, tuple(t.shape), t.dtype) for name, t in self.weights.items()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, tensor in self.weights.items():
            yield name, tensor if self.is_sender else None
        self.passes += 1


class OneRank:
    """The mesh of a single process."""

    is_sender = True

    def all_gather(self, value: object) -> list:
        return [value]


class ThreadRanks:
    """A rank of several that are threads of this process; the first is the sender."""

    def __init__(self, rank: int, slots: list, barrier: threading.Barrier) -> None:
        self.rank, self.is_sender = rank, rank == 0
        self._slots, self._barrier = slots, barrier

    @classmethod
    def make(cls, size: int) -> list["ThreadRanks"]:
        barrier, slots = threading.Barrier(size, timeout=60), [None] * size
        return [cls(rank, slots, barrier) for rank in range(size)]

    def all_gather(self, value: object) -> list:
        self._slots[self.rank] = value
        self._barrier.wait()
        gathered = list(self._slots)
        self._barrier.wait()
        return gathered
