"""Step rewards of a response as text, with any function that scores prefixes: no trainer needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_meds.vsrm.prefixes import thin_evenly
from megatron_meds.vsrm.rewards import step_rewards
from megatron_meds.vsrm.steps import StepRules, find_region, split_steps


@dataclass(frozen=True)
class RewardedSteps:
    """P steps of a response."""

    offsets: list[int]
    """[P] characters at which they begin."""
    accuracies: np.ndarray
    """[P + 1] of the prefixes before each step and of the whole reasoning; [0] where there is no step."""
    rewards: np.ndarray
    """[P]"""


def reward_steps(
    response: str,
    score: Callable[[list[str]], Sequence[float]],
    rules: StepRules | None = None,
    *,
    gamma: float = 0.7,
    window: int = 4,
    eps: float = 1e-5,
    opened: bool = False,
    max_prefixes: int | None = None,
) -> RewardedSteps:
    r"""Cut a response into steps, score its prefixes, reward the steps.

    Args:
        score: from P + 1 beginnings of the response, each closed by the closing tag and shortest first,
            to the accuracy that each leads to: the share of right answers among its continuations.
            Not called for a response without steps.
        opened: the prompt ends with the opening tag.
        max_prefixes: evenly thinned to so many; 2 or more.

    Raises:
        ValueError: `score` gave not one finite number for each prefix.
    """
    rules = rules or StepRules.sound()
    splits = split_steps(response, rules, opened=opened)
    region = find_region(response, rules, opened)
    if not splits or region is None:
        return RewardedSteps([], np.empty(0), np.empty(0))
    ends = thin_evenly([*splits, region.end], max_prefixes)
    found = np.asarray(score([response[:end] + rules.close_tag for end in ends]), dtype=np.float64)
    if found.shape != (len(ends),):
        raise ValueError(f"score gave an array of shape {found.shape} for {len(ends)} prefixes")
    return RewardedSteps(ends[:-1], found, step_rewards(found, gamma, window, eps))
