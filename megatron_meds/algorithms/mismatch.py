"""How far the servers' log-probabilities lie from the actor's, and what the loss does about it.

The servers sample with other kernels than the actor scores with. Knows scored trajectories; a token
without a server log-probability is neutral everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_meds.algorithms.losses import truncated_importance_weights
from megatron_meds.algorithms.settings import MismatchSettings
from megatron_meds.trajectory import Trajectory


def gaps(trajectory: Trajectory) -> np.ndarray:
    """[T] fp64: log p_actor - log p_server of each sampled token; NaN where the server gave none.

    Raises:
        ValueError: the trajectory was not scored.
    """
    gap = _scored(trajectory).astype(np.float64) - np.asarray(trajectory.rollout_logprobs, dtype=np.float64)
    return np.where(np.isfinite(gap), gap, np.nan)


def diverged(trajectories: Sequence[Trajectory], settings: MismatchSettings) -> list[bool]:
    """Which sequences leave the loss: a token's |gap| is above `max_gap`, or their mean above
    `max_mean_gap`."""
    largest = np.inf if settings.max_gap is None else settings.max_gap
    mean = np.inf if settings.max_mean_gap is None else settings.max_mean_gap

    def beyond(trajectory: Trajectory) -> bool:
        gap = np.abs(gaps(trajectory))
        gap = gap[~np.isnan(gap)]
        return bool(gap.size) and bool(gap.max() > largest or gap.mean() > mean)

    return [beyond(t) for t in trajectories]


def importance_weights(trajectory: Trajectory, cap: float) -> np.ndarray:
    """[T] fp32: `truncated_importance_weights` of a scored trajectory's tokens."""
    actor = torch.from_numpy(_scored(trajectory))
    server = torch.tensor(trajectory.rollout_logprobs, dtype=torch.float32)
    return truncated_importance_weights(actor, server, cap).numpy()


def _scored(trajectory: Trajectory) -> np.ndarray:
    if trajectory.logprobs is None:
        raise ValueError(f"sample {trajectory.key} has no logprobs: score it first")
    return trajectory.logprobs
