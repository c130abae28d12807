"""pass@k against exact fractions, and intervals against their closed forms."""

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_meds.evaluate import bootstrap, paired_difference, pass_at_k, powers_of_two


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_nearest_float_to_the_fraction(case):
    n, c, k = case
    assert pass_at_k(n, c, k) == float(1 - Fraction(comb(n - c, k), comb(n, k)))


def test_pass_at_k_counts_the_draws_that_hold_a_right_one():
    samples = [True, False, False, True, False, False]
    for k in range(1, 7):
        drawn = list(combinations(samples, k))
        assert pass_at_k(6, 2, k) == pytest.approx(sum(map(any, drawn)) / len(drawn))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_powers_of_two_end_at_the_number_of_samples():
    assert powers_of_two(1) == [1]
    assert powers_of_two(128) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert powers_of_two(100)[-1] == 64


def test_the_bootstrap_interval_is_that_of_the_mean():
    values = np.random.default_rng(0).normal(3.0, 2.0, size=400)
    found = bootstrap(values)
    half = 1.96 * values.std() / 20
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.15 * half)
    assert bootstrap(values) == found
    narrow = bootstrap(values, level=0.5)
    assert found.low < narrow.low < narrow.high < found.high


def test_a_difference_in_pairs_does_not_see_how_hard_the_problems_are():
    hard = np.random.default_rng(1).uniform(size=200)
    found = paired_difference(hard + 0.1, hard)
    assert (found.low, found.mean, found.high) == pytest.approx((0.1, 0.1, 0.1))
    with pytest.raises(ValueError, match="same problems"):
        paired_difference(hard, hard[:-1])


@pytest.mark.parametrize("values", [[], [[1.0]], [1.0, float("nan")]])
def test_values_without_a_mean_are_refused(values):
    with pytest.raises(ValueError):
        bootstrap(values)
