"""Causal attention on torch's scaled_dot_product_attention, for Megatron-Core's local layers.

Takes rows (padded on the right, where causality alone keeps padding out) and packed sequences
(cu_seqlens), with grouped queries. Knows no weights, no rotary embedding, no communication: a
tensor rank's heads come in and go out. Made for the CPU, and serves a GPU without
transformer-engine, where torch's flash kernel takes a whole pack at once.

Letters: s tokens of a row, b rows, t tokens of a pack, n query heads,
g key/value heads, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention.varlen import varlen_attn


@dataclass
class Pack(PackedSeqParams):
    """Packed sequences whose `cu_seqlens_q` and `cu_seqlens_kv` are one tensor on the CPU.

    Megatron-Core's unfused rotary code reads every border of it in every layer; on a GPU each of
    these reads would wait for the device.
    """

    on_device: torch.Tensor | None = None
    """The same borders on the device, int32; None: there is no other device."""


class SdpaAttention(MegatronModule):
    """A core attention for Megatron-Core's layer specs. Has no parameters."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """The arguments are those that Megatron-Core builds every core attention with.

        Raises:
            ValueError: dropout, context parallelism, a sliding window or another mask is asked for.
        """
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        for asked, what in (
            (dropout, "attention dropout"),
            (config.context_parallel_size > 1, "context parallelism"),
            (config.window_size is not None, "a sliding window"),
            (config.softmax_type != "vanilla", f"softmax type {config.softmax_type}"),
            (attn_mask_type is not AttnMaskType.causal, f"mask {attn_mask_type}"),
            (attention_type != "self", f"{attention_type} attention"),
        ):
            if asked:
                raise ValueError(f"attention sdpa computes plain causal self-attention, not {what}")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [s, b, n, d], or [t, n, d] where packed; key and value with g heads alike.
            attention_mask: must be None: every mask here is causal.
            packed_seq_params: borders of the packed sequences; they cover all t tokens. On a GPU it is
                a `Pack`.

        Returns:
            [s, b, n * d], or [t, n * d].
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("attention sdpa is causal: it takes no attention_mask and no attention_bias")
        if packed_seq_params is None:
            rows = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return causal_attention(*rows, scale=self.softmax_scale).permute(2, 0, 1, 3).flatten(2)
        lengths = _lengths(packed_seq_params, query.shape[0])
        if _has_flash_kernel(query):
            return self._flash(query, key, value, packed_seq_params).flatten(1)
        # one split and one cat: their backwards touch each token once, a slice per sequence would not
        pieces = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        attended = [
            causal_attention(*(x.transpose(0, 1)[None] for x in piece), scale=self.softmax_scale)
            for piece in pieces
        ]
        return torch.cat([x[0].transpose(0, 1).flatten(1) for x in attended])

    def _flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        if not isinstance(packed, Pack) or packed.on_device is None:
            raise ValueError("attention sdpa on a GPU takes packed sequences as a Pack, with on_device set")
        attended = varlen_attn(
            query,
            key,
            value,
            packed.on_device,
            packed.on_device,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            scale=self.softmax_scale,
            window_size=(-1, 0),  # causal
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(attended, torch.Tensor)  # a tuple only where auxiliary results are asked for
        return attended


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """[b, n, s, d] from queries [b, n, s, d], keys and values [b, g, s, d]; scale None: 1 / sqrt(d)."""
    if query.device.type == "cuda" and query.dtype is torch.float32:
        # The one kernel that takes fp32 without keeping all scores takes no grouped queries.
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def _has_flash_kernel(query: torch.Tensor) -> bool:
    """Whether torch's flash attention takes it: half precision on a GPU, heads of up to 256."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cuda" and half and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0


def _lengths(packed: PackedSeqParams, tokens: int) -> list[int]:
    if packed.cu_seqlens_q is not packed.cu_seqlens_kv or packed.cu_seqlens_q_padded is not None:
        raise ValueError(
            "packed self-attention needs one cu_seqlens for queries and keys, without padded ones"
        )
    lengths = packed.cu_seqlens_q.diff().tolist()
    if sum(lengths) != tokens:
        raise ValueError(f"cu_seqlens ends at {sum(lengths)}, but {tokens} tokens are packed")
    return lengths
