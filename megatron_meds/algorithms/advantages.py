"""Advantages: how much better a sample, or a token, did than was to be expected.

Pure functions on numbers, in fp64 whatever comes in. Know neither models nor who gave a reward.
Letters: n samples, B sequences, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch

STD_EPSILON = 1e-6
"""Added to a group's standard deviation before dividing by it."""

STD_FLOOR = 1e-6
"""A group whose standard deviation is below this share of its largest |reward| (at least of 1) holds
equal rewards: what is left is rounding, and dividing by it would turn rounding into gradient."""

_WHITEN_EPSILON = 1e-8

Numbers = torch.Tensor | np.ndarray | Sequence[float]
Groups = torch.Tensor | np.ndarray | Sequence[Hashable]
AddUp = Callable[[np.ndarray], np.ndarray]
"""[k] fp64 of one part of a batch -> the sum over all parts (an all-reduce over replicas)."""


def group_advantages(rewards: Numbers, groups: Groups, scale_by_std: bool = True) -> Numbers:
    """How far each reward lies from its group's mean, in standard deviations of the group (GRPO).

        A_i = (r_i - mean_g) / (std_g + 1e-6)         std unbiased, two passes

    Equal rewards give exactly 0, and so do rewards that differ by rounding only (`STD_FLOOR`); a
    group of one gives 0; a NaN reward (a sample that could not be scored) is left out of its group's
    statistics and gets 0.

    Args:
        rewards: [n], any real dtype; the sum of a sample's rewards.
        groups: [n], equal for samples of one prompt; integers, strings or any hashable.
        scale_by_std: False leaves the division out (Dr. GRPO, arXiv 2503.20783).

    Returns:
        [n] fp64: a tensor on the device of `rewards` if that is a tensor, else a numpy array.

    Raises:
        ValueError: an infinite reward (its index is named), or lengths that differ.

    Source: GRPO (arXiv 2402.03300), section 4.1.
    """

    def standardise(r: np.ndarray) -> np.ndarray:
        std = _std(r)
        if std == 0.0:
            return np.zeros_like(r)
        centred = r - r.mean()
        return centred / (std + STD_EPSILON) if scale_by_std else centred

    return _by_group(rewards, groups, standardise)


def group_scale(rewards: np.ndarray) -> float:
    """What `group_advantages` divides by in a group of these rewards; 1 where they are equal or fewer than
    two, so that there is no spread."""
    std = _std(rewards) if rewards.size > 1 else 0.0
    return std + STD_EPSILON if std else 1.0


def _std(r: np.ndarray) -> float:
    """Unbiased, in two passes; 0 where the rewards differ by rounding only (`STD_FLOOR`)."""
    std = float(np.sqrt(np.sum((r - r.mean()) ** 2) / (r.size - 1)))
    return 0.0 if std <= STD_FLOOR * max(1.0, float(np.abs(r).max())) else std


def rloo_advantages(rewards: Numbers, groups: Groups) -> Numbers:
    """Each reward minus the mean of the others of its group (REINFORCE leave-one-out).

    Equal rewards and a group of one give 0; a NaN reward is left out of the others' means and gets 0.

    Args:
        rewards: [n], any real dtype.
        groups: [n], equal for samples of one prompt.

    Returns:
        [n] fp64, of the kind of `rewards`.

    Raises:
        ValueError: an infinite reward (its index is named), or lengths that differ.

    Source: arXiv 2402.14740, equation 4.
    """

    def leave_one_out(r: np.ndarray) -> np.ndarray:
        if r.min() == r.max():
            return np.zeros_like(r)
        return (r - r.mean()) * (r.size / (r.size - 1))

    return _by_group(rewards, groups, leave_one_out)


