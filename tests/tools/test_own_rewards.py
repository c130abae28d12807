"""The methods that VSRM is compared with, against numbers worked out by hand."""

import numpy as np
import pytest

from megatron_meds.trajectory import Prompt, Trajectory
from tools.studies.own_rewards import LENGTH_WEIGHT, exit_decay, group_length


def test_later_right_exits_earn_half_of_the_one_before():
    # sure from the second exit on: 0, 1, 1/2, 1/4
    rewards = exit_decay(np.array([0.0, 1.0, 1.0, 1.0]))
    values = np.array([0.0, 1.0, 0.5, 0.25])
    assert rewards == pytest.approx((values[1:] - values.mean()) / 4)
    assert np.cumsum(rewards[::-1])[::-1][0] == pytest.approx(-(values[0] - values.mean()) / 4)
    assert rewards[0] > 0 > rewards[2]
    assert exit_decay(np.zeros(5)).tolist() == [0.0] * 4


def answered(prompt, length, correct):
    return Trajectory(
        Prompt(prompt, prompt, (1,), "1"), 0, [1] * length, "", [0.0] * length, "stop", 0, correct
    )


def test_right_answers_are_compared_with_the_right_ones_of_their_prompt():
    group = [
        answered("p", 10, True),
        answered("p", 30, True),
        answered("p", 500, False),
        answered("q", 9, True),
    ]
    short, long, wrong, alone = group_length(group)
    assert short == pytest.approx(1 - LENGTH_WEIGHT / (1 + np.e))
    assert long == pytest.approx(1 - LENGTH_WEIGHT / (1 + 1 / np.e))
    assert (wrong, alone) == (0.0, 1 - LENGTH_WEIGHT / 2)
