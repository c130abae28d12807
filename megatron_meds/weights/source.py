"""What a sync asks of the actor: its weights as a list and as a stream. Knows no implementation.

`LiveWeights` is one; a state dict in memory is another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


class Listed(Protocol):
    """A line of the manifest."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class Source(Protocol):
    """Weights under their Hugging Face names."""

    def manifest(self) -> Sequence[Listed]:
        """Every tensor, in the order of the stream; without moving data."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """A fresh pass. A collective of the ranks that hold the weights: each steps it to its end.
        The tensors are there on the sender only. Nothing comes on ranks that take no part."""
        ...


@dataclass(frozen=True)
class Run:
    """`tensor` is what rows (dim 0) or columns (dim 1) from `start` on of tensor `name` hold."""

    name: str
    dim: int
    start: int
    tensor: torch.Tensor


@runtime_checkable
class Scattered(Source, Protocol):
    """A source whose ranks can each write their own part of every tensor, with no gathering."""

    @property
    def takes_part(self) -> bool:
        """Whether this rank holds any part."""
        ...

    def runs(self) -> Iterator[Run]:
        """This rank's part: the ranks' runs together are every element of every tensor, once. No
        communication. The tensors are views of the live weights, in the dtype in which they are held."""
        ...


class Ranks(Protocol):
    """What a sync asks of the mesh."""

    @property
    def is_sender(self) -> bool: ...

    def all_gather(self, value: Any, /) -> list[Any]: ...


class ManifestError(ValueError):
    """The stream is not what the manifest says; names the tensor."""


class Checked:
    """A pass over a source that can be ended early without leaving the other ranks behind.

    The sender gives each tensor, after comparing it with the manifest, to its consumer. If that
    fails, the pass still goes on to its end, because other ranks are in the collectives of the
    stream; then the failure is raised.
    """

    def __init__(self, source: Source, is_sender: bool) -> None:
        self.source = source
        self.is_sender = is_sender

    def feed(self, consume: Callable[[str, torch.Tensor], None]) -> None:
        """Step through the whole stream; on the sender, `consume(name, tensor)` for each.

        Raises:
            ManifestError: name, shape, dtype or count differ from the manifest.
            Exception: whatever `consume` raised first.
        """
        expected = list(self.source.manifest())
        failure: Exception | None = None
        count = 0
        for name, tensor in self.source.tensors():
            if self.is_sender and failure is None:
                try:
                    consume(name, self._compared(name, tensor, expected, count))
                except Exception as error:  # noqa: BLE001 - raised below, once the stream has ended
                    failure = error
            count += 1
        if failure is not None:
            raise failure
        if self.is_sender and count != len(expected):
            raise ManifestError(
                f"the stream ended after {count} tensors, the manifest has {len(expected)}: "
                f"{expected[count].name} did not come"
            )

    @staticmethod
    def _compared(
        name: str, tensor: torch.Tensor | None, expected: Sequence[Listed], index: int
    ) -> torch.Tensor:
        if index >= len(expected):
            raise ManifestError(f"tensor {name} came after the last one of the manifest")
        listed = expected[index]
        if tensor is None:
            raise ManifestError(f"tensor {name} is not there on the sender")
        found = (name, tuple(tensor.shape), tensor.dtype)
        if found != (listed.name, tuple(listed.shape), listed.dtype):
            raise ManifestError(
                f"tensor {index} of the stream is {name} {tuple(tensor.shape)} {tensor.dtype}; the manifest "
                f"has {listed.name} {tuple(listed.shape)} {listed.dtype} there"
            )
        return tensor
