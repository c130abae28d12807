"""What the algorithms choose where the settings leave it open, and advantages from a ledger."""

import subprocess
import sys

import numpy as np
import pytest

from megatron_meds.algorithms import mixed, resolve
from megatron_meds.algorithms.settings import AlgorithmSettings
from megatron_meds.trajectory import Prompt, RewardLedger, Trajectory, prompt_id


def _trajectories(lengths, questions):
    prompts = {q: Prompt(id=prompt_id(q), question=q, token_ids=(1,), answer="1") for q in questions}
    return [
        Trajectory(prompts[q], i, [0] * n, "", [0.0] * n, "stop", 0)
        for i, (n, q) in enumerate(zip(lengths, questions, strict=True))
    ]


def test_grpo_and_dapo_fill_in_their_own_values():
    grpo, dapo = (resolve(AlgorithmSettings(name=name)) for name in ("grpo", "dapo"))
    assert (grpo.clip_low, grpo.clip_high, grpo.dual_clip, grpo.aggregation) == (
        0.2,
        0.2,
        None,
        "seq-mean-token-mean",
    )
    assert (dapo.clip_low, dapo.clip_high, dapo.dual_clip, dapo.aggregation) == (
        0.2,
        0.28,
        10.0,
        "token-mean",
    )


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
