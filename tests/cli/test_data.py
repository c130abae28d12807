"""`megatron-meds data` says which sets are known, and reads them from where they are."""

import json

import pytest
from typer.testing import CliRunner

from megatron_meds.cli.main import app
from megatron_meds.data.known import KNOWN
from megatron_meds.errors import UserError


def run(*arguments):
    return CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)


def test_the_known_sets_are_listed_with_their_sources():
    output = run("list").output
    for name, known in KNOWN.items():
        assert f"{name} " in output
        assert known.hub in output


def test_named_sets_are_read_and_counted_alone_and_together(tmp_path):
    rows = [{"problem": "q", "answer": "1"}, {"problem": " q ", "answer": "1"}]
    for name in ("aime24", "aime25"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = run("get", "aime24", "aime25", "--folder", tmp_path).output
    assert "aime24: 2 problems (2 rows)" in output
    assert "together 1 questions (4 rows, 3 duplicates left out)" in output


def test_a_name_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(UserError, match="aime23: no such set; known are aime24"):
        run("get", "aime23")


def test_problems_that_two_sets_share_are_shown_and_left_out(tmp_path):
    asked = [
        "Find the largest prime factor of 9879, and explain why no larger one exists.",
        "How many ways are there to seat five people around a round table?",
        "Compute $3^{10} - 1$.",
    ]
    trained = [
        "Find the largest prime factor of $9879$ and explain why no larger one exists",
        "In how many ways are there to seat five people around a round table, please?",
        "What is the sum of the first hundred odd numbers?",
        "What is the area of a circle of radius two?",
    ]
    files = []
    for name, questions in (("train", trained), ("eval", asked)):
        files.append(tmp_path / f"{name}.jsonl")
        rows = [{"question": q, "answer": "1", "level": 3} for q in questions]
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = run("overlap", *files, "--threshold", "0.7", "--drop", tmp_path / "new" / "left.jsonl").output
    assert "2 of 3 problems are in" in output and "1 of them identical" in output
    left = [json.loads(line) for line in (tmp_path / "new" / "left.jsonl").read_text().splitlines()]
    assert [row["question"] for row in left] == trained[2:]
    assert left[0]["answer"] == "1" and left[0]["level"] == 3
    output = run("overlap", *files, "--identical").output
    assert "1 of 3 problems" in output
    with pytest.raises(UserError, match=r"nothing\.jsonl: no such file"):
        run("overlap", files[0], tmp_path / "nothing.jsonl")
