"""The SmolLM2 example: its reward, its problems, its settings."""

import json
from pathlib import Path

import pytest

from examples.smollm2.last_number import is_right, last_number, reward
from examples.smollm2.problems import problems
from megatron_meds.config import load
from megatron_meds.imports import load_function
from megatron_meds.trajectory import Prompt, Trajectory

FOLDER = Path(__file__).parents[2] / "examples" / "smollm2"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 5 = 8.", 8.0),
        ("The answer is 8", 8.0),
        ("8, no: 1,024", 1024.0),
        ("it is -4", -4.0),
        ("3-5", 5.0),
        ("**12**", 12.0),
        ("8.50 dollars", 8.5),
        ("eight", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_response_counts(text, number):
    assert last_number(text) == number


def test_the_reward_tells_right_from_wrong_and_wants_an_end():
    def answered(text: str, finish: str = "stop") -> Trajectory:
        prompt = Prompt(id="p", question="What is 3 + 5?", token_ids=(1,), answer="8")
        return Trajectory(prompt, 0, [1], text, [0.0], finish, 0)

    given = [answered("3 + 5 = 8"), answered("3 + 5 = 9"), answered("eight")]
    assert reward(given) == [1.0, 0.0, 0.0]
    assert reward([answered("8, a", "length"), answered("9, a", "length")]) == [0.5, -0.5]
    assert is_right("3 + 5 = 8.0", "8") and not is_right("none", "8")


def test_the_committed_problems_are_all_hundred_sums_and_share_none():
    train, held_out = problems()
    for name, rows in (("train", train), ("heldout", held_out)):
        assert [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()] == rows

    def sums(rows):
        return {frozenset(row["question"].strip("?").split()[2::2]) for row in rows}

    assert len(train) + len(held_out) == 100
    assert not sums(train) & sums(held_out)
    assert all(
        sum(map(int, row["question"].strip("?").split()[2::2])) == int(row["answer"])
        for row in train + held_out
    )


def test_the_settings_name_functions_that_are_there():
    settings = load(FOLDER / "add.yaml")
    assert load_function(settings.reward.function, "reward.function") is reward
    assert load_function(settings.verify.function, "verify.function") is is_right
