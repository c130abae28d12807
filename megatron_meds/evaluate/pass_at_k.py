"""pass@k and how sure one can be of it. Knows counts of right samples, and nothing else of ours.

Letters: P problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

DRAWS = 10_000
_CHUNK = 4_000_000
"""Numbers drawn at once."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that k of a problem's samples, drawn without putting back, hold a right one.

        1 - C(n - c, k) / C(n, k)

    the unbiased estimator of pass@k, the nearest float to the exact fraction.

    Args:
        samples: n samples of the problem.
        right: c of them are right.
        k: 1 to n.

    Raises:
        ValueError: k or c out of range.

    Source: arXiv 2107.03374, equation 1.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k}: there are {samples} samples, so 1 to {samples}")
    if not 0 <= right <= samples:
        raise ValueError(f"{right} right ones of {samples} samples")
    return (comb(samples, k) - comb(samples - right, k)) / comb(samples, k)


def powers_of_two(samples: int) -> list[int]:
    """1, 2, 4, ... up to the number of samples."""
    return [1 << i for i in range(samples.bit_length())]


@dataclass(frozen=True)
class Interval:
    """A mean over problems, and between which two values it lies with some confidence."""

    mean: float
    low: float
    high: float


def bootstrap(values: np.ndarray | Sequence[float], level: float = 0.95, seed: int = 0) -> Interval:
    """Percentile bootstrap of a mean: problems are drawn anew, with putting back, `DRAWS` times.

    Args:
        values: [P] one number a problem, such as its pass@k; P >= 1, finite.
        level: confidence, such as 0.95.
        seed: of the draws: equal values give equal intervals.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"values of shape {array.shape}: one a problem, at least one")
    if not np.isfinite(array).all():
        raise ValueError(f"value {int(np.flatnonzero(~np.isfinite(array))[0])} is not finite")
    generator = np.random.default_rng(seed)
    means = np.empty(DRAWS)
    rows = max(1, _CHUNK // array.size)
    for start in range(0, DRAWS, rows):
        count = min(rows, DRAWS - start)
        drawn = generator.integers(0, array.size, size=(count, array.size))
        means[start : start + count] = array[drawn].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(array.mean()), float(low), float(high))


def paired_difference(
    values: np.ndarray | Sequence[float],
    baseline: np.ndarray | Sequence[float],
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Mean of `values` minus mean of `baseline` over the same problems, with its bootstrap interval.

    Problems are drawn in pairs, so that what makes a problem hard for both cancels.

    Args:
        values, baseline: [P] each, problem by problem.

    Raises:
        ValueError: of unlike lengths, or as `bootstrap`.
    """
    a, b = np.asarray(values, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"{a.shape} values beside {b.shape}: both of the same problems")
    return bootstrap(a - b, level, seed)
