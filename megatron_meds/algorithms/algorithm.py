"""What an algorithm is to the trainer: its loss's numbers, and its advantages from the ledger.

Knows trajectories and the ledger; knows no algorithm by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_meds.algorithms.advantages import group_advantages
from megatron_meds.algorithms.losses import Aggregation
from megatron_meds.trajectory import RewardLedger, Trajectory

Advantages = Callable[[RewardLedger, Sequence[Trajectory]], list[np.ndarray]]
"""(ledger, its trajectories) -> per trajectory [T] fp32. All samples of a prompt must be among them."""


@dataclass(frozen=True)
class Algorithm:
    """One algorithm with every choice made; `resolve` makes it from the settings."""

    name: str
    advantages: Advantages
    clip_low: float
    clip_high: float
    dual_clip: float | None
    aggregation: Aggregation
    entropy_bonus: float
    """Coefficient of the mean token entropy in the objective; 0: no term."""


def group_relative(scale_by_std: bool) -> Advantages:
    """Advantages of GRPO's family: a sequence's total reward against its siblings', at every token."""

    def advantages(ledger: RewardLedger, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        groups = [t.prompt.id for t in trajectories]
        per_sequence = np.asarray(group_advantages(ledger.totals(), groups, scale_by_std))
        return [np.full(len(t), a, dtype=np.float32) for t, a in zip(trajectories, per_sequence, strict=True)]

    return advantages
