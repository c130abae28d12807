"""Shares of answers are counted over all responses, a missing box included."""

import pytest

from tools.tiny_reasoner.measure import summarise
from tools.tiny_reasoner.problems import Problem, problem_row


def test_kinds_of_answers_are_shares_of_all_responses():
    rows = [problem_row(Problem((7, 3, 4, 2), ("+", "*", "-"))), problem_row(Problem((2, 3), ("+",)))]
    found = summarise(
        rows, [["\\boxed{17}", "\\boxed{38}", "\\boxed{21}"], ["5", "\\boxed{5}", "\\boxed{6}"]]
    )
    assert found.responses == 6
    assert found.kinds == pytest.approx(
        {"right": 2 / 6, "left_to_right": 1 / 6, "minus_as_plus": 1 / 6, "slip": 1 / 6, "other": 1 / 6}
    )
    assert found.boxed == pytest.approx(5 / 6)
    assert found.characters == pytest.approx((10 * 3 + 1 + 9 * 2) / 6)
