"""The ledger adds up by source, and refuses what cannot be a reward; prompt ids know copies."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_meds.trajectory import Prompt, RewardLedger, Trajectory, prompt_id


def _trajectories(*lengths):
    prompt = Prompt(id=prompt_id("q"), question="q", token_ids=(1,), answer="1")
    return [Trajectory(prompt, i, [0] * n, "", [0.0] * n, "stop", 0) for i, n in enumerate(lengths)]


def test_copies_of_a_question_share_an_id_and_other_questions_do_not():
    assert prompt_id("What is  1 + 1?\n") == prompt_id(" What is 1 + 1?")
    assert prompt_id("１＋１") == prompt_id("1+1")  # NFKC: full-width signs
    assert prompt_id("What is 1 + 2?") != prompt_id("What is 1 + 1?")
    assert len(prompt_id("")) == 64


def test_rewards_add_up_over_sources_and_tokens_in_order_of_appearance():
    ledger = RewardLedger(_trajectories(3, 2))
    ledger.open("step")
    ledger.add("outcome", 0, 1.0)
    ledger.add("step", 0, 0.25, token=0)
    ledger.add("step", 0, 0.5)
    ledger.add("step", 1, -0.5, token=-2)
    assert ledger.sources == ["step", "outcome"]
    np.testing.assert_array_equal(ledger.token_rewards()[0], [0.25, 0.0, 1.5])
    np.testing.assert_array_equal(ledger.token_rewards()[1], [-0.5, 0.0])
    np.testing.assert_array_equal(ledger.totals(), [1.75, -0.5])
    np.testing.assert_array_equal(ledger.totals("step"), [0.75, -0.5])


def test_a_source_without_entries_is_worth_zero_and_listed():
    ledger = RewardLedger(_trajectories(1))
    ledger.open("format")
    assert ledger.sources == ["format"]
    assert ledger.totals("format") == [0.0]


def test_removing_drops_one_sources_entries_at_one_token():
    ledger = RewardLedger(_trajectories(3))
    ledger.add("step", 0, 1.0)
    ledger.add("step", 0, 2.0, token=0)
    ledger.add("outcome", 0, 4.0)
    ledger.remove("step", 0, token=-1)
    np.testing.assert_array_equal(ledger.token_rewards()[0], [2.0, 0.0, 4.0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_source_and_sample(value):
    ledger = RewardLedger(_trajectories(1, 1))
    with pytest.raises(ValueError, match=f"'meds' for sample {prompt_id('q')[:12]}/1"):
        ledger.add("meds", 1, value)


@pytest.mark.parametrize("token", [3, -4])
def test_a_token_outside_of_the_response_is_refused(token):
    with pytest.raises(ValueError, match="which has 3 tokens"):
        RewardLedger(_trajectories(3)).add("step", 0, 1.0, token=token)


def test_a_trajectory_without_a_score_has_no_total_and_no_token_rewards():
    ledger = RewardLedger(_trajectories(2, 2))
    ledger.add("outcome", 0, 1.0)
    ledger.add("outcome", 1, 1.0)
    ledger.mark_unscored("custom", 1)
    ledger.mark_unscored("judge", 1)
    assert ledger.unscored == {1: "custom"}
    np.testing.assert_array_equal(ledger.totals(), [1.0, math.nan])
    np.testing.assert_array_equal(ledger.totals("outcome"), [1.0, 1.0])
    np.testing.assert_array_equal(ledger.totals("custom"), [0.0, math.nan])
    assert not ledger.token_rewards()[1].any()
    with pytest.raises(IndexError, match="no trajectory 2"):
        ledger.mark_unscored("custom", 2)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.floats(-5, 5), st.integers(0, 4)), max_size=30
    )
)
def test_totals_over_sources_equal_the_sums_of_token_rewards(entries):
    ledger = RewardLedger(_trajectories(5, 5, 5, 5))
    for source, trajectory, value, token in entries:
        ledger.add(source, trajectory, value, token)
    by_token = [r.sum() for r in ledger.token_rewards()]
    by_source = sum((ledger.totals(s) for s in ledger.sources), np.zeros(4))
    np.testing.assert_allclose(ledger.totals(), by_token, atol=1e-12)
    np.testing.assert_allclose(ledger.totals(), by_source, atol=1e-12)


def test_an_array_rewards_every_token_beside_the_entries_of_its_source():
    ledger = RewardLedger(_trajectories(3, 2))
    given = np.array([0.1, 0.2, 0.3])
    ledger.add_tokens("kl", 0, given)
    ledger.add("kl", 0, 1.0, token=1)
    given[:] = 9.0  # the ledger keeps its own
    np.testing.assert_allclose(ledger.token_rewards()[0], [0.1, 1.2, 0.3])
    np.testing.assert_allclose(ledger.totals("kl"), [1.6, 0.0])
    np.testing.assert_allclose(ledger.totals(), [1.6, 0.0])
    ledger.remove("kl", 0, token=-2)
    np.testing.assert_allclose(ledger.token_rewards()[0], [0.1, 0.0, 0.3])


@pytest.mark.parametrize(("values", "part"), [([0.0, math.nan], "token 1"), ([0.0], "of 2 tokens")])
def test_an_array_that_cannot_be_a_reward_is_refused_with_source_and_sample(values, part):
    with pytest.raises(ValueError, match=f"'kl'.*{prompt_id('q')[:12]}/0.*{part}"):
        RewardLedger(_trajectories(2)).add_tokens("kl", 0, np.array(values))
