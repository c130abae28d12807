"""Which Megatron parameter is made of which Hugging Face tensors, one table per model family.

Pure data: knows neither torch nor Megatron nor how a tensor is cut (reshard.py does the cutting,
live.py finds the parameters).

Letters of a tensor's shape: V vocabulary, H hidden, Q query heads x head_dim,
K key/value heads x head_dim, D head_dim, I intermediate.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_meds.actor.shape import ModelShape


class Cut(StrEnum):
    """How a parameter lies over the tensor-parallel ranks."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    ROWS = "rows"
    """Equal runs of rows (a column-parallel linear layer; its bias likewise)."""
    COLUMNS = "columns"
    """Equal runs of columns (a row-parallel linear layer)."""
    VOCABULARY = "vocabulary"
    """Equal runs of rows after rows of zeros have filled the vocabulary up to the padded one."""
    QKV = "qkv"
    """Rows in Megatron's interleave, per key/value head [its query heads, key, value]; then equal runs."""
    GATE_UP = "gate_up"
    """On each rank its run of the gate's rows, then its run of the up projection's."""


@dataclass(frozen=True)
class Rule:
    """One line of a family's table."""

    megatron: tuple[str, ...]
    """Names within the layer (or the model): local layers first, then transformer-engine's where
    it fuses a norm into the linear layer that follows."""
    hf: tuple[tuple[str, str], ...]
    """(name within the layer or the model, shape in letters), in the order in which they are joined."""
    cut: Cut


INPUT_NORM = Rule(
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    (("input_layernorm.weight", "H"),),
    Cut.REPLICATED,
)
QKV = Rule(
    ("self_attention.linear_qkv.weight",),
    (
        ("self_attn.q_proj.weight", "QH"),
        ("self_attn.k_proj.weight", "KH"),
        ("self_attn.v_proj.weight", "KH"),
    ),
    Cut.QKV,
)
QKV_BIAS = Rule(
    ("self_attention.linear_qkv.bias",),
    (("self_attn.q_proj.bias", "Q"), ("self_attn.k_proj.bias", "K"), ("self_attn.v_proj.bias", "K")),
    Cut.QKV,
)
Q_NORM = Rule(("self_attention.q_layernorm.weight",), (("self_attn.q_norm.weight", "D"),), Cut.REPLICATED)
K_NORM = Rule(("self_attention.k_layernorm.weight",), (("self_attn.k_norm.weight", "D"),), Cut.REPLICATED)
ATTENTION_OUTPUT = Rule(
    ("self_attention.linear_proj.weight",), (("self_attn.o_proj.weight", "HQ"),), Cut.COLUMNS
)
MLP_NORM = Rule(
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    (("post_attention_layernorm.weight", "H"),),
    Cut.REPLICATED,
)
GATE_UP = Rule(
    ("mlp.linear_fc1.weight",),
    (("mlp.gate_proj.weight", "IH"), ("mlp.up_proj.weight", "IH")),
    Cut.GATE_UP,
)
DOWN = Rule(("mlp.linear_fc2.weight",), (("mlp.down_proj.weight", "HI"),), Cut.COLUMNS)

EMBEDDING = Rule(
    ("embedding.word_embeddings.weight",), (("model.embed_tokens.weight", "VH"),), Cut.VOCABULARY
)
FINAL_NORM = Rule(("decoder.final_layernorm.weight",), (("model.norm.weight", "H"),), Cut.REPLICATED)
OUTPUT = Rule(("output_layer.weight",), (("lm_head.weight", "VH"),), Cut.VOCABULARY)
VALUE = Rule(("output_layer.weight",), (("score.weight", "1H"),), Cut.REPLICATED)

EMBEDDING_NAME = EMBEDDING.hf[0][0]
HEAD_NAME = OUTPUT.hf[0][0]
VALUE_NAME = VALUE.hf[0][0]
"""A critic's value head, under the name that transformers gives a head of one output."""


@dataclass(frozen=True)
class Family:
    """One architecture: the parameters of a decoder layer, in the order in which they are exported."""

    layer: tuple[Rule, ...]
    derived: tuple[str, ...] = ()
    """Ends of tensor names that old checkpoints store although they follow from the config."""


FAMILIES: dict[str, Family] = {
    "llama": Family(
        layer=(INPUT_NORM, QKV, ATTENTION_OUTPUT, MLP_NORM, GATE_UP, DOWN),
        derived=("self_attn.rotary_emb.inv_freq",),
    ),
    "mistral": Family(
        layer=(INPUT_NORM, QKV, ATTENTION_OUTPUT, MLP_NORM, GATE_UP, DOWN),
    ),
    "qwen2": Family(
        layer=(INPUT_NORM, QKV, QKV_BIAS, ATTENTION_OUTPUT, MLP_NORM, GATE_UP, DOWN),
        derived=("self_attn.rotary_emb.inv_freq",),
    ),
    "qwen3": Family(
        layer=(INPUT_NORM, QKV, Q_NORM, K_NORM, ATTENTION_OUTPUT, MLP_NORM, GATE_UP, DOWN),
    ),
}


