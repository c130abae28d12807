"""A reward and a verdict for a model that writes no box: the last number of its response counts."""

from __future__ import annotations

import re

from megatron_meds.trajectory import Trajectory

_NUMBER = re.compile(r"(?:(?<![\w.)])-)?\d+(?:,\d{3})*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """The last number in a text; None where there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def is_right(response: str, gold: str) -> bool:
    """`verify.function`: whether the response's last number is the reference. What accuracy counts."""
    return last_number(response) == float(gold)


def reward(trajectories: list[Trajectory]) -> list[float]:
    """`reward.function`: 1 for the right last number and 0 for any other, less 0.5 where the response never
    came to its end."""
    return [is_right(t.text, t.prompt.answer) - 0.5 * t.truncated for t in trajectories]
