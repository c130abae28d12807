"""What steps earn: the released numbers, the closed forms, and the tokens they stand at."""

import json
import math
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_meds.trajectory import Prompt, RewardLedger, Trajectory
from megatron_meds.vsrm import StepRules, enter_steps, least_change, reward_steps, step_rewards
from megatron_meds.vsrm.rewards import own_step_rewards

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gold_vsrm_rewards.json").read_text())
ACCURACIES = st.lists(st.integers(0, 5).map(lambda right: right / 5), min_size=1, max_size=20)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(len(case["accuracies"])))
def test_rewards_are_those_of_the_released_code(case):
    found = step_rewards(case["accuracies"], gamma=GOLDEN["gamma"], window=GOLDEN["window"])
    assert found.tolist() == pytest.approx(case["rewards"], abs=1e-12)


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0, 0.2, 0.6, 0.4, 1], [0.2, 0.4, -0.2, 0.6]),
        ([0, 0, 0.4, 0.4, 0.4], [0.28, 0.4, 0, 0]),
        ([0.2] * 6 + [0.6], [0, 0.096040, 0.1372, 0.196, 0.28, 0.4]),
        ([1, 1, 1, 1], [0, 0, 0]),
        ([0.4], []),
    ],
)
def test_rewards_of_the_papers_rule(accuracies, expected):
    assert step_rewards(accuracies).tolist() == pytest.approx(expected)


@given(ACCURACIES)
def test_without_look_ahead_the_rewards_add_up_to_the_gain(accuracies):
    assert step_rewards(accuracies, window=0).sum() == pytest.approx(accuracies[-1] - accuracies[0], abs=1e-9)


@given(ACCURACIES, st.integers(1, 6))
def test_looking_ahead_changes_flat_steps_only_and_by_less_than_the_gain_ahead(accuracies, window):
    flat, ahead = step_rewards(accuracies, window=0), step_rewards(accuracies, window=window)
    changed = flat != ahead
    assert not flat[changed].any()
    for j in np.flatnonzero(changed):
        assert abs(ahead[j]) < np.abs(flat[j + 1 : j + 1 + window]).max()


@given(ACCURACIES)
def test_a_change_counts_from_min_gain_samples_on(accuracies):
    rewards = step_rewards(accuracies, window=0, eps=least_change(5, min_gain=2))
    gained = np.rint(np.diff(accuracies) * 5)
    assert rewards.tolist() == pytest.approx(np.where(np.abs(gained) >= 2, gained / 5, 0).tolist())


@pytest.mark.parametrize("wrong", [[], [0.2, math.nan], [[0.2, 0.4]], [0.2, math.inf]])
def test_accuracies_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="accuracies"):
        step_rewards(wrong)


def ledger_of(length: int) -> RewardLedger:
    prompt = Prompt("p", "q", (1,), "1")
    return RewardLedger([Trajectory(prompt, 0, [1] * length, "", [0.0] * length, "stop", 1)])


def test_a_step_is_rewarded_at_its_last_or_first_token():
    last, first = ledger_of(10), ledger_of(10)
    enter_steps(last, 0, [2, 5, 10], [0.5, 0.0])
    enter_steps(first, 0, [2, 5, 10], [0.5, 0.0], place="first")
    assert last.entries("steps") == [(0, 4, 0.5), (0, 9, 0.0)]
    assert first.entries("steps") == [(0, 2, 0.5), (0, 5, 0.0)]


def test_a_step_on_the_outcomes_token_adds_to_it_or_gives_way():
    cases: list[tuple[Literal["add", "overwrite"], float]] = [("add", 1.5), ("overwrite", 1.0)]
    for outcome, expected in cases:
        ledger = ledger_of(6)
        ledger.add("outcome", 0, 1.0)
        enter_steps(ledger, 0, [1, 3, 6], [0.25, 0.5], outcome=outcome)
        assert ledger.token_rewards()[0].tolist() == [0, 0, 0.25, 0, 0, expected]


@pytest.mark.parametrize(("bounds", "rewards"), [([1, 3], [0.1, 0.2]), ([2, 12], [0.5])])
def test_steps_that_do_not_fit_the_response_are_refused(bounds, rewards):
    with pytest.raises(ValueError, match=r"steps|bounds"):
        enter_steps(ledger_of(10), 0, bounds, rewards)


def test_any_function_scores_the_prefixes_of_a_response():
    text = "<think>2*3=6. But wait. So it is 7. However, it is 6.</think>6"
    asked: list[str] = []

    def score(prefixes: list[str]) -> list[float]:
        asked.extend(prefixes)
        return [p.count("6") / 2 for p in prefixes]

    found = reward_steps(text, score, StepRules(skip=5, gap=10))
    assert asked[0] == "<think>2*3=6.</think>" and asked[-1] == text[: text.index("</think>") + 8]
    assert found.rewards.tolist() == pytest.approx([0.245, 0.35, 0.5])
    assert found.accuracies.tolist() == [0.5, 0.5, 0.5, 1.0]
    assert [text[i : i + 4] for i in found.offsets] == [" But", " So ", " How"]
    assert reward_steps("no reasoning", score).offsets == []
    with pytest.raises(ValueError, match="score gave"):
        reward_steps(text, lambda prefixes: [0.0], StepRules(skip=5, gap=10))


def test_a_function_of_ones_own_must_give_a_finite_number_for_each_step():
    assert own_step_rewards(np.diff, [0.0, 0.5, 1.0], "p/0").tolist() == [0.5, 0.5]
    for wrong in (lambda a: a, lambda a: [np.nan] * 2, lambda a: 0.0):
        with pytest.raises(ValueError, match=r"3 accuracies of sample p/0: should be 2 finite numbers"):
            own_step_rewards(wrong, [0.0, 0.5, 1.0], "p/0")
