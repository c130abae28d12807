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
    output = run().output
    for name, known in KNOWN.items():
        assert f"{name} " in output
        assert known.hub in output


def test_named_sets_are_read_and_counted_alone_and_together(tmp_path):
    rows = [{"problem": "q", "answer": "1"}, {"problem": " q ", "answer": "1"}]
    for name in ("aime24", "aime25"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = run("aime24", "aime25", "--folder", tmp_path).output
    assert "aime24: 2 problems (2 rows)" in output
    assert "together 1 questions (4 rows, 3 duplicates left out)" in output


def test_a_name_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(UserError, match="aime23: no such set; known are aime24"):
        run("aime23")
