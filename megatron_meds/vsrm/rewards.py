"""What a step earns: the accuracy it gained, or a part of the next gain after it.

Knows accuracies and the ledger; knows nothing of how accuracies are measured.
Source: VSRM, arXiv 2508.10293, and its authors' released code. Letters: P steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from megatron_meds.trajectory import RewardLedger

SOURCE = "steps"
"""Name of the step rewards in the ledger."""


def step_rewards(
    accuracies: Sequence[float] | np.ndarray, gamma: float = 0.7, window: int = 4, eps: float = 1e-5
) -> np.ndarray:
    """The reward of each step, with d_j = acc_{j+1} - acc_j.

        |d_j| >= eps:  r_j = d_j
        otherwise:     r_j = gamma^m d_{j+m} for the smallest m in 1..window with |d_{j+m}| >= eps; none: 0

    Args:
        accuracies: [P + 1] of the prefixes, in the order of the response.
        gamma: discount of a gain that comes later.
        window: steps to look ahead; 0: none, and the rewards add up to acc_P - acc_0.
        eps: smallest change that counts; see `least_change`.

    Returns:
        [P] fp64.

    Raises:
        ValueError: no accuracy, one that is not finite, or a negative gamma, window or eps.
    """
    acc = np.asarray(accuracies, dtype=np.float64)
    if acc.ndim != 1 or not acc.size or not np.isfinite(acc).all():
        raise ValueError(f"accuracies of shape {acc.shape}: should be [P + 1] finite numbers")
    if gamma < 0 or window < 0 or eps < 0:
        raise ValueError(f"gamma = {gamma}, window = {window} and eps = {eps} must be 0 or more")
    d = np.diff(acc)
    counts = np.abs(d) >= eps
    rewards = np.where(counts, d, 0.0)
    for j in np.flatnonzero(~counts):
        ahead = np.flatnonzero(counts[j + 1 : j + 1 + window])
        if ahead.size:
            m = int(ahead[0]) + 1
            rewards[j] = gamma**m * d[j + m]
    return rewards


def own_step_rewards(
    function: Callable[[np.ndarray], Sequence[float] | np.ndarray], accuracies: Sequence[float], key: str
) -> np.ndarray:
    """[P] what a user's function makes of a response's accuracies [P + 1].

    Args:
        key: names the sample in messages.

    Raises:
        ValueError: not one finite number for each step.
    """
    found = np.asarray(function(np.array(accuracies, dtype=np.float64)), dtype=np.float64)
    if found.shape != (len(accuracies) - 1,) or not np.isfinite(found).all():
        raise ValueError(
            f"vsrm.reward_function gave {found.tolist()!r:.200} for the {len(accuracies)} accuracies of "
            f"sample {key}: should be {len(accuracies) - 1} finite numbers"
        )
    return found


def least_change(candidates: int, min_gain: int = 1, eps: float = 1e-5) -> float:
    """The `eps` of `step_rewards` with which a change counts from `min_gain` of `candidates` samples on.

    Half a sample below, so that rounding decides nothing.
    """
    if candidates < 1 or min_gain < 1:
        raise ValueError(f"candidates = {candidates} and min_gain = {min_gain} must be 1 or more")
    return max(eps, (min_gain - 0.5) / candidates)


def enter_steps(
    ledger: RewardLedger,
    trajectory: int,
    bounds: Sequence[int],
    rewards: Sequence[float] | np.ndarray,
    place: Literal["last", "first"] = "last",
    outcome: Literal["add", "overwrite"] = "add",
) -> None:
    """Add the step rewards of one trajectory to the ledger, as source `steps`; zeros too.

    Args:
        trajectory: its number in the ledger.
        bounds: [P + 1] step j is the response tokens bounds[j] to bounds[j + 1] - 1.
        rewards: [P].
        place: token of a step that is rewarded.
        outcome: `overwrite` drops what falls on the response's last token, where the outcome stands (as
            released).

    Raises:
        ValueError: not one step for each reward, or a step outside of the response.
    """
    if len(bounds) != len(rewards) + 1:
        raise ValueError(f"{len(rewards)} step rewards with {len(bounds)} bounds")
    ledger.open(SOURCE)
    for j, reward in enumerate(rewards):
        ledger.add(SOURCE, trajectory, float(reward), bounds[j] if place == "first" else bounds[j + 1] - 1)
    if outcome == "overwrite":
        ledger.remove(SOURCE, trajectory)