@dataclass(frozen=True)
class HfTensor:
    """A tensor of the Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A rule applied to one layer of one model: a Megatron parameter and what it is made of."""

    layer: int | None
    """Layer over the whole model, 0-based; None outside the layers."""
    megatron: tuple[str, ...]
    """Names the parameter may have within its layer, or within the GPTModel."""
    tensors: tuple[HfTensor, ...]
    cut: Cut
    groups: int
    """Key/value heads: the number of groups of the QKV interleave."""
    copies: tuple[str, ...] = ()
    """Names of further copies of it: loaded with it, never exported."""

    @property
    def name(self) -> str:
        """Its name in messages: Megatron's, with the layer counted over the whole model."""
        inside = self.megatron[0]
        return inside if self.layer is None else f"decoder.layers.{self.layer}.{inside}"


def entries(shape: ModelShape) -> list[Entry]:
    """Every parameter of the model, in the one order in which weights are exported: embedding,
    layers, final norm, output layer. A tied model has no output layer; its embedding may have a
    copy of that name on the last pipeline stage. A critic has its value head there.

    Raises:
        ValueError: the family has no table, or its table contradicts the config's biases or norms.
    """
    family = _family(shape)
    embedding = _apply(EMBEDDING, shape, None, copies=OUTPUT.megatron if shape.tied else ())
    layers = [_apply(rule, shape, layer) for layer in range(shape.layers) for rule in family.layer]
    head = VALUE if shape.head == "value" else OUTPUT
    outputs = [] if shape.tied else [_apply(head, shape, None)]
    return [embedding, *layers, _apply(FINAL_NORM, shape, None), *outputs]


def check_names(names: Collection[str], shape: ModelShape, folder: Path) -> None:
    """Refuse a checkpoint that lacks tensors, or stores ones that the model has no place for.

    A tied model may store its output layer, and an old checkpoint what follows from the config. A
    critic has no place for an output layer, and its value head is in no checkpoint.

    Args:
        names: of the tensors that `folder` stores.

    Raises:
        ValueError: naming the tensors, and what to do.
    """
    expected = {tensor.name for entry in entries(shape) for tensor in entry.tensors} - {VALUE_NAME}
    missing = sorted(expected.difference(names))
    if missing == [HEAD_NAME]:
        raise ValueError(
            f"{folder} has no {HEAD_NAME}, though its config.json says that embeddings are not tied. "
            f'If the model shares its embedding, set "tie_word_embeddings": true there.'
        )
    if missing:
        raise ValueError(f"{folder} lacks {name_some(missing)}")
    derived = _family(shape).derived
    unexpected = sorted(n for n in set(names) - expected - {HEAD_NAME} if not n.endswith(derived))
    if unexpected:
        raise ValueError(
            f"{folder} has tensors that a {shape.family} model with its config.json has no place for: "
            f"{name_some(unexpected)}"
        )


def name_some(names: Collection[str], limit: int = 5) -> str:
    """The first few of many names, for a message."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(list(names)[:limit]) + rest


def _family(shape: ModelShape) -> Family:
    if shape.family not in FAMILIES:
        raise ValueError(f"no weight table for model family {shape.family!r}; there are {sorted(FAMILIES)}")
    family = FAMILIES[shape.family]
    for setting, stated, rule in (
        ("QKV biases", shape.qkv_bias, QKV_BIAS),
        ("q/k norms", shape.qk_norm, Q_NORM),
    ):
        if stated != (rule in family.layer):
            has = "has" if stated else "has no"
            raise ValueError(
                f"this {shape.family} config {has} {setting}, which its weight table contradicts"
            )
    return family


def _apply(rule: Rule, shape: ModelShape, layer: int | None, copies: tuple[str, ...] = ()) -> Entry:
    sizes = {
        "V": shape.vocab,
        "H": shape.hidden,
        "Q": shape.heads * shape.head_dim,
        "K": shape.kv_heads * shape.head_dim,
        "D": shape.head_dim,
        "I": shape.intermediate,
        "1": 1,
    }
    prefix = "" if layer is None else f"model.layers.{layer}."
    tensors = tuple(HfTensor(prefix + name, tuple(sizes[x] for x in letters)) for name, letters in rule.hf)
    return Entry(layer, rule.megatron, tensors, rule.cut, shape.kv_heads, copies)
