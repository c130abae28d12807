"""What an algorithm is to the trainer: its loss's numbers, and its advantages from the ledger.

Knows trajectories and the ledger; knows no algorithm by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from megatron_meds.algorithms.advantages import (
    AddUp,
    gae,
    group_advantages,
    group_scale,
    reward_to_go,
    whiten,
)
from megatron_meds.algorithms.losses import Aggregation
from megatron_meds.algorithms.settings import AlgorithmSettings, EntropyAdvantageSettings
from megatron_meds.trajectory import RewardLedger, Trajectory

STEPS = "steps"
"""Source in the ledger whose rewards belong to tokens, not to the whole response."""
_ROWS = 256
"""Trajectories padded to one length at a time."""


class Advantages(Protocol):
    """From a ledger and its trajectories, all samples of a prompt among them, to [T] fp32 of each.

    `whole` adds numbers up over the parts of a step (replicas); every part makes the same calls of
    it. Left out: there is one part.
    """

    def __call__(
        self, ledger: RewardLedger, trajectories: Sequence[Trajectory], whole: AddUp = ...
    ) -> list[np.ndarray]: ...


class Returns(Protocol):
    """From a ledger and its trajectories, with their values, to what a critic learns: [T] fp32 of each, None
    for one without a score."""

    def __call__(
        self, ledger: RewardLedger, trajectories: Sequence[Trajectory]
    ) -> list[np.ndarray | None]: ...


@dataclass(frozen=True)
class Algorithm:
    """One algorithm with every choice made; `resolve` makes it from the settings."""

    name: str
    advantages: Advantages
    clip_low: float
    clip_high: float
    dual_clip: float | None
    aggregation: Aggregation
    ratio: Literal["token", "sequence"]
    """What is clipped: each token's probability ratio, or the geometric mean of its sequence's."""
    entropy_bonus: float
    """Coefficient of the mean token entropy in the objective; 0: no term."""
    kl_loss: float
    """Coefficient of k3 of KL(policy || reference) in the loss; 0: no term."""
    importance_cap: float | None
    """Largest importance weight on a token's policy loss; None: no weights."""
    entropy_advantage: EntropyAdvantageSettings | None = None
    """What is added to advantages for entropy; None: nothing."""
    returns: Returns | None = None
    """What a critic learns; None: there is none."""


def complete(
    settings: AlgorithmSettings,
    *,
    advantages: Advantages,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: Aggregation = "seq-mean-token-mean",
    ratio: Literal["token", "sequence"] = "token",
    entropy_advantage: EntropyAdvantageSettings | None = None,
    returns: Returns | None = None,
) -> Algorithm:
    """An algorithm of these values, each giving way to what the settings say."""
    kl, mismatch = settings.kl, settings.mismatch
    return Algorithm(
        name=settings.name,
        advantages=advantages,
        clip_low=clip_low if settings.clip_low is None else settings.clip_low,
        clip_high=clip_high if settings.clip_high is None else settings.clip_high,
        dual_clip=dual_clip if settings.dual_clip is None else settings.dual_clip,
        aggregation=settings.aggregation or aggregation,
        ratio=ratio,
        entropy_bonus=settings.entropy_bonus,
        kl_loss=kl.coefficient if kl.term == "loss" else 0.0,
        importance_cap=mismatch.cap if mismatch.importance_weights else None,
        entropy_advantage=entropy_advantage,
        returns=returns,
    )


def group_relative(scale_by_std: bool) -> Advantages:
    """Advantages of GRPO's family: a sequence's total reward against its siblings', at every token; step
    rewards apart, at the tokens they reach (`add_steps`)."""

    def advantages(
        ledger: RewardLedger, trajectories: Sequence[Trajectory], whole: AddUp = np.asarray
    ) -> list[np.ndarray]:
        groups, totals = prompts_of(trajectories), ledger.totals()
        if STEPS in ledger.sources:
            totals = totals - ledger.totals(STEPS)
        per_sequence = np.asarray(group_advantages(totals, groups, scale_by_std))
        found = spread(per_sequence, [len(t) for t in trajectories])
        return add_steps(found, ledger, totals, groups, scale_by_std) if STEPS in ledger.sources else found

    return advantages


