"""Which layers make a feature."""

import numpy as np
import pytest

from megatron_meds.meds import make_features, select_layers

LOGITS = np.array([[1.0, 2.0, 4.0, 7.0, 11.0], [0.0, 0.0, 1.0, 1.0, 5.0]])


def test_the_paper_ablations():
    deep = np.arange(3 * 28, dtype=float).reshape(3, 28) ** 2
    assert select_layers(deep).shape == (3, 14)
    np.testing.assert_array_equal(select_layers(deep, last="half"), deep[:, 14:])
    np.testing.assert_array_equal(select_layers(deep, last=None), deep)
    np.testing.assert_array_equal(select_layers(deep, last=14, difference=True), np.diff(deep)[:, -14:])
    np.testing.assert_array_equal(select_layers(deep, last=None, difference=True), np.diff(deep))


def test_differences_come_first_then_the_last_ones():
    np.testing.assert_array_equal(select_layers(LOGITS, last=2, difference=True), [[3, 4], [0, 4]])
    np.testing.assert_array_equal(select_layers(LOGITS, last="half"), LOGITS[:, -2:])


def test_more_than_there_are_means_all_and_the_input_is_not_touched():
    found = select_layers(LOGITS, last=14)
    np.testing.assert_array_equal(found, LOGITS)
    found[:] = 0
    assert LOGITS[0, 0] == 1.0


def test_no_rows_are_no_rows():
    assert len(select_layers(np.array([]))) == 0
    assert select_layers(np.empty((0, 28))).shape == (0, 14)


@pytest.mark.parametrize("last", [0, -1, "all"])
def test_impossible_counts_are_refused(last):
    with pytest.raises(ValueError, match="last = "):
        select_layers(LOGITS, last=last)


def test_a_difference_needs_two_layers():
    with pytest.raises(ValueError, match="two of them"):
        select_layers(np.ones((2, 1)), difference=True)


def test_a_users_function_sees_the_rows_with_layer_logits_and_their_trajectories():
    logits = np.array([[1.0, 2.0], [np.nan, np.nan], [3.0, 4.0]])
    seen = []

    def own(rows, trajectories):
        seen.extend(trajectories)
        return rows * 2

    found = make_features(logits, ["a", "b", "c"], function=own)
    assert seen == ["a", "c"]
    np.testing.assert_array_equal(found, [[2, 4], [np.nan, np.nan], [6, 8]])
    with pytest.raises(ValueError, match=r"meds\.feature_function gave an array of shape \(2,\)"):
        make_features(logits, ["a", "b", "c"], function=lambda rows, _: rows[:, 0])
    assert np.isnan(make_features(np.full((2, 3), np.nan), ["a", "b"], function=own)).all()
