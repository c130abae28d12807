"""The benchmarks and training sets people use load with the field maps the documentation gives."""

import unicodedata
from pathlib import Path

import pytest

from megatron_meds.data.datasets import Counts, load_rows, unique_rows
from megatron_meds.data.settings import DatasetSettings, FieldMap

DATA = Path(__file__).parents[3] / "shared" / "data"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the public data sets are not on this machine")

BENCHMARKS = {
    "aime24": (30, FieldMap(question="problem", id="id")),
    "amc23": (40, FieldMap(question="problem", id="id")),
    "math500": (500, FieldMap(question="problem", answer="last_box(solution)", id="unique_id")),
    "minerva_math": (272, FieldMap(question="problem", answer="last_box(solution)", id="idx")),
    "olympiadbench": (675, FieldMap(answer="first(final_answer)", id="id")),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_problem_loads_with_an_answer(name):
    count, fields = BENCHMARKS[name]
    rows = load_rows(DatasetSettings(path=str(DATA / "eval" / f"{name}.jsonl"), fields=fields))
    assert len(rows) == count
    assert all(row.question.strip() and row.answer.strip() for row in rows)
    counts = Counts()
    assert len(unique_rows(rows, counts)) == count
    assert all(row.source == name for row in rows)


def test_whole_numbers_kept_as_floats_become_integers():
    rows = load_rows(DatasetSettings(path=str(DATA / "eval/amc23.jsonl"), fields=BENCHMARKS["amc23"][1]))
    assert rows[0].answer == "27"
    assert not any(row.answer.endswith(".0") for row in rows)


def test_the_last_box_of_math500_is_its_answer():
    rows = load_rows(DatasetSettings(path=str(DATA / "eval/math500.jsonl"), fields=BENCHMARKS["math500"][1]))
    assert sum(row.answer == row.extra["answer"] for row in rows) / len(rows) > 0.95


def test_dapo_math_keeps_each_question_once_and_reports_conflicts():
    fields = FieldMap(question="prompt", answer="reward_model.ground_truth", id="extra_info.index")
    counts = Counts()
    rows = load_rows(DatasetSettings(path=str(DATA / "train/dapo_math_17k.parquet"), fields=fields), counts)
    unique = unique_rows(rows, counts)
    assert (counts.rows, counts.duplicates, counts.conflicting) == (17_917, 730, 12)
    assert (
        len(unique)
        == len({" ".join(unicodedata.normalize("NFKC", r.question).split()) for r in rows})
        == 17_187
    )


def test_the_two_math_problems_with_an_empty_box_are_refused_or_skipped():
    fields = FieldMap(question="problem", answer="last_box(solution)")
    path = str(DATA / "train/math_train.parquet")
    with pytest.raises(ValueError, match=r"math_train\.parquet, row \d+: the last box of 'solution'"):
        load_rows(DatasetSettings(path=path, fields=fields))
    counts = Counts()
    rows = load_rows(DatasetSettings(path=path, fields=fields, incomplete="skip"), counts)
    assert (counts.rows, counts.incomplete, len(rows)) == (7500, 2, 7498)
