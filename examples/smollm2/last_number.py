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
    """`reward.function`: 1 for the right last number, 0 for another, -0.5 for a response without any or
    one that never came to an end."""
    return [_reward(t) for t in trajectories]


def _reward(trajectory: Trajectory) -> float:
    if trajectory.truncated or last_number(trajectory.text) is None:
        return -0.5
    return float(is_right(trajectory.text, trajectory.prompt.answer))
