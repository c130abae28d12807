"""Passes without gradient. The score pass: log-probability and entropy of every response token under the
current weights, and the layer logits of one token of each sample where they are asked for.

Each is one forward-only run of the pipeline; rewards and losses are not its business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.transformer.module import MegatronModule

from megatron_meds.actor.batches import MicroBatch
from megatron_meds.actor.layer_logits import FinalNorm, LayerLogits
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.pipeline import OutputProcessor, micro_batches_for, run_schedule
from megatron_meds.actor.settings import ActorSettings
from megatron_meds.trajectory import Trajectory


@dataclass(frozen=True)
class Scores:
    """What the score pass found; per trajectory, in the order given. Empty lists on ranks that are
    not on the last pipeline stage."""

    logprobs: list[np.ndarray]
    """[T] fp32 each: at the sampling temperature."""
    entropy: list[np.ndarray]
    """[T] fp32 each, nats."""
    layer_logits: np.ndarray | None
    """[n, L] fp32, on every rank of the replica; NaN rows where no token was asked for. None: not asked."""
    tokens: int
    """Tokens that went through the model on this replica, padding included."""
    real_tokens: int
    """Those that are not padding."""


@dataclass(frozen=True)
class TokenPass:
    """What a pass found of every response token."""

    found: list[np.ndarray]
    """[k, T] fp32 per trajectory, in the order given: k numbers a token. [] before the last stage."""
    tokens: int
    """Tokens that went through the model on this replica, padding included."""
    real_tokens: int
    """Those that are not padding."""

    def column(self, index: int) -> list[np.ndarray]:
        """One of the k numbers: [T] fp32 per trajectory."""
        return [numbers[index] for numbers in self.found]


@torch.no_grad()
def forward_tokens(
    chunks: list[MegatronModule],
    trajectories: Sequence[Trajectory],
    settings: ActorSettings,
    mesh: Mesh,
    processor: OutputProcessor,
    watch: Callable[[MicroBatch], None] | None = None,
) -> TokenPass:
    """Run this replica's trajectories through the model. Collective over all ranks; replicas may hold
    different numbers of trajectories, or none.

    Args:
        processor: makes [k, N] of a micro-batch's hidden states.
        watch: see `run_schedule`.
    """
    batches = micro_batches_for(trajectories, settings, mesh)
    was_training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    parts = run_schedule(
        chunks,
        batches,
        processor,
        lambda batch, output: batch.scatter(output),
        forward_only=True,
        watch=watch,
    )
    for chunk, training in zip(chunks, was_training, strict=True):
        chunk.train(training)
    found = {index: numbers for part in parts for index, numbers in part.items()}
    return TokenPass(
        found=[found[i] for i in range(len(trajectories))] if parts else [],
        tokens=sum(b.tokens_bs.numel() for b in batches),
        real_tokens=sum(b.real_tokens for b in batches),
    )


def score(
    chunks: list[MegatronModule],
    trajectories: Sequence[Trajectory],
    settings: ActorSettings,
    mesh: Mesh,
    processor: OutputProcessor,
    answer_tokens: Sequence[int | None] | None = None,
    final_norm: FinalNorm = "last",
) -> Scores:
    """Score this replica's trajectories, as `forward_tokens` runs them.

    Args:
        processor: see `logprob_processor`.
        answer_tokens: [n] number of the response token whose layer logits are wanted; see `LayerLogits`.
    """
    with ExitStack() as stack:
        tap = None
        if answer_tokens is not None:
            tap = stack.enter_context(LayerLogits(chunks, trajectories, answer_tokens, mesh, final_norm))
        result = forward_tokens(
            chunks,
            trajectories,
            settings,
            mesh,
            processor,
            watch=tap.watch if tap is not None else None,
        )
    return Scores(
        logprobs=result.column(0),
        entropy=result.column(1),
        layer_logits=tap.table() if tap is not None else None,
        tokens=result.tokens,
        real_tokens=result.real_tokens,
    )
