"""What the loss does about servers whose log-probabilities differ from the actor's."""

import math

import numpy as np
import pytest

from megatron_meds.algorithms.mismatch import diverged, gaps, importance_weights
from megatron_meds.algorithms.settings import MismatchSettings
from megatron_meds.metrics import Sums, describe_mismatch, describe_reference
from megatron_meds.trajectory import Prompt, Trajectory


def trajectory(actor, server):
    t = Trajectory(Prompt("p", "?", (1,), "1"), 0, [0] * len(actor), "", list(server), "stop", 0)
    t.logprobs = np.log(np.asarray(actor)).astype(np.float32)
    t.rollout_logprobs = np.log(np.asarray(server)).tolist()
    return t


def test_weights_are_the_capped_quotient_and_one_where_the_server_said_nothing():
    t = trajectory([0.5, 0.5, 0.25, 0.5], [0.5, 0.1, 0.5, math.nan])
    np.testing.assert_allclose(importance_weights(t, cap=2.0), [1.0, 2.0, 0.5, 1.0], rtol=1e-6)
    t.rollout_logprobs[3] = -math.inf
    assert importance_weights(t, cap=2.0)[3] == 1.0
    assert math.isnan(gaps(t)[3])


def test_a_sequence_leaves_for_its_largest_gap_or_its_mean_gap():
    calm = trajectory([0.5] * 4, [0.5] * 4)
    spike = trajectory([0.5] * 4, [0.5, 0.5, 0.5, 0.5 * math.exp(-2.0)])  # largest 2, mean 1/2
    drift = trajectory([0.5] * 4, [0.5 * math.e**0.7] * 4)  # 0.7 everywhere
    blind = trajectory([0.5] * 4, [math.nan] * 4)
    every = [calm, spike, drift, blind]
    assert diverged(every, MismatchSettings()) == [False] * 4
    assert diverged(every, MismatchSettings(max_gap=1.0)) == [False, True, False, False]
    assert diverged(every, MismatchSettings(max_mean_gap=0.6)) == [False, False, True, False]
    assert diverged(every, MismatchSettings(max_gap=1.0, max_mean_gap=0.6)) == [False, True, True, False]


def test_metrics_tell_the_largest_gap_per_sequence_and_what_was_capped_and_dropped():
    every = [
        trajectory([0.5, 0.5], [0.5, 0.5 * math.exp(-2.0)]),
        trajectory([0.5, 0.5], [0.5, 0.5 * math.exp(0.5)]),
        trajectory([0.5, 0.5], [math.nan, math.nan]),
    ]
    sums = Sums()
    describe_mismatch(sums, every, MismatchSettings(importance_weights=True, max_gap=1.0))
    found = sums.values()
    assert found["mismatch/max"] == pytest.approx(2.0, rel=1e-6)
    assert found["mismatch/sequence_max"] == pytest.approx(1.25, rel=1e-6)
    assert found["mismatch/capped"] == pytest.approx(1 / 6)
    assert found["mismatch/dropped_sequences"] == 1
    assert found["mismatch/unknown_tokens"] == 2
    plain = Sums()
    describe_mismatch(plain, every, MismatchSettings())
    assert not {"mismatch/capped", "mismatch/dropped_sequences"} & plain.values().keys()


def test_the_divergence_from_the_reference_is_its_k3_mean():
    t = trajectory([0.5, 0.2], [0.5, 0.2])
    t.reference_logprobs = np.log(np.asarray([0.25, 0.2])).astype(np.float32)
    sums = Sums()
    describe_reference(sums, [t])
    assert sums.values()["reference/kl"] == pytest.approx((0.5 - 1 - math.log(0.5)) / 2)