def add_steps(
    advantages: Sequence[np.ndarray],
    ledger: RewardLedger,
    totals: np.ndarray,
    groups: Sequence[str],
    scale_by_std: bool,
) -> list[np.ndarray]:
    """Add to each token how much more the steps from there on earn than from a token of its group on average.

        A_t += (G_t - mean_g) / s       G_t: sum of the step rewards from token t on

    mean_g is over all tokens of the group's responses that have step rewards; s is the standard deviation
    of the group's totals, as in `group_advantages`, or 1 where that is 0 or not to be divided by.
    Responses without step rewards, or without a score, keep their advantages.

    Args:
        advantages: [T] each.
        totals: [B] the rewards of each trajectory without its step rewards; NaN where it has no score.
        groups: [B] the prompt of each.
    """
    to_go = rewards_to_go(ledger.token_rewards(STEPS), 1.0)
    measured = {trajectory for trajectory, _, _ in ledger.entries(STEPS)}
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        if np.isfinite(totals[index]):
            members.setdefault(group, []).append(index)
    found = list(advantages)
    for indexes in members.values():
        stepped = [i for i in indexes if i in measured]
        if not stepped:
            continue
        mean = float(np.concatenate([to_go[i] for i in stepped]).mean())
        scale = group_scale(totals[indexes]) if scale_by_std else 1.0
        for i in stepped:
            found[i] = (found[i] + (to_go[i] - mean) / scale).astype(np.float32)
    return found


def whitened_reward_to_go(gamma: float, group_baseline: bool) -> Advantages:
    """Advantages of REINFORCE++: each token's discounted reward to go, whitened over the step's tokens.

    Args:
        group_baseline: first take the group's mean total reward off the last token's reward.
    """

    def advantages(
        ledger: RewardLedger, trajectories: Sequence[Trajectory], whole: AddUp = np.asarray
    ) -> list[np.ndarray]:
        rewards = ledger.token_rewards()
        totals = ledger.totals()
        if group_baseline:
            centred = np.asarray(group_advantages(totals, prompts_of(trajectories), scale_by_std=False))
            for i in np.flatnonzero(np.isfinite(totals)):
                rewards[i][-1] += centred[i] - totals[i]
        return whitened(rewards_to_go(rewards, gamma), totals, whole)

    return advantages


def whitened(
    advantages: Sequence[np.ndarray], totals: np.ndarray, whole: AddUp = np.asarray
) -> list[np.ndarray]:
    """`whiten` over the tokens [T] of the trajectories with a score: fp32, 0 where the total is NaN."""
    scored = [np.full(len(a), np.isfinite(r)) for a, r in zip(advantages, totals, strict=True)]
    white = whiten(join(advantages), join(scored), whole=whole)
    lengths = [len(a) for a in advantages]
    return [part.numpy().astype(np.float32) for part in white.split(lengths)] if lengths else []


def rewards_to_go(rewards: Sequence[np.ndarray], gamma: float) -> list[np.ndarray]:
    """`reward_to_go` of arrays [T] of unlike lengths: [T] fp64 each."""
    return _padded(1, lambda mask, r: (reward_to_go(r, mask, gamma),), rewards)[0]


def estimate(
    rewards: Sequence[np.ndarray], values: Sequence[np.ndarray], gamma: float, lam: float
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """`gae` of arrays [T] of unlike lengths: advantages and returns, [T] of the dtype of `values` each."""
    advantages, returns = _padded(2, lambda mask, r, v: gae(r, v, mask, gamma, lam), rewards, values)
    return advantages, returns


def _padded(
    count: int, function: Callable[..., tuple[torch.Tensor, ...]], *ragged: Sequence[np.ndarray]
) -> list[list[np.ndarray]]:
    """Apply a function of a mask and padded arrays [B, T] to lists of arrays [T], and cut what it returns.

    Args:
        count: how many arrays [B, T] it returns.
        ragged: one list for each of its arrays; the lengths of their first members agree, and so on.
    """
    found: list[list[np.ndarray]] = [[] for _ in range(count)]
    for start in range(0, len(ragged[0]), _ROWS):
        parts = [[torch.from_numpy(a) for a in arrays[start : start + _ROWS]] for arrays in ragged]
        padded = [torch.nn.utils.rnn.pad_sequence(part, batch_first=True) for part in parts]
        lengths = [len(a) for a in parts[0]]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        for rows, result in zip(found, function(mask, *padded), strict=True):
            rows += [row[:n].numpy() for row, n in zip(result, lengths, strict=True)]
    return found


def prompts_of(trajectories: Sequence[Trajectory]) -> list[str]:
    """The group of each trajectory: its prompt."""
    return [t.prompt.id for t in trajectories]


def known(array: np.ndarray | None, name: str, trajectory: Trajectory) -> np.ndarray:
    """An array [T] that the score pass fills in.

    Raises:
        ValueError: it has not; names the sample.
    """
    if array is None:
        raise ValueError(f"sample {trajectory.key} has no {name}: score it first")
    return array


def spread(values: np.ndarray | Sequence[float], lengths: Sequence[int]) -> list[np.ndarray]:
    """One fp32 array [T] per sequence, filled with its value."""
    return [np.full(n, v, dtype=np.float32) for v, n in zip(values, lengths, strict=True)]


def join(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """Arrays [T] end to end."""
    return torch.from_numpy(np.concatenate(arrays)) if arrays else torch.zeros(0, dtype=torch.float64)
