"""Questions that are both trained on and evaluated are found whatever their spaces and signs."""

from pathlib import Path

import pytest

from megatron_meds.data.datasets import DataError, load_rows
from megatron_meds.data.known import Places
from megatron_meds.data.overlap import core, find_overlap, without_overlap
from megatron_meds.data.settings import DatasetSettings
from megatron_meds.trajectory import Prompt, prompt_id

DATA = Path(__file__).parents[3] / "shared" / "data"


def prompts(*questions: str) -> list[Prompt]:
    return [Prompt(prompt_id(q), q, (1,), "1") for q in questions]


def test_copies_that_differ_in_spaces_signs_and_case_are_found_and_left_out():
    training = prompts("Find $x^2$ if $x=3$.", "Find y.", "Prove it")
    overlap = find_overlap(training, {"a": prompts("find x^2, if x = 3"), "b": prompts("Find z.", "z")})
    assert overlap.asked == {"a": 1}
    assert str(overlap) == "1 of a"
    assert [p.question for p in without_overlap(training, overlap)] == ["Find y.", "Prove it"]


def test_signs_of_arithmetic_tell_questions_apart_and_hyphens_do_not():
    assert len({core(q) for q in ("7+3*4", "7-3*4", "7+3/4", "73*4", "? + ?", "? - ?")}) == 6
    assert core("a five-digit number") == core("a five digit number")
    assert core("5 \N{MINUS SIGN} x") == core("$5-x$")


def test_the_tiny_reasoners_sets_share_no_question():
    folder = Path(__file__).parents[2] / "examples" / "tiny_reasoner"
    sets = {
        name: prompts(
            *(row.question for row in load_rows(DatasetSettings(path=str(folder / f"{name}.jsonl"))))
        )
        for name in ("train", "heldout")
    }
    assert find_overlap(sets["train"], {"heldout": sets["heldout"]}).asked == {}


def test_training_on_nothing_but_the_evaluation_is_refused_when_it_is_to_be_dropped():
    training = prompts("Find y.")
    with pytest.raises(DataError, match=r"every training question is asked in evaluation \(1 of a\)"):
        without_overlap(training, find_overlap(training, {"a": prompts("find y")}))


@pytest.mark.skipif(not DATA.is_dir(), reason="the public data sets are not on this machine")
def test_the_papers_training_sets_hold_as_many_benchmark_problems_as_was_counted_by_others():
    def load(name, folder):
        rows = load_rows(DatasetSettings(name=name), places=Places(DATA / folder))
        return prompts(*(row.question for row in rows))

    names = ("aime24", "amc23", "math500", "minerva", "olympiadbench")
    benchmarks = {name: load(name, "eval") for name in names}
    dapo = find_overlap(load("dapo-math-17k", "train"), benchmarks)
    # Letters and digits alone find 7 of MATH500: one asks for the roots of z^4 + z^2 + 1, training for
    # those of z^4 - z^2 + 1.
    assert dapo.asked == {"amc23": 8, "math500": 6, "olympiadbench": 10}
