"""Sets asked for by name: where they are found, which fields they have, what is said where they are not."""

import json
import logging

import pytest

from megatron_meds.checks import find_faults
from megatron_meds.config import load
from megatron_meds.data.datasets import Counts, DataError, load_rows, unique_rows
from megatron_meds.data.known import KNOWN, Places, default_cache, find
from megatron_meds.data.settings import DatasetSettings, FieldMap
from tests.small_run import write_run


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_known_name_lends_its_fields_to_a_local_file(tmp_path):
    path = write(
        tmp_path / "mine.jsonl", [{"id": 7, "problem": "q", "answer": 27.0, "question": "not this one"}]
    )
    (row,) = load_rows(DatasetSettings(name="amc23", path=str(path)))
    assert (row.question, row.answer, row.source, row.extra["id"]) == ("q", "27", "amc23", 7)


def test_fields_that_are_given_win_over_the_known_ones(tmp_path):
    path = write(tmp_path / "mine.jsonl", [{"problem": "q", "text": "t", "answer": "1"}])
    (row,) = load_rows(DatasetSettings(name="amc23", path=str(path), fields=FieldMap(question="text")))
    assert row.question == "t"


@pytest.mark.parametrize(
    "file", ["minerva.jsonl", "minerva_math.jsonl", "minerva/test.jsonl", "minerva_math/test.jsonl"]
)
def test_a_folder_of_local_copies_is_looked_at_first(tmp_path, file):
    write(tmp_path / file, [{"problem": "q", "solution": "so \\boxed{\\frac12}", "idx": 3}])
    (row,) = load_rows(DatasetSettings(name="minerva"), places=Places(tmp_path, tmp_path / "cache"))
    assert (row.question, row.answer) == ("q", "\\frac12")


def test_every_known_copy_of_a_set_reads_alike(tmp_path):
    wrapped = "".join((KNOWN["dapo-math-17k"].around[0], "q", KNOWN["dapo-math-17k"].around[1]))
    copies = [
        {"prompt": "q", "solution": "34"},
        {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "34"}}
        | {"extra_info": {"index": 5}},
        {"prompt": [{"role": "user", "content": wrapped}], "reward_model": {"ground_truth": "34"}}
        | {"extra_info": {"index": 5}},
        {"problem": "q", "answer": "34", "id": "dapo/5"},
        {"question": "q", "answer": "34"},
    ]
    for number, copy in enumerate(copies):
        path = write(tmp_path / f"{number}.jsonl", [copy])
        (row,) = load_rows(DatasetSettings(name="dapo-math-17k", path=str(path)))
        assert (row.question, row.answer) == ("q", "34")


def test_the_answer_of_gsm8k_stands_after_the_hashes(tmp_path):
    path = write(tmp_path / "g.jsonl", [{"question": "q", "answer": "1 + 1 = <<1+1=2>>2\n#### 1,002"}])
    (row,) = load_rows(DatasetSettings(name="gsm8k", path=str(path)))
    assert row.answer == "1,002"
    path = write(tmp_path / "h.jsonl", [{"question": "q", "answer": "x"}])
    with pytest.raises(DataError, match="after a last `####`"):
        load_rows(DatasetSettings(path=str(path), fields=FieldMap(answer="after_hashes(answer)")))


def test_rows_of_other_levels_are_left_out_and_counted(tmp_path):
    rows = [
        {"problem": f"q{level}", "solution": f"\\boxed{{{level}}}", "level": f"Level {level}"}
        for level in (1, 3, 5, "?")
    ]
    rows.append({"problem": "empty", "solution": "\\boxed{}", "level": "Level 4"})
    counts = Counts()
    found = load_rows(DatasetSettings(name="math-3-5", path=str(write(tmp_path / "m.jsonl", rows))), counts)
    assert [row.question for row in found] == ["q3", "q5"]
    assert (counts.rows, counts.filtered, counts.incomplete) == (5, 2, 1)
    assert str(counts) == "5 rows, 2 left out by `where`, 1 incomplete rows left out"


def test_a_filter_on_a_column_that_is_not_there_is_refused(tmp_path):
    path = write(tmp_path / "m.jsonl", [{"question": "q", "answer": "1", "difficulty": 3}])
    settings = DatasetSettings(path=str(path), where={"difficulty": [3]})
    assert len(load_rows(settings)) == 1
    with pytest.raises(DataError, match="has no column 'level' for `where`"):
        load_rows(DatasetSettings(path=str(path), where={"level": [3]}))


def test_another_number_of_problems_than_known_is_warned_of(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", [{"problem": "q", "answer": "1"}])
    with caplog.at_level(logging.WARNING):
        load_rows(DatasetSettings(name="aime25", path=str(path)))
        assert "aime25: 1 problems, where 30 are known" in caplog.text
        caplog.clear()
        load_rows(DatasetSettings(name="aime25", path=str(path), limit=1))
    assert not caplog.text


def test_questions_of_two_sets_are_asked_once_and_counted_by_set(tmp_path):
    first = write(tmp_path / "a.jsonl", [{"problem": "Find $x$.", "answer": "1"}])
    second = write(
        tmp_path / "b.jsonl",
        [{"problem": f"{q}", "answer": "1", "level": 3} for q in ("Find  $x$. ", "Find $y$.", "Find $z$.")],
    )
    counts = Counts()
    sets = [
        DatasetSettings(name="dapo-math-17k", path=str(first)),
        DatasetSettings(name="math-3-5", path=str(second)),
    ]
    rows = unique_rows((row for one in sets for row in load_rows(one, counts)), counts)
    assert [row.source for row in rows] == ["dapo-math-17k", "math-3-5", "math-3-5"]
    assert counts.kept == {"dapo-math-17k": 1, "math-3-5": 2}
    assert str(counts) == "4 rows, 1 duplicates left out; from dapo-math-17k 1, math-3-5 2"


def test_settings_of_ones_own_go_before_the_known_ones():
    request = find(DatasetSettings(name="gsm8k", split="train", revision="abc", limit=3), Places())
    assert (request.hub, request.config, request.split, request.revision) == (
        "openai/gsm8k",
        "main",
        "train",
        "abc",
    )
    assert request.problems == ()
    own = find(DatasetSettings(name="aime25", path="someone/aime"), Places())
    assert (own.hub, own.path, own.split, own.revision) == ("someone/aime", None, "train", None)


def test_a_name_that_is_not_known_is_refused_before_anything_starts(tmp_path):
    path = write_run(tmp_path, {"data": {"train": [{"name": "aime1924"}, {}], "folder": "nowhere"}})
    faults = [f for f in find_faults_of(path) if f.startswith(("data.folder", "data.train"))]
    assert faults[0].startswith(f"data.folder = {tmp_path / 'nowhere'}: no such folder")
    assert faults[1].startswith("data.train.0.path: not given, and name = 'aime1924' is none of the known")
    assert faults[2].startswith("data.train.1.path: not given, and there is no `name` of the known sets")
    with pytest.raises(DataError, match="its name is none of aime24"):
        load_rows(DatasetSettings(name="aime1924"))


def find_faults_of(path):
    from megatron_meds.checks import Job

    settings = load(path)
    return list(find_faults(settings, Job.own(settings)))


def test_downloads_are_kept_in_the_users_cache_unless_told(monkeypatch, tmp_path):
    monkeypatch.delenv("MEGATRON_MEDS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "megatron_meds"
    monkeypatch.setenv("MEGATRON_MEDS_CACHE", str(tmp_path / "own"))
    assert Places().kept == tmp_path / "own"
