"""Summaries of small sets worked out by hand, and how tables show them."""

import numpy as np
import pytest

from megatron_meds.evaluate import tables
from megatron_meds.evaluate.answers import Answer, Answers
from megatron_meds.evaluate.summary import average, differences, pass_table, summarise

REASONS = {"r": "right", "w": "wrong", "n": "no box", "t": "timeout"}


def answers(tmp_path, name, *problems):
    """From a letter for each sample: right, wrong, no box, timeout."""
    found = Answers(tmp_path / f"{name}.jsonl", [str(i) for i in range(len(problems))])
    with found:
        for number, letters in enumerate(problems):
            row = [Answer(x == "r", REASONS[x], None, 10 * (n + 1), x == "n") for n, x in enumerate(letters)]
            found.add(number, 0, row)
    return found


def test_a_set_is_summarised(tmp_path):
    found = summarise(answers(tmp_path, "s", "rrww", "wwww", "rnnt"), 4)
    assert (found.problems, found.samples, found.failed) == (3, 4, 1)
    assert found.pass_at[1].mean == pytest.approx((0.5 + 0 + 0.25) / 3)
    assert found.pass_at[2].mean == pytest.approx((1 - 1 / 6 + 0 + 0.5) / 3)
    assert found.pass_at[4].mean == pytest.approx(2 / 3)
    assert (found.tokens, found.boxed, found.truncated) == pytest.approx((25, 10 / 12, 2 / 12))


def test_sets_weigh_the_same_in_the_average_and_its_interval_is_that_of_independent_sets(tmp_path):
    random = np.random.default_rng(3)
    columns = {name: random.uniform(size=(size, 1)) for name, size in (("small", 30), ("large", 600))}
    one = {
        "small": summarise(answers(tmp_path, "a", "r"), 1),
        "large": summarise(answers(tmp_path, "b", "w"), 1),
    }
    found = average(one, columns).pass_at[1]
    assert found.mean == pytest.approx((columns["small"].mean() + columns["large"].mean()) / 2)
    drawn = [
        np.mean([column[random.integers(0, len(column), len(column))].mean() for column in columns.values()])
        for _ in range(4000)
    ]
    assert (found.low, found.high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.01)


def test_models_are_compared_with_the_first_on_the_same_problems(tmp_path):
    every = {
        model: {"s": pass_table(answers(tmp_path, model, *problems), 2, [1, 2])}
        for model, problems in {"base": ("ww", "rw"), "new": ("rw", "rr"), "same": ("ww", "rw")}.items()
    }
    new, same = differences(every)
    assert (new.model, new.baseline) == ("new", "base")
    assert new.by_set["s"].mean == pytest.approx(0.5)
    assert (same.by_set["s"].low, same.by_set["s"].high) == (0, 0)


def test_tables_say_the_same_in_every_form(tmp_path):
    found = summarise(answers(tmp_path, "s", "rw", "rr"), 2)
    head, cells = tables.rows({"my_model": {"math500": found}})
    assert head[:3] == ["model", "set", "problems x samples"] and "pass@2" in head
    assert cells[0][3].startswith("75.0 [")
    text = tables.markdown(head, cells)
    assert text.splitlines()[2].startswith("| my_model | math500 | 2 x 2 | 75.0 [")
    tex = tables.latex(head, cells)
    assert r"my\_model & math500 & 2 x 2 & 75.0 {\scriptsize [" in tex and r"100.0\%" in tex
    plain = tables.as_json({"my_model": {"math500": found}}, [], {"samples": 2})
    assert plain["models"]["my_model"]["math500"]["pass_at"][2]["mean"] == 1.0
