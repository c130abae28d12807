"""One call of megatron's pipeline schedule over a list of micro-batches.

Knows how micro-batches enter the model and that replicas must agree on their number; not what is
computed from the hidden states (the caller's output processor) nor from its result (the loss function).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config

from megatron_meds.actor.attention_cpu import Pack
from megatron_meds.actor.batches import MicroBatch, count_for, filler, make_micro_batches
from megatron_meds.actor.head import token_logprobs
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.settings import ActorSettings
from megatron_meds.trajectory import Trajectory

OutputProcessor = Callable[..., torch.Tensor]
"""Keyword arguments of megatron's `output_processor`, with the MicroBatch as `context`."""


def micro_batches_for(
    trajectories: Sequence[Trajectory], settings: ActorSettings, mesh: Mesh
) -> list[MicroBatch]:
    """This replica's micro-batches on its device, equally many on every replica.

    Counts are agreed by an all-reduce over replicas; a replica with fewer is filled up with empty
    ones (interleaved pipelines take a multiple of their stages). Collective over all ranks.
    """
    multiple = mesh.tensor_size if settings.layout.sequence else 1
    uniform = mesh.device.type == "cuda" and settings.batching == "packed"
    batches = make_micro_batches(
        trajectories,
        budget=settings.tokens_per_micro_batch,
        batching=settings.batching,
        multiple=multiple,
        uniform=uniform,
    )
    count = torch.tensor(len(batches), device=mesh.device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    total = count_for(int(count), mesh.pipeline_size, mesh.virtual > 1)
    shape = batches[0].shape if batches and uniform else (1, multiple)
    batches += [filler(shape, settings.batching) for _ in range(total - len(batches))]
    return [batch.to(mesh.device) for batch in batches]


def run_schedule(
    chunks: list[MegatronModule],
    batches: Sequence[MicroBatch],
    processor: OutputProcessor,
    loss: Callable[..., Any],
    *,
    forward_only: bool,
    watch: Callable[[MicroBatch], None] | None = None,
) -> list[Any]:
    """Forward (and backward) through the pipeline.

    Args:
        processor: turns hidden states into what `loss` reads; called on the last stage only.
        loss: `(micro_batch, output) -> object` when `forward_only`, else
            `-> (scalar to minimise, object)`.
        watch: told of every micro-batch right before it enters a model chunk, on every stage.

    Returns:
        What `loss` returned for each micro-batch, in order; [] on other stages than the last.
    """
    config = get_model_config(chunks[0])
    shapes = {batch.shape for batch in batches}
    rows, width = max(shapes, key=lambda shape: shape[0] * shape[1])
    config.variable_seq_lengths = len(shapes) > 1  # equal shapes need no exchange between stages

    def forward_step(iterator, model):
        batch: MicroBatch = next(iterator)
        if watch is not None:
            watch(batch)
        output = model(
            batch.tokens_bs,
            batch.positions_bs,
            None,
            packed_seq_params=_packed_parameters(batch, config.transformer_impl),
            output_processor=processor,
            output_processor_context=batch,
        )

        def compute(output_tensor: torch.Tensor, non_loss_data: bool = False):
            if non_loss_data:
                return loss(batch, output_tensor)
            value, report = loss(batch, output_tensor)
            return value, torch.zeros((), dtype=torch.int, device=value.device), report

        return output, compute

    iterators = [iter(batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators,
        model=chunks,  # type: ignore[arg-type]
        num_microbatches=len(batches),
        seq_length=width,
        micro_batch_size=rows,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def logprob_processor(settings: ActorSettings, vocabulary: int, temperature: float) -> OutputProcessor:
    """An output processor that returns fp32 [2, N]: log-probabilities and entropies of the
    micro-batch's response tokens."""

    def process(*, hidden_states, output_layer, output_weight, context: MicroBatch, config, **_):
        if config.sequence_parallel:  # each rank's head adds its part of the gradient: reduce-scatter
            hidden_sbH = mappings.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True
            )
        else:
            hidden_sbH = mappings.copy_to_tensor_model_parallel_region(hidden_states)
        hidden_NH = hidden_sbH.flatten(0, 1).index_select(0, context.select_N)
        weight_VH = output_layer.weight if output_weight is None else output_weight
        logprobs, entropy = token_logprobs(
            hidden_NH,
            weight_VH,
            context.targets_N,
            temperature=temperature,
            chunk=settings.head_chunk,
            vocabulary=vocabulary,
            group=parallel_state.get_tensor_model_parallel_group(),  # type: ignore[arg-type]
        )
        return torch.stack([logprobs, entropy])

    return process


def value_processor(*, hidden_states, output_layer, context: MicroBatch, config, **_) -> torch.Tensor:
    """An output processor of a critic: fp32 [1, N], the values before the micro-batch's response tokens."""
    values_sb = torch.nn.functional.linear(hidden_states.float(), output_layer.weight.float())[..., 0]
    if config.sequence_parallel:  # every rank computes the whole loss: each takes its tokens' gradient
        values_sb = mappings.gather_from_sequence_parallel_region(
            values_sb, tensor_parallel_output_grad=False
        )
    return values_sb.flatten(0, 1).index_select(0, context.select_N)[None]


def _packed_parameters(batch: MicroBatch, layers: str) -> PackedSeqParams | None:
    """transformer-engine's kernels read the borders on the device, the local layers on the CPU."""
    if batch.cu_seqlens is None:
        return None
    on_device = batch.cu_seqlens.to(batch.tokens_bs.device)
    longest = batch.max_seqlen
    if layers == "local":
        borders = batch.cu_seqlens
        return Pack("thd", borders, borders, max_seqlen_q=longest, max_seqlen_kv=longest, on_device=on_device)
    return PackedSeqParams("thd", on_device, on_device, max_seqlen_q=longest, max_seqlen_kv=longest)
