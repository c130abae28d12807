"""The benchmarks and training sets people use load with the field maps the documentation gives."""

import unicodedata
from pathlib import Path

import pytest

from megatron_meds.data.datasets import Counts, load_rows, unique_rows
from megatron_meds.data.known import Places
from megatron_meds.data.settings import DatasetSettings, FieldMap
from megatron_meds.trajectory import prompt_id
from megatron_meds.verify import Grader

DATA = Path(__file__).parents[3] / "shared" / "data"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the public data sets are not on this machine")


@pytest.fixture(scope="module")
def grader():
    with Grader(workers=2, timeout=60.0) as running:
        yield running


BENCHMARKS = {"aime24": 30, "amc23": 40, "math500": 500, "minerva": 272, "olympiadbench": 675}
EVAL, TRAIN = Places(DATA / "eval"), Places(DATA / "train")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_problem_loads_by_name_with_an_answer(name, caplog):
    rows = load_rows(DatasetSettings(name=name), places=EVAL)
    assert len(rows) == BENCHMARKS[name]
    assert all(row.question.strip() and row.answer.strip() for row in rows)
    counts = Counts()
    assert len(unique_rows(rows, counts)) == len(rows)
    assert all(row.source == name for row in rows)
    assert not caplog.text  # as many problems as are known


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_reference_answer_of_a_benchmark_can_be_compared(grader, name):
    rows = load_rows(DatasetSettings(name=name), places=EVAL)
    grader.check_golds([row.answer for row in rows], [row.place for row in rows])


def test_whole_numbers_kept_as_floats_become_integers():
    rows = load_rows(DatasetSettings(name="amc23"), places=EVAL)
    assert rows[0].answer == "27"
    assert not any(row.answer.endswith(".0") for row in rows)


def test_the_last_box_of_math500_is_its_answer():
    rows = load_rows(DatasetSettings(name="math500"), places=EVAL)
    assert sum(row.answer == row.extra["answer"] for row in rows) / len(rows) > 0.95


def test_gsm8k_loads_by_name_and_its_answers_are_numbers(grader):
    test = load_rows(DatasetSettings(name="gsm8k"), places=TRAIN)
    train = load_rows(DatasetSettings(name="gsm8k-train"), places=TRAIN)
    assert (len(test), len(train)) == (1319, 7473)
    assert test[0].answer == "18"
    assert all(float(row.answer.replace(",", "")).is_integer() for row in test)
    grader.check_golds([row.answer for row in test])


def test_the_papers_training_mix_asks_each_question_once_and_says_what_was_left_out():
    counts = Counts()
    sets = [DatasetSettings(name="dapo-math-17k"), DatasetSettings(name="math-3-5")]
    rows = unique_rows((row for one in sets for row in load_rows(one, counts, TRAIN)), counts)
    assert len({prompt_id(row.question) for row in rows}) == len(rows)
    assert (counts.rows, counts.filtered, counts.incomplete) == (17_917 + 7_500, 1_914, 2)
    assert counts.rows - counts.filtered - counts.incomplete - counts.duplicates == len(rows)
    assert counts.kept["dapo-math-17k"] == 17_187
    assert 4_000 < counts.kept["math-3-5"] < 5_584


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
