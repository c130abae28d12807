"""The KL reward: at every token in the ledger, and what each kind of algorithm sees of it."""

import numpy as np
import pytest

from megatron_meds.algorithms import resolve
from megatron_meds.algorithms.settings import AlgorithmSettings, KlSettings
from megatron_meds.rewards.divergence import add_kl
from megatron_meds.trajectory import Prompt, RewardLedger, Trajectory


def scored(own, reference, sample=0):
    t = Trajectory(Prompt("p", "?", (1,), "1"), sample, [0] * len(own), "", [0.0] * len(own), "stop", 0)
    t.logprobs = np.asarray(own, dtype=np.float32)
    t.reference_logprobs = np.asarray(reference, dtype=np.float32)
    return t


@pytest.fixture
def pair():
    return [scored([-1.0, -2.0], [-1.5, -1.0], 0), scored([-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0], 1)]


def test_minus_the_coefficient_times_the_estimate_stands_at_every_token(pair):
    for estimator, expected in (
        ("k1", [0.5, -1.0]),
        ("k3", [np.exp(-0.5) - 1 + 0.5, np.exp(1.0) - 1 - 1.0]),
    ):
        ledger = RewardLedger(pair)
        ledger.add("outcome", 0, 1.0)
        add_kl(ledger, pair, KlSettings(coefficient=0.1, term="reward", estimator=estimator))
        assert ledger.sources == ["outcome", "kl"]
        given = ledger.token_rewards()
        np.testing.assert_allclose(given[0], -0.1 * np.array(expected) + [0.0, 1.0], rtol=1e-6)
        assert not given[1].any()
        np.testing.assert_allclose(ledger.totals("kl"), [-0.1 * sum(expected), 0.0], rtol=1e-6)


def test_rewards_to_go_see_it_token_by_token_and_groups_see_its_sum(pair):
    ledger = RewardLedger(pair)
    add_kl(ledger, pair, KlSettings(coefficient=1.0, term="reward", estimator="k1"))
    to_go = resolve(AlgorithmSettings(name="reinforce_pp")).advantages(ledger, pair)
    returns = np.array([0.5, 1.0, 0.0, 0.0, 0.0])  # -(0.5 - 1) and then -(-1)
    np.testing.assert_allclose(
        np.concatenate(to_go), (returns - returns.mean()) / returns.std(ddof=1), rtol=1e-5
    )
    (left, right) = resolve(AlgorithmSettings(name="rloo")).advantages(ledger, pair)
    np.testing.assert_allclose([*left, *right], [0.5, 0.5, -0.5, -0.5, -0.5], rtol=1e-6)


def test_a_trajectory_without_reference_is_named(pair):
    pair[1].reference_logprobs = None
    with pytest.raises(ValueError, match="'kl': sample p/1"):
        add_kl(RewardLedger(pair), pair, KlSettings(coefficient=1.0, term="reward"))
