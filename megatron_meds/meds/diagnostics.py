"""Numbers about features and clusters: how varied mistakes are, and how good the clusters.

Knows arrays and labels only. Letters: n rows, d features. Source: MEDS, arXiv 2604.11297.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from sklearn.metrics import adjusted_rand_score, rand_score
from sklearn.metrics.cluster import contingency_matrix

from megatron_meds.meds.clustering import normalise

POOLED_FEATURES = 512
"""Wider features have no pooled ratio over replicas: its matrix would be too large to send around."""


def top1_eigen_ratio(features: np.ndarray, normalised: bool = False) -> float:
    """Share of the largest eigenvalue in the trace of the covariance of the rows.

    1: all rows lie on a line; 1 / d: they vary alike in all directions. NaN where nothing varies, as
    with fewer than two rows.

    Args:
        features: [n, d] finite; the mean is taken off.
        normalised: L2-normalise the rows first.
    """
    rows = np.asarray(features, dtype=np.float64)
    if rows.ndim != 2:
        raise ValueError(f"features of shape {rows.shape}, not [n, d]")
    if len(rows) < 2:
        return float("nan")
    rows = normalise(rows) if normalised else rows
    centred = rows - rows.mean(axis=0)
    scatter = centred.T @ centred if rows.shape[1] <= len(rows) else centred @ centred.T
    return _top_share(scatter, rows.size * (1e-12 * float(np.abs(rows).max())) ** 2)


@dataclass
class EigenSums:
    """Top-1 eigen ratios of many prompts, each and pooled, raw and normalised; replicas merge theirs."""

    per_prompt: list[tuple[float, float]] = field(default_factory=list)
    """(raw, normalised) of each prompt where something varies."""
    count: int = 0
    largest: float = 0.0
    sums: tuple[np.ndarray, np.ndarray] | None = None
    """[d] sum of all rows: raw, normalised."""
    products: tuple[np.ndarray, np.ndarray] | None = None
    """[d, d] sum of outer products; None where d is above POOLED_FEATURES."""

    @classmethod
    def of(cls, sets: Sequence[np.ndarray]) -> EigenSums:
        """From the rows [n, d] of each prompt."""
        found = cls()
        rows = [np.asarray(s, dtype=np.float64) for s in sets if len(s)]
        for one in rows:
            pair = (top1_eigen_ratio(one), top1_eigen_ratio(one, normalised=True))
            if not np.isnan(pair[0]):
                found.per_prompt.append(pair)
        if rows:
            raw = np.concatenate(rows)
            unit = normalise(raw)
            found.count, found.largest = len(raw), float(np.abs(raw).max())
            found.sums = (raw.sum(axis=0), unit.sum(axis=0))
            if raw.shape[1] <= POOLED_FEATURES:
                found.products = (raw.T @ raw, unit.T @ unit)
        return found

    @classmethod
    def merge(cls, parts: Sequence[EigenSums]) -> EigenSums:
        """Of all replicas."""
        whole = cls(per_prompt=[pair for part in parts for pair in part.per_prompt])
        for part in parts:
            if part.sums is None or part.products is None:
                continue
            whole.count += part.count
            whole.largest = max(whole.largest, part.largest)
            if whole.sums is None or whole.products is None:
                whole.sums, whole.products = part.sums, part.products
            else:
                whole.sums = (whole.sums[0] + part.sums[0], whole.sums[1] + part.sums[1])
                whole.products = (
                    whole.products[0] + part.products[0],
                    whole.products[1] + part.products[1],
                )
        return whole

    def values(self) -> dict[str, float]:
        """`eigen_ratio`, `eigen_ratio_normalised` (medians over prompts) and the same of all rows pooled,
        with `_pooled` behind; those that are not defined are left out."""
        found = {}
        if self.per_prompt:
            raw, unit = np.median(np.array(self.per_prompt), axis=0)
            found |= {"eigen_ratio": float(raw), "eigen_ratio_normalised": float(unit)}
        if self.count > 1 and self.sums is not None and self.products is not None:
            names = ("eigen_ratio_pooled", "eigen_ratio_normalised_pooled")
            for name, total, product, scale in zip(
                names, self.sums, self.products, (self.largest, 1.0), strict=True
            ):
                scatter = product - np.outer(total, total) / self.count
                floor = 1e-13 * self.count * len(total) * scale**2
                if not np.isnan(share := _top_share(scatter, floor)):
                    found[name] = share
        return found


def cluster_agreement(
    labels: Sequence[int] | np.ndarray, known: Sequence[int] | np.ndarray
) -> dict[str, float]:
    """How well clusters find known kinds: `rand`, `adjusted_rand` and `purity`, each 1 at best.

    Args:
        labels, known: [n] integers, n >= 1. Noise (-1) is a cluster like any other.

    Returns:
        `rand`: share of pairs that both sort alike; `adjusted_rand`: the same with chance at 0;
        `purity`: share of rows that carry the commonest kind of their cluster.
    """
    a, b = np.asarray(labels), np.asarray(known)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"labels of shapes {a.shape} and {b.shape}: one of each per row, at least one row")
    table = contingency_matrix(b, a)
    return {
        "rand": float(rand_score(b, a)),
        "adjusted_rand": float(adjusted_rand_score(b, a)),
        "purity": float(table.max(axis=0).sum() / len(a)),
    }


def gibbs_gain(
    base: np.ndarray, rewards: np.ndarray, costs: np.ndarray, eta: float, weight: float
) -> tuple[float, float]:
    """Theorem 1 on a finite set of answers: what penalising costs gains in reward.

    q1 is the Gibbs policy base x exp(eta r), q2 that of r - weight x c.

    Args:
        base, rewards, costs: [n]; base positive, its sum does not matter.

    Returns:
        J(q2) - J(q1) computed from both policies, and Cov_q1(r, w) / E_q1[w] with
        w = exp(-eta weight c). The theorem says that they are equal, and not negative where r never
        rises with c.
    """
    first = _gibbs(np.log(base) + eta * rewards)
    second = _gibbs(np.log(base) + eta * (rewards - weight * costs))
    w = np.exp(-eta * weight * (costs - costs.min()))  # a common factor cancels
    covariance = first @ (rewards * w) - (first @ rewards) * (first @ w)
    return float(second @ rewards - first @ rewards), float(covariance / (first @ w))


def _gibbs(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _top_share(scatter: np.ndarray, floor: float) -> float:
    """Largest eigenvalue over trace; NaN where the trace is not above `floor`, which is rounding."""
    trace = float(np.trace(scatter))
    return float(np.linalg.eigvalsh(scatter)[-1] / trace) if trace > floor else float("nan")
