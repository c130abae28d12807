"""The parameters of a live actor, found by their entries in the family table.

Looks at the modules afresh each time it is called and keeps nothing, so that no mapping can go
stale. Knows no file and no process group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.utils import unwrap_model

from megatron_meds.actor.shape import ModelShape
from megatron_meds.weights.families import Cut, Entry, entries, name_some
from megatron_meds.weights.reshard import shard_shape

_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Held:
    """A parameter of this rank: its shard of `entry`."""

    entry: Entry
    parameter: torch.nn.Parameter
    copy: bool
    """A further copy of a tied embedding (the last pipeline stage's)."""
    vocabulary_rows: int | None
    """Rows of the padded vocabulary over all tensor ranks, for a vocabulary entry."""


def held_parameters(chunks: Sequence[torch.nn.Module], shape: ModelShape, tensor_size: int) -> list[Held]:
    """Every parameter of this rank's model chunks, wrapped (DDP, Float16Module) or not.

    A layer's place in the whole model is its `layer_number - 1`, which holds for uneven and
    interleaved stages alike.

    Raises:
        ValueError: a parameter has no entry, an entry of a held layer has no parameter, or a shard
            has another shape than its entry asks for.
    """
    table = entries(shape)
    by_name = {(entry.layer, name): entry for entry in table for name in (*entry.megatron, *entry.copies)}
    held: list[Held] = []
    for chunk in unwrap_model(list(chunks)):
        for name, parameter in chunk.named_parameters():
            key = _key(chunk, name)
            if key not in by_name:
                raise ValueError(f"the {shape.family} weight table has no entry for parameter {name}")
            held.append(_hold(by_name[key], key[1], parameter, tensor_size))
    _check_complete(held, table)
    return held


def _key(chunk: torch.nn.Module, name: str) -> tuple[int | None, str]:
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return None, name
    layer = chunk.get_submodule(f"decoder.layers.{match[1]}")
    return int(layer.layer_number) - 1, match[2]  # type: ignore[arg-type]


def _hold(entry: Entry, name: str, parameter: torch.nn.Parameter, tensor_size: int) -> Held:
    rows = parameter.shape[0] * tensor_size if entry.cut is Cut.VOCABULARY else None
    expected = shard_shape(entry, tensor_size, rows)
    if tuple(parameter.shape) != expected:
        raise ValueError(
            f"parameter {entry.name} has shape {tuple(parameter.shape)}, not {expected} "
            f"(its part of {name_some([t.name for t in entry.tensors])} at tensor size {tensor_size})"
        )
    return Held(entry, parameter, copy=name in entry.copies, vocabulary_rows=rows)


def _check_complete(held: Sequence[Held], table: Sequence[Entry]) -> None:
    """Every entry of a layer that is here must have been found (a missing bias or norm would
    otherwise be dropped in silence)."""
    present = {h.entry for h in held}
    layers = {h.entry.layer for h in held if h.entry.layer is not None}
    absent = [entry.name for entry in table if entry.layer in layers and entry not in present]
    if absent:
        raise ValueError(f"the model has no parameter {name_some(absent)}, which its weight table asks for")
