"""What the algorithms choose where the settings leave it open, and advantages from a ledger."""

import subprocess
import sys
import typing

import numpy as np
import pytest

from megatron_meds.algorithms import mixed, resolve
from megatron_meds.algorithms.recipe import NAMES
from megatron_meds.algorithms.settings import (
    GROUP_RELATIVE,
    REWARD_TO_GO,
    STANDARDISED,
    AlgorithmSettings,
)
from megatron_meds.trajectory import Prompt, RewardLedger, Trajectory, prompt_id


def _trajectories(lengths, questions):
    prompts = {q: Prompt(id=prompt_id(q), question=q, token_ids=(1,), answer="1") for q in questions}
    return [
        Trajectory(prompts[q], i, [0] * n, "", [0.0] * n, "stop", 0)
        for i, (n, q) in enumerate(zip(lengths, questions, strict=True))
    ]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("grpo", (0.2, 0.2, None, "seq-mean-token-mean", "token")),
        ("dapo", (0.2, 0.28, 10.0, "token-mean", "token")),
        ("dr_grpo", (0.2, 0.2, None, "seq-mean-token-sum-norm", "token")),
        ("gspo", (3e-4, 4e-4, None, "seq-mean-token-mean", "sequence")),
        ("grpo_entropy", (0.2, 0.2, None, "seq-mean-token-mean", "token")),
        ("rloo", (0.2, 0.2, None, "seq-mean-token-sum", "token")),
        ("reinforce_pp", (0.2, 0.2, None, "seq-mean-token-mean", "token")),
        ("reinforce_pp_baseline", (0.2, 0.2, None, "seq-mean-token-mean", "token")),
        ("ppo", (0.2, 0.2, 3.0, "token-mean", "token")),
    ],
)
def test_every_algorithm_fills_in_its_own_values_and_adds_no_term_unasked(name, own):
    a = resolve(AlgorithmSettings(name=name))
    assert a.name == name
    assert (a.clip_low, a.clip_high, a.dual_clip, a.aggregation, a.ratio) == own
    assert (a.entropy_bonus, a.kl_loss, a.importance_cap) == (0.0, 0.0, None)
    assert (a.entropy_advantage is not None) == (name == "grpo_entropy")
    assert (a.returns is not None) == (name == "ppo")


def test_the_settings_name_exactly_the_algorithms_there_are():
    names = set(typing.get_args(AlgorithmSettings.model_fields["name"].annotation)) - {"sft"}
    assert names == set(NAMES)
    assert names >= {*GROUP_RELATIVE, *REWARD_TO_GO, *STANDARDISED}


def test_grpo_of_the_paper_is_a_matter_of_one_setting():
    grpo = resolve(AlgorithmSettings(name="grpo", kl={"coefficient": 0.001}))
    assert (grpo.kl_loss, grpo.aggregation, grpo.clip_high) == (0.001, "seq-mean-token-mean", 0.2)
    as_reward = resolve(AlgorithmSettings(name="grpo", kl={"coefficient": 0.001, "term": "reward"}))
    assert as_reward.kl_loss == 0.0


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_what_the_settings_say_wins_zero_included(name):
    algorithm = resolve(
        AlgorithmSettings(
            name=name, clip_low=0.0, clip_high=0.5, dual_clip=3.0, aggregation="seq-mean-token-sum"
        )
    )
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip, algorithm.aggregation) == (
        0.0,
        0.5,
        3.0,
        "seq-mean-token-sum",
    )


def test_supervised_training_has_no_policy_loss():
    with pytest.raises(ValueError, match="sft"):
        resolve(AlgorithmSettings(name="sft"))


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_every_token_gets_its_sequences_advantage_within_the_prompts_group(name):
    trajectories = _trajectories([3, 1, 2, 2], ["a", "b", "a", "b"])
    ledger = RewardLedger(trajectories)
    for index, reward in enumerate([1.0, 0.0, 0.0, 1.0]):
        ledger.add("outcome", index, reward)
    ledger.add("overlong", 0, -0.5)
    found = resolve(AlgorithmSettings(name=name)).advantages(ledger, trajectories)
    assert [len(a) for a in found] == [3, 1, 2, 2]
    half = 2**-0.5
    for array, expected in zip(found, [half, -half, -half, half], strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5)


def test_a_trajectory_without_a_score_gets_zero_advantage():
    trajectories = _trajectories([2, 2, 2], ["a"] * 3)
    ledger = RewardLedger(trajectories)
    for index, reward in enumerate([1.0, 0.0, 1.0]):
        ledger.add("outcome", index, reward)
    ledger.mark_unscored("custom", 2)
    found = resolve(AlgorithmSettings(name="dapo")).advantages(ledger, trajectories)
    assert not found[2].any()
    np.testing.assert_allclose([a[0] for a in found[:2]], [2**-0.5, -(2**-0.5)], rtol=1e-5)


@pytest.mark.parametrize(
    ("correct", "expected"),
    [([], False), ([True], False), ([True, True], False), ([False, False], False), ([True, False], True)],
)
def test_a_group_is_mixed_when_it_holds_right_and_wrong(correct, expected):
    assert mixed(correct) is expected


@pytest.mark.parametrize("package", ["algorithms", "verify", "rewards"])
def test_settings_are_read_without_torch(package):
    code = f"import sys, megatron_meds.{package}.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
