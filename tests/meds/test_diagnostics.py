"""Eigen ratios, agreement with known kinds, and theorem 1."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.decomposition import PCA

from megatron_meds.meds import cluster_agreement, gibbs_gain, top1_eigen_ratio
from megatron_meds.meds.clustering import normalise
from megatron_meds.meds.diagnostics import EigenSums


@pytest.mark.parametrize("shape", [(40, 6), (5, 30)])
def test_the_eigen_ratio_is_the_explained_variance_of_the_first_component(shape):
    rows = np.random.default_rng(0).normal(size=shape) * np.linspace(1, 3, shape[1]) - 15
    assert top1_eigen_ratio(rows) == pytest.approx(PCA().fit(rows).explained_variance_ratio_[0])
    assert top1_eigen_ratio(rows, normalised=True) == pytest.approx(
        PCA().fit(normalise(rows)).explained_variance_ratio_[0]
    )


def test_a_line_has_ratio_one_and_what_does_not_vary_has_none():
    line = np.outer(np.arange(5.0), np.ones(4)) + 3
    assert top1_eigen_ratio(line) == pytest.approx(1.0)
    for rows in (np.full((6, 3), -17.3), np.ones((1, 3)), np.empty((0, 3))):
        assert np.isnan(top1_eigen_ratio(rows))


def test_pooled_ratios_do_not_depend_on_how_prompts_are_spread():
    generator = np.random.default_rng(1)
    sets = [generator.normal(size=(n, 5)) * [1, 2, 3, 4, 5] - 15 for n in (8, 1, 12, 3)]
    values = EigenSums.of(sets).values()
    split = EigenSums.merge([EigenSums.of(sets[:1]), EigenSums.of([]), EigenSums.of(sets[1:])]).values()
    assert split == pytest.approx(values)
    assert values["eigen_ratio_pooled"] == pytest.approx(top1_eigen_ratio(np.concatenate(sets)))
    assert values["eigen_ratio_normalised_pooled"] == pytest.approx(
        top1_eigen_ratio(np.concatenate(sets), normalised=True)
    )
    assert values["eigen_ratio"] == pytest.approx(
        np.median([top1_eigen_ratio(s) for s in sets if len(s) > 1])
    )
    assert EigenSums.of([]).values() == {} == EigenSums.of([np.ones((4, 2))]).values()


def test_agreement_with_known_kinds():
    assert cluster_agreement([0, 0, 1, 1], [5, 5, 2, 2]) == {"rand": 1, "adjusted_rand": 1, "purity": 1}
    # by hand: 6 pairs, of which (0, 1) and (2, 3) are together in the clusters, (0, 1, 2) in the kinds
    assert cluster_agreement([0, 0, -1, -1], [0, 0, 0, 1])["rand"] == pytest.approx(3 / 6)
    assert cluster_agreement([0, 0, -1, -1], [0, 0, 0, 1])["purity"] == pytest.approx(3 / 4)
    assert cluster_agreement([0, 0, 0, 0], [0, 0, 1, 1])["adjusted_rand"] == pytest.approx(0.0)
    with pytest.raises(ValueError, match="at least one row"):
        cluster_agreement([], [])


unit = st.floats(0.01, 1.0)


@settings(deadline=None)
@given(st.integers(2, 12), st.data(), st.floats(0.1, 5), st.floats(0.0, 3))
def test_theorem_1_penalising_costs_that_rise_where_rewards_fall_never_loses_reward(n, data, eta, weight):
    base = data.draw(arrays(np.float64, n, elements=unit))
    rewards = np.sort(data.draw(arrays(np.float64, n, elements=st.floats(0, 1))))
    costs = np.sort(data.draw(arrays(np.float64, n, elements=st.floats(0, 5))))[::-1]
    gain, covariance = gibbs_gain(base, rewards, costs, eta, weight)
    assert gain == pytest.approx(covariance, abs=1e-9)
    assert gain >= -1e-12


def test_theorem_1_needs_its_premise():
    gain, covariance = gibbs_gain(np.ones(2), np.array([0.0, 1.0]), np.array([0.0, 1.0]), 1.0, 1.0)
    assert gain == pytest.approx(covariance) and gain < -0.1
