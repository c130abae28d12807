"""Advantages against closed forms, against plain loops, and by the laws they obey."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_meds.algorithms import gae, group_advantages, reward_to_go, rloo_advantages, whiten

REWARDS = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=1, max_size=24)


def test_seven_fractional_rewards_and_one_zero_give_their_closed_form_even_in_single_precision():
    # std of seven a and one 0: a / sqrt(8); mean 7a/8.
    advantages = group_advantages(torch.tensor([0.35] * 7 + [0.0], dtype=torch.float32), [0] * 8)
    assert advantages.dtype == torch.float64
    np.testing.assert_allclose(advantages[:7], 1 / math.sqrt(8), rtol=1e-4)
    np.testing.assert_allclose(advantages[7], -7 / math.sqrt(8), rtol=1e-4)


@pytest.mark.parametrize("function", [group_advantages, rloo_advantages])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.35, 0.1, -1 / 3, 1e6])
def test_equal_rewards_give_exactly_zero(function, value):
    assert np.array_equal(function([value] * 7, [0] * 7), np.zeros(7))


def test_rewards_that_differ_by_rounding_only_give_zero():
    rounded = [0.3, 0.1 + 0.2, float(np.float32(0.1) + np.float32(0.2))]
    assert len(set(rounded)) > 1
    assert np.array_equal(group_advantages(rounded, [0, 0, 0]), np.zeros(3))


def test_the_smallest_penalty_in_use_still_counts():
    # alpha ln 2 with alpha = 0.02, the gentlest penalty of a recipe
    advantages = group_advantages([0.0, 0.0, 0.0, -0.02 * math.log(2)], [0] * 4)
    np.testing.assert_allclose(advantages, [0.5, 0.5, 0.5, -1.5], rtol=1e-3)


@pytest.mark.parametrize("function", [group_advantages, rloo_advantages])
def test_a_group_of_one_gives_zero(function):
    assert np.array_equal(function([1.0, 5.0], ["a", "b"]), np.zeros(2))


@pytest.mark.parametrize("function", [group_advantages, rloo_advantages])
def test_a_sample_without_a_score_gets_zero_and_leaves_the_others_as_they_are_without_it(function):
    with_nan = function([1.0, math.nan, 0.0, 0.5], [7, 7, 7, 7])
    without = function([1.0, 0.0, 0.5], [7, 7, 7])
    assert with_nan[1] == 0.0
    np.testing.assert_array_equal(np.delete(with_nan, 1), without)


@pytest.mark.parametrize("function", [group_advantages, rloo_advantages])
def test_groups_of_which_at_most_one_sample_has_a_score_give_zero(function):
    assert np.array_equal(function([math.nan, 1.0, math.nan, math.nan], [0, 0, 1, 1]), np.zeros(4))


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_reward_is_refused_with_its_index(value):
    with pytest.raises(ValueError, match="index 2"):
        group_advantages([0.0, 1.0, value], [0, 0, 0])


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError, match="3 group entries"):
        group_advantages([0.0, 1.0], [0, 0, 0])


def test_without_scaling_advantages_are_the_distance_from_the_mean():
    np.testing.assert_allclose(
        group_advantages([1.0, 0.0, 0.0, 0.0], [0] * 4, scale_by_std=False), [0.75, -0.25, -0.25, -0.25]
    )


def test_a_tensor_comes_back_as_a_tensor_and_groups_may_be_one():
    found = group_advantages(torch.tensor([1.0, 0.0, 3.0, 1.0]), torch.tensor([5, 5, 2, 2]))
    assert isinstance(found, torch.Tensor)
    np.testing.assert_allclose(found, [2**-0.5, -(2**-0.5)] * 2, rtol=1e-5)


@settings(deadline=None)
@given(REWARDS, st.data())
def test_group_advantages_equal_a_plain_loop_over_groups(rewards, data):
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards)))
    expected = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(own) < 2 or max(own) == min(own):
            expected.append(0.0)
        else:
            expected.append((reward - statistics.mean(own)) / (statistics.stdev(own) + 1e-6))
    np.testing.assert_allclose(group_advantages(rewards, groups), expected, rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(
    st.lists(st.integers(-40, 40).map(lambda x: x / 4), min_size=1, max_size=24),
    st.floats(-5, 5),
    st.floats(0.5, 5),
)
def test_group_advantages_do_not_see_a_shift_and_sum_to_zero(rewards, shift, factor):
    groups = [0] * len(rewards)
    base = np.asarray(group_advantages(rewards, groups))
    moved = group_advantages([factor * r + shift for r in rewards], groups)
    np.testing.assert_allclose(moved, base, atol=1e-3)  # the 1e-6 on the std is all that differs
    assert abs(base.sum()) < 1e-6


@settings(deadline=None)
@given(REWARDS.filter(lambda r: len(r) > 1))
def test_rloo_is_each_reward_minus_the_mean_of_the_others(rewards):
    expected = [r - statistics.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(rloo_advantages(rewards, ["p"] * len(rewards)), expected, atol=1e-9)


def _naive_gae(rewards, values, gamma, lam):
    """A_t = sum over k of (gamma lam)^k delta_{t+k}, written out."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, after, strict=True)]
    size = len(deltas)
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(size - t)) for t in range(size)]


