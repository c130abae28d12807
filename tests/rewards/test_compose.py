"""What enters the ledger: which sources, in which order, at which token, and what is refused."""

import numpy as np
import pytest

from megatron_meds.algorithms import resolve
from megatron_meds.algorithms.settings import AlgorithmSettings
from megatron_meds.imports import FunctionError
from megatron_meds.rewards import compose, in_loss
from megatron_meds.rewards.settings import FormatSettings, LengthSettings, OverlongSettings, RewardSettings
from megatron_meds.trajectory import Prompt, Trajectory, prompt_id

OWN = "tests.rewards.own_rewards"


def _trajectory(sample, correct, length=4, text="\\boxed{1}", finish="stop"):
    prompt = Prompt(id=prompt_id("q"), question="q", token_ids=(1, 2), answer="1")
    return Trajectory(
        prompt, sample, [7] * length, text, [0.0] * length, finish, weight_version=0, correct=correct
    )


def test_right_and_wrong_are_rewarded_at_the_last_token():
    ledger = compose([_trajectory(0, True), _trajectory(1, False, 2)], RewardSettings(wrong=-1.0), 8)
    assert ledger.sources == ["outcome"]
    assert ledger.entries("outcome") == [(0, 3, 1.0), (1, 1, -1.0)]


def test_sources_stand_in_their_stated_order_and_add_up():
    settings = RewardSettings(
        form=FormatSettings(no_box=-0.5),
        overlong=OverlongSettings(buffer=4, factor=1.0),
        function=f"{OWN}:by_length",
    )
    ledger = compose([_trajectory(0, True, 6), _trajectory(1, False, 8, text="no")], settings, max_tokens=8)
    assert ledger.sources == ["outcome", "format", "overlong", "custom"]
    np.testing.assert_allclose(ledger.totals("outcome"), [1.0, 0.0])
    np.testing.assert_allclose(ledger.totals("format"), [0.0, -0.5])
    np.testing.assert_allclose(ledger.totals("overlong"), [-0.5, -1.0])
    np.testing.assert_allclose(ledger.totals("custom"), [-0.6, -0.8])
    np.testing.assert_allclose(ledger.totals(), [-0.1, -2.3])
    tokens = ledger.token_rewards()
    assert not tokens[0][:-1].any()
    assert tokens[0][-1] == ledger.totals()[0]


def test_a_users_function_may_replace_the_outcome():
    settings = RewardSettings(function=f"{OWN}:by_length", function_replaces_outcome=True)
    ledger = compose([_trajectory(0, None)], settings, 8)  # then no verdict is needed
    assert ledger.sources == ["custom"]


def test_an_ungraded_trajectory_is_refused_by_name():
    with pytest.raises(ValueError, match=f"{prompt_id('q')[:12]}/5 was not graded"):
        compose([_trajectory(5, None)], RewardSettings(), 8)


def test_nan_leaves_the_sample_out_and_the_group_unpoisoned():
    trajectories = [_trajectory(i, correct) for i, correct in enumerate([True, True, False])]
    ledger = compose(trajectories, RewardSettings(function=f"{OWN}:second_unknown"), 8)
    assert ledger.unscored == {1: "custom"}
    np.testing.assert_array_equal(np.isnan(ledger.totals()), [False, True, False])
    np.testing.assert_array_equal(ledger.totals("outcome"), [1.0, 1.0, 0.0])
    advantages = resolve(AlgorithmSettings(name="grpo")).advantages(ledger, trajectories)
    assert not advantages[1].any()
    np.testing.assert_allclose([advantages[0][0], advantages[2][0]], [2**-0.5, -(2**-0.5)], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("infinite", ValueError, f"-inf from source 'custom' for sample {prompt_id('q')[:12]}/1"),
        ("one_too_few", ValueError, "reward.function gave 1 numbers for 2 trajectories"),
        ("none_at_all", TypeError, f"None for sample {prompt_id('q')[:12]}/0"),
        ("absent", FunctionError, "reward.function = .* has no 'absent'"),
    ],
)
def test_what_a_users_function_may_not_give_is_refused_naming_sample_or_setting(name, error, message):
    trajectories = [_trajectory(0, True), _trajectory(1, False)]
    with pytest.raises(error, match=message):
        compose(trajectories, RewardSettings(function=f"{OWN}:{name}"), 8)


def test_overlong_grows_linearly_over_the_buffer_and_stops_at_the_factor():
    settings = RewardSettings(overlong=OverlongSettings(buffer=4, factor=0.5), correct=0.0)
    lengths = [1, 6, 7, 8, 9, 10]
    trajectories = [_trajectory(i, True, n) for i, n in enumerate(lengths)]
    found = compose(trajectories, settings, max_tokens=10).totals("overlong")
    np.testing.assert_allclose(found, [0.0, 0.0, -0.125, -0.25, -0.375, -0.5])


def test_a_buffer_longer_than_the_limit_is_refused():
    with pytest.raises(ValueError, match=r"reward\.overlong\.buffer = 9"):
        compose([_trajectory(0, True)], RewardSettings(overlong=OverlongSettings(buffer=9)), 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("thought</think> \\boxed{1}", 0.0),
        ("thought</think> nothing", -9.5),
        ("thought</think> \\boxed{1} \\boxed{", -9.5),
        ("thought, \\boxed{1}", -10.0),
        ("thought without end", -10.0),
    ],
)
def test_reasoning_that_never_closes_costs_more_than_a_missing_box(text, expected):
    settings = RewardSettings(form=FormatSettings(no_box=-9.5, unclosed=-10.0, think_close="</think>"))
    assert compose([_trajectory(0, False, text=text)], settings, 8).totals("format")[0] == expected


def test_overlong_filtering_leaves_truncated_responses_out_of_the_loss_only_if_asked():
    trajectories = [_trajectory(0, True), _trajectory(1, False, finish="length")]
    assert in_loss(trajectories, OverlongSettings()) == [True, True]
    assert in_loss(trajectories, OverlongSettings(filter=True)) == [True, False]


def test_released_outcome_and_format_rewards_stand_alone():
    form = FormatSettings(think_close="</think>", no_box=-9.5, unclosed=-10.0, replaces_outcome=True)
    texts = {"</think>\\boxed{1}": 1.0, "</think>\\boxed{2}": 0.0, "</think>1": -9.5, "\\boxed{1}": -10.0}
    ledger = compose(
        [_trajectory(i, text.endswith("{1}"), text=text) for i, text in enumerate(texts)],
        RewardSettings(form=form),
        8,
    )
    assert ledger.totals().tolist() == list(texts.values())


def test_a_length_penalty_grows_with_the_tokens():
    settings = RewardSettings(length=LengthSettings(penalty=0.5))
    ledger = compose([_trajectory(0, True, 4), _trajectory(1, False, 8)], settings, max_tokens=8)
    assert ledger.entries("length") == [(0, 3, -0.25), (1, 7, -0.5)]
    assert ledger.totals().tolist() == [0.75, -0.5]
