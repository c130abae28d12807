"""Rotary positions: the inverse frequencies a Hugging Face model uses, and positions that restart
with each packed sequence. Knows no attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_meds.actor.shape import ModelShape, RopeScaling


def inverse_frequencies(shape: ModelShape) -> torch.Tensor:
    """[head_dim / 2] fp32 on the CPU: radians per position, `rope_scaling` applied.

    Megatron-Core's own scaling takes a factor only and fixes llama3's other numbers.
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    frequencies = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: wavelengths above the long bound are stretched by the factor, those below the short
    bound kept, and in between the two are blended by where original_positions / wavelength lies."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_positions / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


class RestartingRotary(RotaryEmbedding):
    """Megatron-Core's rotary embedding, which for a pack gives an angle per token.

    Megatron-Core's unfused code then turns all tokens at once, where it would otherwise copy each
    sequence into place, at a cost that grows with tokens x sequences in the backward pass.
    """

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Any:
        """What `forward` needs to know of a batch: its length, or the whole pack."""
        if packed_seq_params is not None:
            return packed_seq_params
        return super().get_rotary_seq_len(
            inference_context, transformer, transformer_input, transformer_config, **options
        )

    def forward(self, max_seq_len: Any, *args: Any, **options: Any) -> torch.Tensor:
        """Angles [s, 1, 1, head_dim] by position, or [t, 1, 1, head_dim] by token of a pack."""
        if not isinstance(max_seq_len, PackedSeqParams):
            return super().forward(max_seq_len, *args, **options)
        borders = max_seq_len.cu_seqlens_q
        starts = borders[:-1].repeat_interleave(borders.diff())
        positions = torch.arange(len(starts), device=starts.device) - starts
        half = torch.outer(positions.to(self.inv_freq), self.inv_freq)
        return torch.cat((half, half), dim=-1)[:, None, None, :]
