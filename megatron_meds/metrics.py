"""Sums that replicas add up: means, extremes and counts of a step by name.

Knows trajectories, scores and the ledger; not where the numbers are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_meds.algorithms import kl_k3
from megatron_meds.algorithms.algorithm import join, known
from megatron_meds.algorithms.mismatch import diverged, gaps
from megatron_meds.algorithms.settings import MismatchSettings
from megatron_meds.trajectory import RewardLedger, Trajectory


@dataclass
class Sums:
    """Numbers of one replica; `merge` those of all replicas, then read `values`."""

    means: dict[str, tuple[float, float]] = field(default_factory=dict)
    """name -> (sum, count)"""
    maxima: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)

    def mean(self, name: str, values: Iterable[float] | np.ndarray) -> None:
        """Add values whose mean over all replicas is wanted. No values: the name stays out."""
        array = np.asarray(list(values) if not isinstance(values, np.ndarray) else values, dtype=np.float64)
        self.ratio(name, float(array.sum()), float(array.size))

    def ratio(self, name: str, total: float, count: float) -> None:
        """Add to a quotient of two sums."""
        before = self.means.get(name, (0.0, 0.0))
        self.means[name] = (before[0] + total, before[1] + count)

    def maximum(self, name: str, value: float) -> None:
        self.maxima[name] = max(self.maxima.get(name, value), value)

    def total(self, name: str, value: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value

    def add(self, other: Sums) -> None:
        """Add what another one holds."""
        for name, (total, count) in other.means.items():
            self.ratio(name, total, count)
        for name, value in other.maxima.items():
            self.maximum(name, value)
        for name, value in other.totals.items():
            self.total(name, value)

    @classmethod
    def merge(cls, parts: Sequence[Sums]) -> Sums:
        """The sums of all replicas."""
        whole = cls()
        for part in parts:
            whole.add(part)
        return whole

    def values(self) -> dict[str, float]:
        """One number per name; means over nothing are left out."""
        means = {name: total / count for name, (total, count) in self.means.items() if count}
        return means | self.maxima | self.totals


def describe(sums: Sums, trajectories: Sequence[Trajectory]) -> None:
    """Accuracy, lengths, truncation and verdicts of sampled trajectories."""
    sums.mean("accuracy", [float(bool(t.correct)) for t in trajectories])
    sums.mean("length", [float(len(t)) for t in trajectories])
    sums.mean("truncated", [float(t.truncated) for t in trajectories])
    sums.total("response_tokens", float(sum(len(t) for t in trajectories)))
    sums.total("prompt_tokens", float(sum(len(t.prompt.token_ids) for t in trajectories)))
    for verdict in ("no box", "timeout", "crash"):
        sums.mean(f"verdict/{verdict.replace(' ', '_')}", [float(t.verdict == verdict) for t in trajectories])


def describe_rewards(sums: Sums, ledger: RewardLedger) -> None:
    """Mean reward of a trajectory, by source and in all; samples without a score are left out."""
    for source in ledger.sources:
        totals = ledger.totals(source)
        sums.mean(f"reward/{source}", totals[np.isfinite(totals)])
    totals = ledger.totals()
    sums.mean("reward/total", totals[np.isfinite(totals)])


def describe_mismatch(
    sums: Sums, trajectories: Sequence[Trajectory], settings: MismatchSettings | None = None
) -> None:
    """How far the actor's log-probabilities lie from those of the servers, on the sampled tokens.

    `mismatch/kl` is the k3 estimate of KL(server || actor): mean of e^d - 1 - d with
    d = log p_actor - log p_server; `mismatch/abs` the mean |d|; `mismatch/sequence_max` the mean over
    sequences of the largest |d|, `mismatch/max` the largest of all. Tokens without a server
    log-probability are left out and counted.

    With settings also the share of importance weights above their cap (`mismatch/capped`), and how
    many sequences left the loss (`mismatch/dropped_sequences`), where these are in use.
    """
    for t in trajectories:
        gap = gaps(t)
        known = gap[~np.isnan(gap)]
        sums.ratio("mismatch/abs", float(np.abs(known).sum()), known.size)
        sums.ratio("mismatch/kl", float((np.expm1(known) - known).sum()), known.size)
        sums.total("mismatch/unknown_tokens", float(gap.size - known.size))
        if known.size:
            largest = float(np.abs(known).max())
            sums.maximum("mismatch/max", largest)
            sums.mean("mismatch/sequence_max", [largest])
        if settings is not None and settings.importance_weights:
            sums.ratio("mismatch/capped", float((known > np.log(settings.cap)).sum()), gap.size)
    if settings is not None and (settings.max_gap or settings.max_mean_gap):
        sums.total("mismatch/dropped_sequences", float(sum(diverged(trajectories, settings))))


def describe_reference(sums: Sums, trajectories: Sequence[Trajectory]) -> None:
    """`reference/kl`: k3 of KL(policy || reference) before the update, mean over response tokens."""
    for t in trajectories:
        assert t.logprobs is not None  # scored before, by both
        assert t.reference_logprobs is not None
        kl = kl_k3(torch.from_numpy(t.logprobs), torch.from_numpy(t.reference_logprobs))
        sums.ratio("reference/kl", float(kl.double().sum()), len(t))


def describe_critic(
    sums: Sums,
    trajectories: Sequence[Trajectory],
    returns: Sequence[np.ndarray | None],
    whole: Callable[[np.ndarray], np.ndarray],
) -> None:
    """The critic's values before the update against what came of them, over tokens with a return.

    `critic/explained_variance` is 1 - Var(return - value) / Var(return) over all replicas: 1 where the
    critic foresees everything, 0 where it says as much as a constant; left out where returns are equal.

    Args:
        returns: [T] of each trajectory; None: it has no score.
        whole: adds up over replicas; called twice on every one.
    """
    scored = [(t, r) for t, r in zip(trajectories, returns, strict=True) if r is not None]
    values = join([known(t.values, "values", t) for t, _ in scored]).double().numpy()
    targets = join([r for _, r in scored]).double().numpy()
    sums.mean("critic/value", values)
    sums.mean("critic/return", targets)
    rest = targets - values
    count, target_sum, rest_sum = whole(np.array([float(targets.size), targets.sum(), rest.sum()]))
    count = max(count, 1.0)
    centred = (targets - target_sum / count, rest - rest_sum / count)
    target_squares, rest_squares = whole(np.array([float(np.square(x).sum()) for x in centred]))
    if target_squares > 0:
        sums.maximum("critic/explained_variance", 1.0 - float(rest_squares / target_squares))


def describe_entropy(sums: Sums, trajectories: Sequence[Trajectory]) -> None:
    """Mean token entropy of the policy before the update, nats."""
    for t in trajectories:
        assert t.entropy is not None  # scored before
        sums.ratio("entropy", float(t.entropy.sum()), t.entropy.size)