@settings(deadline=None)
@given(st.integers(0, 2**31 - 1), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_its_sum_of_deltas_and_steps_over_tokens_outside_the_mask(seed, gamma, lam):
    draw = np.random.default_rng(seed)
    rewards, values = draw.normal(size=(2, 3, 9))
    mask = draw.random((3, 9)) < 0.6
    advantages, returns = gae(
        torch.from_numpy(np.where(mask, rewards, np.nan)),
        torch.from_numpy(np.where(mask, values, np.nan)),
        torch.from_numpy(mask),
        gamma,
        lam,
    )
    for b in range(3):
        inside = mask[b]
        expected = _naive_gae(rewards[b, inside].tolist(), values[b, inside].tolist(), gamma, lam)
        np.testing.assert_allclose(advantages[b, inside], expected, atol=1e-9)
        np.testing.assert_allclose(returns[b, inside], np.asarray(expected) + values[b, inside], atol=1e-9)
        assert not advantages[b, ~inside].any()
        assert not returns[b, ~inside].any()


def test_gae_with_gamma_and_lambda_one_is_return_minus_value():
    rewards = torch.tensor([[0.0, 0.5, 0.0, 1.0]])
    values = torch.tensor([[0.3, 0.2, 0.9, 0.4]])
    advantages, returns = gae(rewards, values, torch.ones(1, 4), gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[1.5, 1.5, 1.0, 1.0]]))
    torch.testing.assert_close(advantages, returns - values)
    assert advantages.dtype == torch.float32


def test_reward_to_go_discounts_what_comes_after():
    found = reward_to_go(
        torch.tensor([[1.0, 9.0, 0.0, 2.0, 9.0]]), torch.tensor([[1, 0, 1, 1, 0]]), gamma=0.5
    )
    torch.testing.assert_close(found, torch.tensor([[1.5, 0.0, 1.0, 2.0, 0.0]]))


def test_whitened_numbers_have_mean_zero_and_variance_one_inside_the_mask():
    generator = torch.Generator().manual_seed(0)
    values = 1000.0 + torch.randn(4, 50, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 50, generator=generator) < 0.5
    white = whiten(values.masked_fill(~mask, math.nan), mask)
    assert abs(white[mask].mean()) < 1e-9
    assert abs(white[mask].var() - 1.0) < 1e-6
    assert not white[~mask].any()
    torch.testing.assert_close(whiten(values, mask, shift_mean=False)[mask].mean(), values[mask].mean())


@pytest.mark.parametrize("mask", [[[0, 0, 0]], [[0, 1, 0]], [[1, 1, 1]]])
def test_whitening_nothing_one_number_or_equal_numbers_gives_zeros(mask):
    assert not whiten(torch.full((1, 3), 0.35), torch.tensor(mask)).any()


def test_parts_whitened_together_are_as_the_whole_whitened_at_once():
    values = 3.0 + torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.arange(40) % 7 != 0
    expected = whiten(values, mask)
    # the sums that two passes over the whole need, whichever part asks
    inside = values[mask]
    sums = [
        np.array([len(inside), inside.sum()]),
        np.array([(inside - inside.mean()).square().sum()]),
    ]
    found = []
    for part in (slice(0, 9), slice(9, 9), slice(9, 40)):
        passes = iter(sums)
        found.append(whiten(values[part], mask[part], whole=lambda own, passes=passes: next(passes)))
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-12, atol=1e-12)


@given(st.integers(0, 1000))
def test_an_undiscounted_reward_to_go_is_the_limit_of_a_discounted_one(seed):
    draw = np.random.default_rng(seed)
    rewards, mask = torch.from_numpy(draw.normal(size=(2, 6))), torch.from_numpy(draw.random((2, 6)) < 0.6)
    rewards = rewards.masked_fill(~mask, math.nan)
    torch.testing.assert_close(
        reward_to_go(rewards, mask, 1.0), reward_to_go(rewards, mask, 1.0 - 1e-12), rtol=1e-9, atol=1e-9
    )
