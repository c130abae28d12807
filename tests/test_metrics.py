"""Sums over replicas equal the same numbers over everything at once."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from megatron_meds.metrics import Sums, describe, describe_critic, describe_mismatch
from megatron_meds.trajectory import Prompt, Trajectory
from tests.algorithms.test_algorithms import AddUp


def trajectory(logprobs, rollout, correct=True, finish="stop"):
    prompt = Prompt(id="p", question="?", token_ids=(1, 2), answer="1")
    t = Trajectory(prompt, 0, list(range(len(rollout))), "", list(rollout), finish, 0, correct=correct)
    t.logprobs = np.asarray(logprobs, dtype=np.float32)
    return t


def test_means_are_weighted_by_count_over_replicas():
    left, right = Sums(), Sums()
    left.mean("x", [1.0, 2.0, 3.0])
    right.mean("x", [10.0])
    left.maximum("top", 1.0)
    right.maximum("top", -5.0)
    left.total("n", 2)
    right.total("n", 3)
    assert Sums.merge([left, right]).values() == {"x": 4.0, "top": 1.0, "n": 5.0}


def test_a_mean_over_nothing_is_left_out():
    sums = Sums()
    sums.mean("x", [])
    assert sums.values() == {}


def test_mismatch_is_the_k3_estimate_and_leaves_unknown_tokens_out():
    sums = Sums()
    describe_mismatch(sums, [trajectory([-1.0, -2.0, -3.0], [-1.5, float("nan"), -3.0])])
    found = sums.values()
    assert found["mismatch/unknown_tokens"] == 1
    assert found["mismatch/abs"] == pytest.approx(0.25)
    assert found["mismatch/max"] == pytest.approx(0.5)
    assert found["mismatch/kl"] == pytest.approx((np.exp(0.5) - 1 - 0.5) / 2)


def test_accuracy_length_and_truncation_of_trajectories():
    sums = Sums()
    describe(
        sums, [trajectory([0] * 2, [0] * 2), trajectory([0] * 4, [0] * 4, correct=False, finish="length")]
    )
    found = sums.values()
    assert found["accuracy"] == 0.5 and found["truncated"] == 0.5 and found["length"] == 3.0
    assert found["response_tokens"] == 6 and found["prompt_tokens"] == 4


def test_explained_variance_is_that_of_all_replicas_together():
    random = np.random.default_rng(0)
    trajectories = [trajectory([0.0] * n, [0.0] * n) for n in (3, 1, 5, 2)]
    returns: list[np.ndarray | None] = []
    for t in trajectories:
        t.values = random.normal(size=len(t)).astype(np.float32)
        returns.append((t.values + 0.5 * random.normal(size=len(t)) + 3.0).astype(np.float32))
    returns[1] = None
    add_up, sums = AddUp(2), [Sums(), Sums()]

    def describe_part(part: int) -> None:
        here = slice(2 * part, 2 * part + 2)
        describe_critic(sums[part], trajectories[here], returns[here], add_up.of(part))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(describe_part, range(2)))
    found = Sums.merge(sums).values()
    values, targets = (
        np.concatenate([x[i] for i in (0, 2, 3)]) for x in ([t.values for t in trajectories], returns)
    )
    assert found["critic/value"] == pytest.approx(values.mean(), rel=1e-5)
    assert found["critic/return"] == pytest.approx(targets.mean(), rel=1e-5)
    wanted = 1 - (targets - values).var() / targets.var()
    assert 0 < wanted < 1
    assert found["critic/explained_variance"] == pytest.approx(wanted, rel=1e-4)


def test_equal_returns_have_no_variance_to_explain():
    sums, t = Sums(), trajectory([0.0] * 2, [0.0] * 2)
    t.values = np.zeros(2, dtype=np.float32)
    describe_critic(sums, [t], [np.ones(2, dtype=np.float32)], np.asarray)
    assert sums.values() == {"critic/value": 0.0, "critic/return": 1.0}
