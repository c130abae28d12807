"""Rows are found in every kind of file and column, and none is lost without being counted."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_meds.data.datasets import Counts, DataError, load_rows, read_row, unique_rows
from megatron_meds.data.settings import DatasetSettings, FieldMap

ROWS = [
    {"question": "1+1", "answer": "2", "level": 1},
    {"question": "2+2", "answer": 4, "level": 2},
    {"question": "6/4", "answer": 1.5, "level": 3},
]


def write_jsonl(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path, counts=None, **settings):
    fields = FieldMap(**settings.pop("fields", {}))
    return load_rows(DatasetSettings(path=str(path), fields=fields, **settings), counts)


def test_json_lines_parquet_and_folders_give_the_same_rows(tmp_path):
    as_text = [{**row, "answer": str(row["answer"])} for row in ROWS]
    from_json = load(write_jsonl(tmp_path / "a.jsonl", as_text))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(as_text), tmp_path / "a.parquet")
    from_parquet = load(tmp_path / "a.parquet")
    folder = tmp_path / "folder" / "deep"
    folder.mkdir(parents=True)
    (tmp_path / "a.jsonl").rename(folder / "a.jsonl")
    (folder / "README.md").write_text("not data")
    from_folder = load(tmp_path / "folder")
    for rows in (from_json, from_parquet, from_folder):
        assert [(r.question, r.answer, r.extra) for r in rows] == [
            ("1+1", "2", {"level": 1}),
            ("2+2", "4", {"level": 2}),
            ("6/4", "1.5", {"level": 3}),
        ]


def test_a_data_set_is_loaded_by_name_through_datasets(tmp_path, monkeypatch):
    import datasets

    asked = []

    def load_dataset(path, config, split, revision):
        asked.append((path, config, split, revision))
        return datasets.Dataset.from_list(ROWS[:1])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setenv("MEGATRON_MEDS_CACHE", str(tmp_path))
    rows = load("someone/sums", config="easy", split="test", revision="abc")
    assert asked == [("someone/sums", "easy", "test", "abc")]
    assert (rows[0].question, rows[0].answer, rows[0].source) == ("1+1", "2", "sums")


def test_datasets_reads_a_folder_with_its_own_layout_as_we_do(tmp_path):
    import datasets

    path = write_jsonl(tmp_path / "train.jsonl", [{**row, "answer": str(row["answer"])} for row in ROWS])
    theirs = datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert [(row.question, row.answer) for row in load(path)] == [
        (r["question"], r["answer"]) for r in theirs
    ]


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (27.0, "27"),
        (-3.0, "-3"),
        (0.5, "0.5"),
        (7, "7"),
        ("27.0", "27.0"),
        (" x ", "x"),
        ("$\\frac{1}{2}$", "\\frac{1}{2}"),
        ("$1$, $2$", "$1$, $2$"),
    ],
)
def test_answers_become_text(value, answer):
    assert read_row({"question": "q", "answer": value}, FieldMap()).answer == answer


def test_nested_columns_lists_and_boxes_are_reached():
    columns = {
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how many?"}],
        "reward_model": {"ground_truth": "34"},
        "final_answer": ["$5$", "6"],
        "solution": "first \\boxed{1}, then \\boxed{\\frac{1}{2}}",
        "a.b": "exact name wins",
    }

    def answer(field):
        return read_row(columns, FieldMap(question="prompt", answer=field)).answer

    row = read_row(columns, FieldMap(question="prompt", answer="reward_model.ground_truth"))
    assert (row.question, row.system, row.answer) == ("how many?", "be brief", "34")
    assert answer("first(final_answer)") == "5"
    assert answer("final_answer.1") == "6"
    assert answer("last_box(solution)") == "\\frac{1}{2}"
    assert answer("a.b") == "exact name wins"


def test_the_id_column_is_kept_to_show():
    row = read_row({"question": "q", "answer": "1", "meta": {"n": 7}}, FieldMap(id="meta.n"))
    assert row.extra["id"] == 7


@pytest.mark.parametrize(
    ("row", "fields", "key"),
    [
        ({"problem": "q", "answer": "1"}, {}, "'question'"),
        ({"question": "q", "answer": ""}, {}, "'answer'"),
        ({"question": "q", "answer": None}, {}, "'answer'"),
        ({"question": "q", "answer": []}, {}, "'answer'"),
        ({"question": "q", "answer": float("nan")}, {}, "'answer'"),
        ({"question": " ", "answer": "1"}, {}, "'question'"),
        ({"question": "q", "answer": "1"}, {"system": "hint"}, "'hint'"),
        ({"question": "q", "s": "no box"}, {"answer": "last_box(s)"}, "'s'"),
        ({"question": "q", "s": "\\boxed{}"}, {"answer": "last_box(s)"}, "'s'"),
        ({"question": "q", "a": {"b": "1"}}, {"answer": "a.c"}, "'a.c'"),
    ],
)
def test_an_incomplete_row_is_named_with_file_row_and_key_or_skipped_and_counted(tmp_path, row, fields, key):
    good = {"question": "ok", "answer": "1", "hint": "h", "s": "\\boxed{1}", "a": {"c": "1"}}
    path = write_jsonl(tmp_path / "set.jsonl", [good, row])
    with pytest.raises(DataError) as failure:
        load(path, fields=fields)
    assert f"{path}, line 2" in str(failure.value)
    assert key in str(failure.value)
    counts = Counts()
    assert len(load(path, counts, fields=fields, incomplete="skip")) == 1
    assert (counts.rows, counts.incomplete) == (2, 1)


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        ({"question": "q", "answer": ["1"]}, {}, r"first\(answer\)"),
        ({"question": "q", "answer": True}, {}, "neither text nor a number"),
        ({"question": 3, "answer": "1"}, {}, "neither text nor a list of messages"),
        ({"question": "q", "answer": "1"}, {"answer": "first(answer)"}, "needs a list"),
        ({"question": [{"role": "user", "content": "a"}] * 2, "answer": "1"}, {}, "one user message"),
    ],
)
def test_a_wrong_kind_of_value_ends_the_run_even_where_incomplete_rows_are_skipped(
    tmp_path, row, fields, message
):
    with pytest.raises(DataError, match=message):
        load(write_jsonl(tmp_path / "set.jsonl", [row]), fields=fields, incomplete="skip")


def test_files_that_cannot_be_read_are_named(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "q", "answer": "1"}\n\n{"question"\n')
    with pytest.raises(DataError, match=r"broken\.jsonl, line 3: not valid JSON"):
        load(broken)
    (tmp_path / "broken.parquet").write_text("no")
    with pytest.raises(DataError, match="not valid Parquet"):
        load(tmp_path / "broken.parquet")
    with pytest.raises(DataError, match="no such file"):
        load(tmp_path / "missing.jsonl")
    (tmp_path / "data.csv").write_text("question,answer\n")
    with pytest.raises(DataError, match="must end in"):
        load(tmp_path / "data.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no"):
        load(tmp_path / "empty")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no usable row"):
        load(tmp_path / "empty.jsonl")


def test_a_limit_takes_the_first_rows(tmp_path):
    assert [row.question for row in load(write_jsonl(tmp_path / "a.jsonl", ROWS), limit=2)] == ["1+1", "2+2"]


def test_repeated_questions_are_asked_once_and_conflicts_are_counted_once_a_question():
    rows = [
        read_row({"question": question, "answer": answer}, FieldMap(), place=f"row {i}")
        for i, (question, answer) in enumerate(
            [("a  b", "1"), ("a b", "1"), (" a\nb ", "2"), ("a b", "3"), ("c", "1"), ("ｃ", "1")]
        )
    ]
    counts = Counts()
    assert [(row.question, row.answer) for row in unique_rows(rows, counts)] == [("a  b", "1"), ("c", "1")]
    assert (counts.duplicates, counts.conflicting) == (4, 1)
    assert counts.conflicts == ["row 0 answers '1', row 2 answers '2'"]
    counts.rows = len(rows)
    assert (
        str(counts)
        == "6 rows, 4 duplicates left out, 1 questions with conflicting answers (the first counts)"
    )
