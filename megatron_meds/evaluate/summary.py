"""Graded samples to numbers: pass@k with intervals, lengths, shares, differences between models.

Knows answers and statistics; how they are shown is `tables`. Letters: P problems, n samples of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_meds.evaluate.answers import Answers
from megatron_meds.evaluate.pass_at_k import Interval, bootstrap, paired_difference, pass_at_k, powers_of_two

AVERAGE = "average"
"""Name of the column over all sets, each of equal weight whatever its size."""


@dataclass(frozen=True)
class SetSummary:
    """One model on one set."""

    problems: int
    samples: int
    pass_at: dict[int, Interval]
    """By k."""
    tokens: float
    """Mean length of a response."""
    boxed: float
    """Share of responses with an answer in a box."""
    truncated: float
    """Share of responses ended by the length limit."""
    failed: int
    """Answers whose grading ended in a timeout, a crash or an error; they count as wrong."""


@dataclass(frozen=True)
class Difference:
    """One model's pass@1 less another's, on the same problems."""

    model: str
    baseline: str
    by_set: dict[str, Interval]


def pass_table(answers: Answers, samples: int, ks: Sequence[int]) -> np.ndarray:
    """[P, len(ks)] pass@k of every problem."""
    right = answers.column("correct", samples).sum(axis=1)
    return np.array([[pass_at_k(samples, int(c), k) for k in ks] for c in right])


def summarise(answers: Answers, samples: int) -> SetSummary:
    """The numbers of a set whose every problem has `samples` answers."""
    ks = powers_of_two(samples)
    table = pass_table(answers, samples, ks)
    reasons = answers.column("reason", samples)
    return SetSummary(
        problems=len(table),
        samples=samples,
        pass_at={k: bootstrap(table[:, i]) for i, k in enumerate(ks)},
        tokens=float(answers.column("tokens", samples).mean()),
        boxed=float((reasons != "no box").mean()),
        truncated=float(answers.column("truncated", samples).mean()),
        failed=int(np.isin(reasons, ["timeout", "crash", "error"]).sum()),
    )


def average(summaries: Mapping[str, SetSummary], tables: Mapping[str, np.ndarray]) -> SetSummary:
    """Over sets, each of equal weight; the intervals come from problems drawn within each set.

    Args:
        tables: per set [P, len(ks)], as `pass_table` gives them.
    """
    parts = list(summaries.values())
    ks = list(parts[0].pass_at)
    return SetSummary(
        problems=sum(s.problems for s in parts),
        samples=parts[0].samples,
        pass_at={k: _average([tables[name][:, i] for name in summaries]) for i, k in enumerate(ks)},
        tokens=float(np.mean([s.tokens for s in parts])),
        boxed=float(np.mean([s.boxed for s in parts])),
        truncated=float(np.mean([s.truncated for s in parts])),
        failed=sum(s.failed for s in parts),
    )


def differences(tables: Mapping[str, Mapping[str, np.ndarray]]) -> list[Difference]:
    """Of every model but the first from the first, in pass@1.

    Args:
        tables: per model, per set [P, len(ks)]; column 0 is pass@1.
    """
    (baseline, first), *others = tables.items()
    found = []
    for model, own in others:
        by_set = {name: paired_difference(own[name][:, 0], first[name][:, 0]) for name in first}
        if len(first) > 1:
            by_set[AVERAGE] = _average([own[name][:, 0] - first[name][:, 0] for name in first])
        found.append(Difference(model, baseline, by_set))
    return found


def _average(columns: Sequence[np.ndarray]) -> Interval:
    """Mean of the sets' means. Draws within each set are independent, so that the variances of the
    means add up; the interval is the normal one of that variance."""
    mean = float(np.mean([column.mean() for column in columns]))
    variance = sum(column.var() / len(column) for column in columns) / len(columns) ** 2
    half = 1.959964 * float(np.sqrt(variance))
    return Interval(mean, mean - half, mean + half)
