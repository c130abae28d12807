"""Files of answers: nothing is lost or counted twice, wherever the writing stopped."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_meds.evaluate.answers import Answer, Answers, AnswersError

PROBLEMS = ["a", "b", "c"]


def graded(number, correct=True):
    return Answer(correct, "right" if correct else "wrong", str(number), 10 + number, False)


def written(folder, batches):
    answers = Answers(folder / "set.jsonl", PROBLEMS)
    with answers:
        for problem, first, count in batches:
            answers.add(problem, first, [graded(n) for n in range(first, first + count)])
    return answers


def test_what_was_written_is_read_and_the_rest_is_missing(tmp_path):
    written(tmp_path, [(0, 0, 4), (2, 0, 4), (2, 4, 2)])
    again = Answers(tmp_path / "set.jsonl", PROBLEMS)
    assert len(again) == 10
    missing = {(m.problem, m.first, m.count) for m in again.missing(6, 4)}
    assert missing == {(0, 4, 2), (1, 0, 4), (1, 4, 2)}
    assert again.of(2, 6) == [graded(n) for n in range(6)]


@given(st.sets(st.integers(0, 19)), st.integers(1, 20), st.integers(1, 20))
def test_what_is_missing_is_asked_for_once(tmp_path_factory, there, samples, at_once):
    answers = Answers(tmp_path_factory.mktemp("m") / "set.jsonl", ["p"])
    with answers:
        for n in there:
            answers.add(0, n, [graded(n)])
    asked = [n for m in answers.missing(samples, at_once) for n in range(m.first, m.first + m.count)]
    assert asked == sorted(set(range(samples)) - there)
    assert all(m.count <= at_once for m in answers.missing(samples, at_once))


@pytest.mark.parametrize("cut", [1, 5, 30, 60])
def test_a_line_that_was_cut_off_in_writing_is_asked_for_again(tmp_path, cut):
    file = tmp_path / "set.jsonl"
    written(tmp_path, [(0, 0, 2), (1, 0, 2)])
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    again = Answers(file, PROBLEMS)
    assert len(again) == 2 and {m.problem for m in again.missing(2, 2)} == {1, 2}
    with again:
        again.add(1, 0, [graded(0), graded(1)])
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: {**row, "id": "x"}, "another set of problems"),
        (lambda row: {**row, "problem": 7}, "another set of problems"),
        (lambda row: {**row, "first": 0}, "is there already"),
        (lambda row: {**row, "samples": [{"correct": True}]}, "cannot be read"),
    ],
)
def test_a_damaged_or_strange_line_is_named(tmp_path, change, words):
    file = tmp_path / "set.jsonl"
    written(tmp_path, [(0, 0, 2), (0, 2, 2)])
    first, second = file.read_text().splitlines()
    file.write_text(f"{first}\n{json.dumps(change(json.loads(second)))}\n")
    with pytest.raises(AnswersError, match=f"line 2: .*{words}"):
        Answers(file, PROBLEMS)


def test_a_sample_is_not_written_twice(tmp_path):
    answers = written(tmp_path, [(0, 0, 2)])
    with answers, pytest.raises(ValueError, match="sample 1 of problem 0"):
        answers.add(0, 1, [graded(1)])
    assert len(Answers(answers.file, PROBLEMS)) == 2


def test_responses_are_kept_where_they_are_given(tmp_path):
    answers = Answers(tmp_path / "set.jsonl", ["p"])
    with answers:
        answers.add(0, 0, [Answer(False, "no box", None, 3, True, response="π ≈ 3\n")])
    assert Answers(answers.file, ["p"]).of(0, 1)[0].response == "π ≈ 3\n"
