"""Random-weight Hugging Face folders of every supported family, small enough for CPU ranks.

Made with transformers, so that they are an independent reference. The vocabulary (151) divides by
no tensor-parallel size, so that padded rows are always in play.
"""

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

KINDS = ("llama", "llama_tied", "mistral", "qwen2", "qwen2_untied", "qwen3", "qwen3_tied")
VOCABULARY = 151

_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

_OWN = {"qwen3": {"head_dim": 32}, "mistral": {"sliding_window": None}}
"""What a family's configuration is told beside the sizes."""


def is_tied(kind: str) -> bool:
    """Whether the kind shares its embedding with its output layer (qwen2 does, as the small ones do)."""
    return kind == "qwen2" or kind.endswith("_tied")


def tiny_model(
    kind: str,
    folder: Path,
    *,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    max_shard_size: str = "5GB",
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a model of `kind` (one of KINDS) to `folder` and return the folder.

    Hidden 64, intermediate 96, head_dim 16 (qwen3: 32, which is not hidden / heads). Weights are
    seeded; biases and norms are random too, so that a missing one shows.
    """
    family = kind.split("_", maxsplit=1)[0]
    config_class, model_class = _FAMILIES[family]
    own = _OWN.get(family, {})
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=is_tied(kind),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        **own,
    )
    model = model_class(config)
    _randomise(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def _randomise(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.1 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