def gae(
    token_rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation over the response tokens; not whitened.

        delta_t = r_t + gamma V_{t+1} - V_t          A_t = delta_t + gamma lam A_{t+1}

    Tokens outside the mask are stepped over: the successor of a token is the next one inside. Behind
    the last one V and A are 0. What stands outside the mask, NaN included, has no effect.

    Args:
        token_rewards: [B, T] reward at each token.
        values: [B, T] the critic's value before each token is chosen.
        mask: [B, T] bool or 0 / 1; response tokens.
        gamma: discount.
        lam: lambda of the estimator; 1 is return minus value.

    Returns:
        advantages [B, T] and returns [B, T] (advantage + value), computed in fp64, in the dtype of
        `values`, 0 outside the mask.

    Source: arXiv 1506.02438, equation 16.
    """
    inside = mask.bool()
    r = token_rewards.double().masked_fill(~inside, 0.0)
    v = values.double().masked_fill(~inside, 0.0)
    advantages = torch.zeros_like(v)
    next_value = torch.zeros_like(v[:, 0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(v.shape[1])):
        here = inside[:, t]
        advantage = r[:, t] + gamma * next_value - v[:, t] + gamma * lam * next_advantage
        advantages[:, t] = torch.where(here, advantage, 0.0)
        next_value = torch.where(here, v[:, t], next_value)
        next_advantage = torch.where(here, advantage, next_advantage)
    return advantages.to(values.dtype), (advantages + v).to(values.dtype)


def reward_to_go(token_rewards: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """The discounted sum of the rewards from each response token on (REINFORCE, REINFORCE++).

        G_t = r_t + gamma G_{t+1}

    Args:
        token_rewards: [B, T] reward at each token.
        mask: [B, T] bool or 0 / 1; tokens outside are stepped over, as in `gae`.
        gamma: discount.

    Returns:
        [B, T], computed in fp64, in the dtype of `token_rewards`, 0 outside the mask.
    """
    if gamma == 1.0:
        inside = mask.bool()
        r = token_rewards.double().masked_fill(~inside, 0.0)
        return r.flip(1).cumsum(1).flip(1).masked_fill(~inside, 0.0).to(token_rewards.dtype)
    zeros = torch.zeros_like(token_rewards)
    return gae(token_rewards, zeros, mask, gamma, lam=1.0)[0]


def whiten(
    values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True, whole: AddUp = np.asarray
) -> torch.Tensor:
    """Give the numbers inside a mask mean 0 and variance 1 (unbiased, two passes).

    Fewer than two numbers, or equal ones, have no spread: they become 0 (with `shift_mean`), or keep
    their mean.

    Args:
        values: [...] numbers, such as advantages [B, T]; those of this part of the batch.
        mask: [...] bool or 0 / 1 of the same shape.
        shift_mean: False puts the mean back after scaling.
        whole: adds up over all parts of the batch, whose mean and variance are then meant; called
            twice on every part. Left out: this part is all there is.

    Returns:
        [...], computed in fp64, in the dtype of `values`, 0 outside the mask.
    """
    inside = mask.bool()
    x = values.double().masked_fill(~inside, 0.0)
    count, total = whole(np.array([float(inside.sum()), float(x.sum())]))
    mean = total / max(count, 1.0)
    centred = torch.where(inside, x - mean, 0.0)
    (squares,) = whole(np.array([float(centred.square().sum())]))
    variance = squares / max(count - 1.0, 1.0)
    if math.sqrt(variance) <= STD_FLOOR * max(1.0, abs(mean)):  # equal but for rounding
        scaled = torch.zeros_like(x)
    else:
        scaled = centred / math.sqrt(variance + _WHITEN_EPSILON)
    if not shift_mean:
        scaled = torch.where(inside, scaled + mean, 0.0)
    return scaled.to(values.dtype)


def _by_group(rewards: Numbers, groups: Groups, advantage: Callable[[np.ndarray], np.ndarray]) -> Numbers:
    """Apply `advantage` to the scored rewards of every group that has at least two."""
    if isinstance(rewards, torch.Tensor):
        found = _by_group(rewards.detach().cpu().double().numpy(), groups, advantage)
        return torch.as_tensor(found, device=rewards.device)
    r = np.asarray(rewards, dtype=np.float64)
    members: dict[Hashable, list[int]] = {}
    names = groups.tolist() if isinstance(groups, torch.Tensor | np.ndarray) else groups
    for index, group in enumerate(names):
        members.setdefault(group, []).append(index)
    if r.shape != (len(names),):
        raise ValueError(f"rewards of shape {r.shape} for {len(names)} group entries")
    if np.isinf(r).any():
        raise ValueError(f"infinite reward at index {int(np.flatnonzero(np.isinf(r))[0])}")
    result = np.zeros_like(r)
    for indexes in members.values():
        scored = [i for i in indexes if not np.isnan(r[i])]
        if len(scored) > 1:
            result[scored] = advantage(r[scored])
    return result
