"""The tiny reasoner's problems and traces say what they claim to say."""

import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.tiny_reasoner import problems

ROOT = Path(__file__).parents[2]


@st.composite
def drawn_problems(draw):
    return problems.draw_problem(random.Random(draw(st.integers(0, 2**32))))


@given(drawn_problems())
def test_problems_stay_within_their_limits(problem):
    assert 2 <= len(problem.operands) <= 4
    assert all(2 <= number <= 12 for number in problem.operands)
    assert problem.operators.count("*") <= 1


@given(drawn_problems())
def test_right_work_is_what_python_computes(problem):
    assert problems.work_out(problem).answer == eval(problem.question)


@given(drawn_problems())
def test_left_to_right_is_the_expression_with_every_step_bracketed(problem):
    text = str(problem.operands[0])
    for sign, number in zip(problem.operators, problem.operands[1:], strict=True):
        text = f"({text}{sign}{number})"
    assert problems.work_out(problem, left_to_right=True).answer == eval(text)


@given(drawn_problems())
def test_minus_as_plus_is_the_expression_with_plus_for_minus(problem):
    expected = eval(problem.question.replace("-", "+"))
    assert problems.work_out(problem, minus_as_plus=True).answer == expected


@given(drawn_problems(), st.integers(0, 2**32))
def test_only_slips_write_down_a_wrong_operation(problem, seed):
    for kind in ("right", "left_to_right", "minus_as_plus"):
        for line in problems.work_as(problem, kind, random.Random(seed)).lines:
            operation, result = line.split("=")
            assert eval(operation) == int(result)


def test_slips_are_off_by_1_or_10_in_three_of_five_operations():
    rng = random.Random(0)
    lines = [
        line for _ in range(2000) for line in problems.work_as(problems.draw_problem(rng), "slip", rng).lines
    ]
    errors = [int(result) - eval(operation) for operation, result in (line.split("=") for line in lines)]
    assert set(errors) == {-10, -1, 0, 1, 10}
    assert sum(error != 0 for error in errors) / len(errors) == pytest.approx(0.6, abs=0.03)


def test_a_trace_thinks_checks_and_boxes():
    work = problems.Work(("3*4=12", "7+12=19"), 19)
    assert problems.response(work, 1) == (
        "<think>\n3*4=12\n7+12=19\nWait, let me check.\n3*4=12\n7+12=19\n</think>\n\\boxed{19}"
    )


def test_kinds_of_answers_are_told_apart():
    row = problems.problem_row(problems.Problem((7, 3, 4, 2), ("+", "*", "-")))
    assert row["question"] == "7+3*4-2"
    assert row["answer"] == "17"
    assert problems.kind_of("17", row) == "right"
    assert problems.kind_of("38", row) == "left_to_right"
    assert problems.kind_of("21", row) == "minus_as_plus"
    assert problems.kind_of("27", row) == "slip"
    assert problems.kind_of("1000", row) == "other"
    assert problems.kind_of(None, row) == "other"


@given(drawn_problems(), st.integers(0, 2**32))
def test_every_misreading_answers_what_its_row_records(problem, seed):
    row = problems.problem_row(problem)
    for kind in ("left_to_right", "minus_as_plus"):
        work = problems.work_as(problem, kind, random.Random(seed))
        assert row["mistakes"][kind] == str(work.answer)


def test_traces_have_the_stated_shares_and_leave_held_out_questions_alone():
    rng = random.Random(0)
    held_out = {problem.question for problem in problems.draw_problems(rng, 200)}
    rows = list(problems.draw_traces(rng, 8000, held_out))
    assert not held_out & {row["question"] for row in rows}
    for kind, share in problems.KINDS.items():
        assert sum(row["kind"] == kind for row in rows) / len(rows) == pytest.approx(share, abs=0.02)
    for checks in range(4):
        assert sum(row["checks"] == checks for row in rows) / len(rows) == pytest.approx(0.25, abs=0.02)
    assert all(re.fullmatch(r"<think>\n[^<]+\n</think>\n\\boxed\{-?\d+\}", row["response"]) for row in rows)


def test_the_two_sets_are_disjoint_unique_and_the_same_for_a_seed(tmp_path):
    def write(name, seed):
        problems.write_problems(tmp_path / name, seed)
        return [(tmp_path / name / file).read_text() for file in ("train.jsonl", "heldout.jsonl")]

    train, held_out = write("a", 0)
    assert [train, held_out] == write("b", 0)
    assert train != write("c", 1)[0]
    questions = [json.loads(line)["question"] for line in (train + held_out).splitlines()]
    assert len(questions) == len(set(questions)) == 4608


def test_the_committed_problems_are_those_of_seed_0(tmp_path):
    problems.write_problems(tmp_path, seed=0)
    for file in ("train.jsonl", "heldout.jsonl"):
        committed = ROOT / "examples/tiny_reasoner" / file
        assert committed.read_text() == (tmp_path / file).read_text()
