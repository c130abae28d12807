"""The update: loss and backward through the pipeline schedule, then one optimizer step.

Knows megatron's gradient buffers, optimizer and learning-rate schedule; what is minimised comes in
as an objective over response tokens, whose weights already hold the global normalisation, so that
gradients do not depend on how a mini-batch is split over micro-batches and replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config

from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.pipeline import OutputProcessor, micro_batches_for, run_schedule
from megatron_meds.actor.settings import ActorSettings, OptimizerSettings
from megatron_meds.trajectory import Trajectory

Objective = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""`(logprobs [N], entropy [N], arrays [N] by name) -> (scalar to minimise, metrics as sums)` for a policy,
`(values [N], arrays)` for a critic. Both results are sums over the tokens given, already weighted: adding
micro-batches gives the mini-batch."""


@dataclass
class MiniBatch:
    """What one optimizer update learns from, on one replica."""

    trajectories: list[Trajectory]
    arrays: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Per name one [T] array per trajectory: advantages, old log-probabilities, weights."""


def wrap(
    chunks: Sequence[MegatronModule], actor: ActorSettings, optimizer: OptimizerSettings
) -> tuple[list[MegatronModule], MegatronOptimizer]:
    """Give model chunks gradient buffers (fp32, reduced over replicas) and an AdamW over them."""
    config = get_model_config(chunks[0])
    shared = actor.distributed_optimizer
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=shared,
        check_for_nan_in_grad=False,  # `update` looks at the norm and names the update instead
    )
    wrapped: list[MegatronModule] = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = _finalize
    settings = OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=shared,
    )
    return wrapped, get_megatron_optimizer(settings, wrapped)


def make_schedule(
    optimizer: MegatronOptimizer, settings: OptimizerSettings, steps: int
) -> OptimizerParamScheduler:
    """Learning rate over the steps of a run: linear warm-up, then constant, cosine or linear.

    Step it before a step's updates: the first of w warm-up steps has lr / w.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(steps, settings.warmup_steps + 1),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def backward(
    chunks: list[MegatronModule],
    batch: MiniBatch,
    objective: Objective,
    settings: ActorSettings,
    mesh: Mesh,
    processor: OutputProcessor,
) -> dict[str, float]:
    """Fill the gradient buffers with the mini-batch's gradient, reduced over all ranks.

    Returns the objective's metrics, summed over this replica's micro-batches ({} before the last
    stage). Collective over all ranks.

    Args:
        processor: makes [k, N] of a micro-batch's hidden states: the objective's first k arguments.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()  # type: ignore[operator]
        chunk.train()

    def loss(micro_batch, output):
        arrays = {name: micro_batch.gather(values) for name, values in batch.arrays.items()}
        return objective(*output.unbind(), arrays)

    reports = run_schedule(
        chunks,
        micro_batches_for(batch.trajectories, settings, mesh),
        processor,
        loss,
        forward_only=False,
    )
    sums: dict[str, float] = {}
    for report in reports:
        for name, value in report.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def step(optimizer: MegatronOptimizer) -> float:
    """Clip and apply the gradient; returns its global norm before clipping.

    Raises:
        FloatingPointError: the norm is not finite; the weights are as they were.
    """
    optimizer.prepare_grads()
    norm = optimizer.get_grad_norm()
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient's norm is {norm}: no update was made")
    optimizer.step()
    optimizer.zero_grad()  # the plain fp32 one leaves .grad on the buffer, and it would be added twice
    return float(norm)


def _finalize(model, num_tokens=None, **options):
    """Reduce gradients over ranks and divide by nothing: the objective's weights hold the normalisation."""
    finalize_model_grads(model, None, **options)
