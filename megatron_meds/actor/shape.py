"""The shape of a model, read from its Hugging Face config.json, and the layouts it can be cut into.

Reads numbers and refuses what the actor would compute wrongly. Needs no torch, builds nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_meds.actor.settings import LayoutSettings
from megatron_meds.errors import UserError

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""`model_type` of config.json -> the architecture it must name."""


class UnsupportedModel(UserError, ValueError):  # noqa: N818 - reads as what it says
    """A config.json that the actor cannot honour; the message names the key."""


@dataclass(frozen=True)
class RopeScaling:
    """How the inverse frequencies of the rotary embedding are stretched."""

    kind: Literal["linear", "llama3"]
    """`linear`: all divided by `factor`; `llama3`: long wavelengths divided, short ones kept."""
    factor: float
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_positions / this are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_positions / this are kept."""
    original_positions: int = 8192
    """llama3: positions the model was trained on before."""


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder of the Llama kind: RMSNorm, rotary embedding, grouped attention, SwiGLU."""

    family: Literal["llama", "mistral", "qwen2", "qwen3"]
    layers: int
    hidden: int
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads."""
    head_dim: int
    """Not always hidden / heads."""
    intermediate: int
    """Width of the gated MLP."""
    vocab: int
    """Rows of the embedding, before any padding."""
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    """RMSNorm over each query and key head."""
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    """Longest sequence the model was made for, tokens."""
    init_std: float
    """Standard deviation of random weights."""
    head: Literal["vocabulary", "value"] = "vocabulary"
    """What follows the final norm: logits, or one value a token (a critic's)."""


def with_value_head(shape: ModelShape) -> ModelShape:
    """A critic of that model: the same layers, and a value head of its own in place of the output layer."""
    return replace(shape, tied=False, head="value")


def read_model_config(folder: Path) -> ModelShape:
    """Read config.json of a Hugging Face folder, as transformers 4 or 5 writes it.

    Raises:
        FileNotFoundError: there is no config.json.
        UnsupportedModel: a key asks for something the actor does not compute, or is missing.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: the model folder must hold a Hugging Face config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{path} holds no JSON object")
    return shape_of(config)


def shape_of(config: dict[str, Any]) -> ModelShape:
    """The shape that the contents of a config.json describe.

    Raises:
        UnsupportedModel: see `read_model_config`.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(f"config.json: model_type = {family!r}; supported are {', '.join(FAMILIES)}")
    _refuse_other_kinds(config, family)
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    layers = _count(config, "num_hidden_layers")
    _refuse_windows(config, family, layers)
    head_dim = _head_dim(config, family, hidden, heads)
    kv_heads = _count(config, "num_key_value_heads", default=heads if family == "llama" else None)
    if heads % kv_heads:
        raise UnsupportedModel(
            f"config.json: num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}"
        )
    positions = _count(config, "max_position_embeddings", default=2048 if family == "llama" else 32768)
    theta, scaling = _rope(config, positions)
    return ModelShape(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_count(config, "intermediate_size"),
        vocab=_count(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=positions,
        init_std=float(config.get("initializer_range", 0.02)),
    )


def _count(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModel(f"config.json: {key} is missing")
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {key} = {value!r} is no positive whole number")
    return value


def _head_dim(config: dict[str, Any], family: str, hidden: int, heads: int) -> int:
    if config.get("head_dim") is None and family == "qwen3":
        return 128  # what the architecture has where the key is left out
    if config.get("head_dim") is None and hidden % heads:
        raise UnsupportedModel(
            f"config.json: hidden_size = {hidden} is no multiple of num_attention_heads = {heads}"
        )
    head_dim = _count(config, "head_dim", default=hidden // heads)
    if head_dim % 2:
        raise UnsupportedModel(f"config.json: head_dim = {head_dim} is odd, rotary embeddings need pairs")
    return head_dim


def _refuse_other_kinds(config: dict[str, Any], family: str) -> None:
    """Keys that change what the model computes, at values the actor does not compute."""
    named = config.get("architectures") or [FAMILIES[family]]
    if named != [FAMILIES[family]]:
        raise UnsupportedModel(
            f"config.json: architectures = {named}; a {family} model must be {FAMILIES[family]}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"config.json: hidden_act = {config['hidden_act']!r}; only silu is supported")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UnsupportedModel(f"config.json: {key} = {config[key]}; biases there are not supported")
    if config.get("attention_dropout"):
        raise UnsupportedModel(f"config.json: attention_dropout = {config['attention_dropout']}; set it to 0")
    if config.get("quantization_config"):
        raise UnsupportedModel("config.json: quantization_config is set; train from unquantised weights")


def _refuse_windows(config: dict[str, Any], family: str, layers: int) -> None:
    if family == "mistral" and config.get("sliding_window") is not None:
        raise UnsupportedModel(
            f"config.json: sliding_window = {config['sliding_window']}; sliding windows are not supported. A "
            "model whose sequences stay shorter can be used with null there"
        )
    kinds = config.get("layer_types")
    if kinds is not None:
        others = sorted(set(kinds) - {"full_attention"})
        if others:
            raise UnsupportedModel(
                f"config.json: layer_types holds {others}; only full_attention is supported"
            )
    elif config.get("use_sliding_window") and config.get("max_window_layers", 28) < layers:
        raise UnsupportedModel("config.json: use_sliding_window = true; sliding windows are not supported")


def _rope(config: dict[str, Any], positions: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModel(f"config.json: {key} differs by layer type, which is not supported")
    theta = float(rope.get("rope_theta", config.get("rope_theta") or 10000.0))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    if partial != 1.0:
        raise UnsupportedModel(f"config.json: partial_rotary_factor = {partial}; only 1 is supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _number(rope, key, "factor"))
    if kind == "llama3":
        original = config.get("original_max_position_embeddings")
        original = original or rope.get("original_max_position_embeddings") or positions
        return theta, RopeScaling(
            "llama3",
            _number(rope, key, "factor"),
            _number(rope, key, "low_freq_factor"),
            _number(rope, key, "high_freq_factor"),
            int(original),
        )
    raise UnsupportedModel(
        f"config.json: {key}.rope_type = {kind!r}; supported are default, linear and llama3. A model that "
        "works without the scaling at your lengths can be used by removing it there"
    )


def _number(rope: dict[str, Any], key: str, name: str) -> float:
    value = rope.get(name)
    if not isinstance(value, int | float) or value <= 0:
        raise UnsupportedModel(f"config.json: {key}.{name} = {value!r} is no positive number")
    return float(value)


def check_layout(shape: ModelShape, layout: LayoutSettings) -> Iterator[str]:
    """Why this model cannot be cut into that layout: a line per fault, with its key and the remedy.

    Nothing is yielded where it can. Ranks, batches and devices are not looked at.
    """
    tensor = layout.tensor
    for what, count in (("attention heads", shape.heads), ("MLP columns", shape.intermediate)):
        if count % tensor:
            yield (
                f"actor.layout.tensor = {tensor}: does not divide the model's {count} {what}; "
                f"choose one of {_common(shape)}"
            )
    if shape.kv_heads % tensor and tensor % shape.kv_heads:
        yield (
            f"actor.layout.tensor = {tensor}: the model's {shape.kv_heads} key/value heads can neither be "
            f"divided by it nor divide it; choose one of {_common(shape)}"
        )
    if layout.sequence and tensor == 1:
        yield "actor.layout.sequence = true: needs actor.layout.tensor of 2 or more; set that, or drop it"
    if layout.virtual > 1 and layout.pipeline == 1:
        yield (
            f"actor.layout.virtual = {layout.virtual}: needs actor.layout.pipeline of 2 or more; "
            "set that, or virtual to 1"
        )
    try:
        split_layers(shape.layers, layout)
    except ValueError as error:
        yield str(error)


def _common(shape: ModelShape) -> list[int]:
    """Tensor sizes that the model can be cut into."""
    return [
        n
        for n in range(1, shape.heads + 1)
        if not (shape.heads % n or shape.intermediate % n or (shape.kv_heads % n and n % shape.kv_heads))
    ]


def padded_vocabulary(vocab: int, tensor: int) -> int:
    """Rows of the embedding over all tensor ranks: each rank gets equally many, a multiple of 8
    (what tensor cores work on)."""
    return -(-vocab // (8 * tensor)) * 8 * tensor


def split_layers(layers: int, layout: LayoutSettings) -> list[list[range]]:
    """Decoder layers (0-based) of each pipeline stage, by its chunks: result[stage][chunk].

    Chunk c of stage s follows chunk c of stage s - 1, and the last stage's chunk c is followed by
    the first stage's chunk c + 1.

    Raises:
        ValueError: the layers do not divide, or `stages` is not a whole description; names the key.
    """
    parts = layout.pipeline * layout.virtual
    if layout.stages is None:
        if layers % parts:
            what = f"actor.layout.pipeline = {layout.pipeline}"
            what += f" x virtual = {layout.virtual}" if layout.virtual > 1 else ""
            raise ValueError(
                f"{what}: {layers} layers do not divide into {parts} equal parts; change them, "
                "or describe uneven parts in actor.layout.stages"
            )
        counts = [layers // parts] * parts
    else:
        counts = _parse_stages(layout.stages, layers, parts)
    ends = [sum(counts[: i + 1]) for i in range(parts)]
    runs = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return [runs[stage :: layout.pipeline] for stage in range(layout.pipeline)]


def _parse_stages(stages: str, layers: int, parts: int) -> list[int]:
    """Layers of each part of megatron's notation, `(tt|)*2` and `t*3` unrolled as it does."""
    where = f"actor.layout.stages = {stages!r}"
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), stages.replace(",", ""))
    text = re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    strange = sorted(set(text) - set("EtL|"))
    if strange:
        raise ValueError(
            f"{where}: {strange} mean nothing here; use E (embedding), t (layer), L (head), |, *, ()"
        )
    split = text.split("|")
    if len(split) != parts:
        raise ValueError(
            f"{where}: describes {len(split)} parts, actor.layout.pipeline x virtual are {parts}; "
            "separate that many by |"
        )
    whole = "".join(split)
    if not (
        split[0].startswith("E") and split[-1].endswith("L") and whole.count("E") == whole.count("L") == 1
    ):
        raise ValueError(f"{where}: must begin with its only E and end with its only L")
    if whole.count("t") != layers:
        raise ValueError(f"{where}: holds {whole.count('t')} layers, the model has {layers}")
    return [part.count("t") for part in split]
