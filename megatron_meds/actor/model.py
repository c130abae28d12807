"""Megatron-Core's GPTModel in the shape of a Hugging Face model, cut for this rank.

Decides layer specs, precision, fusions and the pipeline's settings. Holds random weights when it
is done: loading, gradient buffers and the optimizer come after it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_meds.actor.attention_cpu import SdpaAttention
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.rotary import RestartingRotary, inverse_frequencies
from megatron_meds.actor.settings import ActorSettings
from megatron_meds.actor.shape import ModelShape, check_layout, padded_vocabulary

log = logging.getLogger(__name__)

Attention = Literal["sdpa", "te"]


def build_model(
    shape: ModelShape, settings: ActorSettings, attention: str, mesh: Mesh, seed: int
) -> list[GPTModel]:
    """This rank's model chunks, `mesh.virtual` of them, on `mesh.device`, with seeded random weights.

    Parameters are bf16 or fp32 by `settings.precision`. A chunk's forward takes
    (input_ids [b, s], position_ids [b, s], attention_mask=None, packed_seq_params=...). Replicas get
    the same weights. With `shape.head` = value the last one ends in a `ValueHead`.

    Args:
        attention: `model.attention`: auto, sdpa or te.

    Raises:
        ValueError: the model cannot be cut into the mesh's layout, or the attention is not there;
            names the key and the remedy.
    """
    faults = list(check_layout(shape, mesh.layout))
    if faults:
        raise ValueError("\n".join(faults))
    kind = pick_attention(attention, settings, mesh)
    config = make_config(shape, settings, kind, mesh)
    model_parallel_cuda_manual_seed(seed + 100 * mesh.pipeline_rank, force_reset_rng=True)
    return [_build_chunk(shape, config, kind, mesh, chunk) for chunk in range(mesh.virtual)]


def pick_attention(attention: str, settings: ActorSettings, mesh: Mesh) -> Attention:
    """`auto` is transformer-engine where it and a GPU are and the precision is bf16 (its kernels for
    packed sequences take no fp32), else torch's attention.

    Raises:
        ValueError: what is asked for is not there, or cannot do the precision or the layout.
    """
    available = mesh.device.type == "cuda" and _has_module("transformer_engine")
    half = pick_dtype(settings, mesh.device) is torch.bfloat16
    if attention == "te" and not available:
        raise ValueError(
            "model.attention = te: needs transformer-engine and a GPU; set model.attention=sdpa without them"
        )
    if attention == "te" and not half:
        raise ValueError(
            "model.attention = te: needs actor.precision=bf16; set that, or model.attention=sdpa"
        )
    kind: Attention = "te" if available and half and attention != "sdpa" else "sdpa"
    if mesh.context_size > 1 and kind != "te":
        raise ValueError(
            f"actor.layout.context = {mesh.context_size}: needs model.attention=te and GPUs; set it to 1"
        )
    return kind


def pick_dtype(settings: ActorSettings, device: torch.device) -> torch.dtype:
    """Precision of parameters and activations."""
    if settings.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if settings.precision == "bf16" else torch.float32


def make_config(
    shape: ModelShape, settings: ActorSettings, attention: Attention, mesh: Mesh
) -> TransformerConfig:
    """Megatron-Core's configuration of that model on that mesh."""
    dtype = pick_dtype(settings, mesh.device)
    on_gpu = mesh.device.type == "cuda"
    fused = on_gpu and can_compile()
    if on_gpu and not fused:
        log.warning("no C compiler, Python headers or triton: Megatron-Core's fused functions are off")
    interleaved = mesh.virtual > 1
    full = settings.recompute == "full"
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=shape.init_std,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=mesh.tensor_size,
        sequence_parallel=mesh.layout.sequence,
        context_parallel_size=mesh.context_size,
        pipeline_model_parallel_size=mesh.pipeline_size,
        virtual_pipeline_model_parallel_size=mesh.virtual if interleaved else None,
        pipeline_model_parallel_layout=mesh.layout.stages,
        # Interleaved stages exchange several tensors at once; batched, gloo mixes up two between
        # the same pair of ranks and gradients are wrong in silence.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # Micro-batches differ in length; Megatron-Core allows that with this dispatcher only, which
        # a dense model never calls.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        # What a stage sends on is freed after sending; on the CPU the send may still read it.
        deallocate_pipeline_outputs=on_gpu,
        gradient_accumulation_fusion=on_gpu and _has_module("fused_weight_gradient_mlp_cuda"),
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        apply_rope_fusion=attention == "te",
        cuda_graph_modules=[],
        transformer_impl="transformer_engine" if attention == "te" else "local",
        recompute_granularity=None if settings.recompute == "none" else settings.recompute,
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
        # The attention kernels keep no scores, so that the MLP is what is worth computing again.
        recompute_modules=["mlp"] if settings.recompute == "selective" else None,
    )


class MarkedRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, its weight marked for Megatron-Core: under sequence parallelism each tensor
    rank sees some of the tokens, and the gradients are added up over the ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ValueHead(torch.nn.Module):
    """A critic's head, the weight [1, H] of one value a token; whole on every tensor rank.

    Zeros at first: every value is 0, whatever the layout or the seed.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each tensor rank values its own tokens, and the gradients add up.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def layer_spec(
    config: TransformerConfig, attention: Attention, chunk: int | None
) -> TransformerBlockSubmodules:
    """The decoder layers of one chunk (None: the only one) and the norm that follows the last layer."""
    if attention == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_submodules(qk_layernorm=config.qk_layernorm)
        norm = TENorm
    else:
        layer = get_gpt_layer_local_submodules(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        layer.input_layernorm = layer.pre_mlp_layernorm = norm = MarkedRMSNorm
        inside: Any = layer.self_attention.submodules
        inside.core_attention = SdpaAttention
        if config.qk_layernorm:
            inside.q_layernorm = inside.k_layernorm = MarkedRMSNorm
    count = get_num_layers_to_build(config, vp_stage=chunk)
    return TransformerBlockSubmodules(
        [ModuleSpec(TransformerLayer, submodules=layer)] * count, layer_norm=norm
    )


def _build_chunk(
    shape: ModelShape, config: TransformerConfig, attention: Attention, mesh: Mesh, index: int
) -> GPTModel:
    chunk = index if mesh.virtual > 1 else None
    first = mesh.is_first_stage and index == 0
    last = mesh.is_last_stage and index == mesh.virtual - 1
    rows, shared = padded_vocabulary(shape.vocab, mesh.tensor_size), shape.tied
    if shape.head == "value":  # the output layer that gives way is not to be of the vocabulary's size
        rows, shared = rows if first else mesh.tensor_size, first and last
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config, attention, chunk),  # type: ignore[arg-type]
        vocab_size=rows,
        max_sequence_length=shape.max_positions,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=shared,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,  # type: ignore[arg-type]
        vp_stage=chunk,
    )
    if shape.head == "value":
        model.share_embeddings_and_output_weights = False
        if last:
            model.output_layer = ValueHead(config)  # type: ignore[assignment]
    if attention == "sdpa":
        model.rotary_pos_emb = RestartingRotary(shape.head_dim, rotary_percent=1.0)
    model.rotary_pos_emb.inv_freq = inverse_frequencies(shape).to(mesh.device)
    return model.to(mesh.device)


def can_compile() -> bool:
    """Whether torch.compile, which Megatron-Core's fused functions go through, can make GPU kernels:
    triton, a C compiler that it finds, and Python's headers are there."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return _has_module("triton") and any(map(shutil.which, compilers)) and headers.is_file()


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
