"""The score pass: log-probability and entropy of every response token under the current weights, and
the layer logits of one token of each sample where they are asked for.

One forward-only run of the pipeline; rewards and losses are not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.transformer.module import MegatronModule

from megatron_meds.actor.layer_logits import FinalNorm, LayerLogits
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.pipeline import logprob_processor, micro_batches_for, run_schedule
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


@torch.no_grad()
def score(
    chunks: list[MegatronModule],
    trajectories: Sequence[Trajectory],
    settings: ActorSettings,
    mesh: Mesh,
    *,
    vocabulary: int,
    temperature: float,
    answer_tokens: Sequence[int | None] | None = None,
    final_norm: FinalNorm = "last",
) -> Scores:
    """Score this replica's trajectories. Collective over all ranks; replicas may hold different
    numbers of trajectories, or none.

    Args:
        answer_tokens: [n] number of the response token whose layer logits are wanted; see `LayerLogits`.
    """
    batches = micro_batches_for(trajectories, settings, mesh)
    was_training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    with ExitStack() as stack:
        tap = None
        if answer_tokens is not None:
            tap = stack.enter_context(LayerLogits(chunks, trajectories, answer_tokens, mesh, final_norm))
        found = run_schedule(
            chunks,
            batches,
            logprob_processor(settings, vocabulary, temperature),
            lambda batch, output: (batch.scatter(output[0]), batch.scatter(output[1])),
            forward_only=True,
            watch=tap.watch if tap is not None else None,
        )
    for chunk, training in zip(chunks, was_training, strict=True):
        chunk.train(training)
    logprobs: dict[int, np.ndarray] = {}
    entropy: dict[int, np.ndarray] = {}
    for part_logprobs, part_entropy in found:
        logprobs.update(part_logprobs)
        entropy.update(part_entropy)
    order = range(len(trajectories)) if found else range(0)
    return Scores(
        logprobs=[logprobs[i] for i in order],
        entropy=[entropy[i] for i in order],
        layer_logits=tap.table() if tap is not None else None,
        tokens=sum(b.tokens_bs.numel() for b in batches),
        real_tokens=sum(b.real_tokens for b in batches),
    )
