"""How many parameters a rank holds, by the model's shape and the layout. Exact; knows no bytes.

Letters: H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_meds.actor.settings import LayoutSettings
from megatron_meds.actor.shape import ModelShape, padded_vocabulary, split_layers


@dataclass(frozen=True)
class StageParameters:
    """What one rank of a pipeline stage holds."""

    layers: int
    layer: int
    """Parameters of one decoder layer, this tensor rank's share."""
    embedding: int
    """Of the embedding, where the stage has it (a tied head's copy on the last stage too)."""
    head: int
    """Of the output layer or value head, and the final norm."""

    @property
    def total(self) -> int:
        return self.layers * self.layer + self.embedding + self.head


def layer_parameters(shape: ModelShape, tensor: int) -> int:
    """Of one decoder layer on one tensor rank."""
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim // tensor
    found = attention * shape.hidden + shape.heads * shape.head_dim * shape.hidden // tensor
    if shape.qkv_bias:
        found += attention
    if shape.qk_norm:
        found += 2 * shape.head_dim
    return found + 3 * shape.hidden * shape.intermediate // tensor + 2 * shape.hidden


def stage_parameters(shape: ModelShape, layout: LayoutSettings) -> list[StageParameters]:
    """Of a rank of each pipeline stage, all its chunks."""
    rows = padded_vocabulary(shape.vocab, layout.tensor) // layout.tensor
    found = []
    for stage, chunks in enumerate(split_layers(shape.layers, layout)):
        first, last = stage == 0, stage == layout.pipeline - 1
        embedding = rows * shape.hidden if first else 0
        head = 0
        if last:
            head += shape.hidden  # the final norm
            if shape.head == "value":
                head += shape.hidden
            elif not shape.tied or not first:  # a tied head on a stage of its own is a copy
                head += rows * shape.hidden
        found.append(
            StageParameters(sum(map(len, chunks)), layer_parameters(shape, layout.tensor), embedding, head)
        )
    return found


def whole_parameters(shape: ModelShape) -> int:
    """Of the model, without padding."""
    head = 0 if shape.tied else (shape.hidden if shape.head == "value" else shape.vocab * shape.hidden)
    return shape.layers * layer_parameters(shape, 1) + shape.vocab * shape.hidden + shape.hidden + head
