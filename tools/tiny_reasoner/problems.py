"""Arithmetic problems for the tiny reasoner, and the traces that answer them, mistakes included.

A problem is an expression of two to four operands from 2 to 12 with at most one multiplication.
A trace works it out operation by operation, a line each, in one of four ways (`KINDS`), repeats
the work a few times for no reason, and boxes its result. Knows nothing of tokens or models.
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TRAIN_PROBLEMS = 4096
HELD_OUT_PROBLEMS = 512
OPERANDS = range(2, 13)
OPERAND_COUNTS = {2: 0.1, 3: 0.4, 4: 0.5}
"""How often a problem has so many operands. There are only 363 problems of two."""
MULTIPLICATION = 0.8
"""How often a problem holds a multiplication."""

KINDS = {"right": 0.5, "left_to_right": 0.25, "minus_as_plus": 0.125, "slip": 0.125}
"""Ways to work a problem out, and the share of traces that go each way. `left_to_right` ignores
precedence, `minus_as_plus` takes every minus for a plus, `slip` miscounts. A mistake need not
change the answer: 2*3+4 is the same from left to right."""
SLIP_RATE = 0.6
"""Share of a `slip` trace's operations that are off."""
SLIPS = (-10, -1, 1, 10)
"""By how much an operation can be off."""
MOST_CHECKS = 3
"""Each number of re-checks from 0 to this is as likely as another."""
CHECK = "Wait, let me check."

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


@dataclass(frozen=True)
class Problem:
    """An expression: one operator (`+`, `-` or `*`) between each two operands."""

    operands: tuple[int, ...]
    operators: tuple[str, ...]

    @property
    def question(self) -> str:
        """The expression as text, such as `7+3*4-2`."""
        signs = (*self.operators, "")
        return "".join(f"{number}{sign}" for number, sign in zip(self.operands, signs, strict=True))


@dataclass(frozen=True)
class Work:
    """Operations in the order they were done, such as `3*4=12`, and what came out."""

    lines: tuple[str, ...]
    answer: int


def draw_problem(rng: random.Random) -> Problem:
    """One problem; the multiplication, if any, stands at any place alike."""
    count = rng.choices(list(OPERAND_COUNTS), list(OPERAND_COUNTS.values()))[0]
    operators = [rng.choice("+-") for _ in range(count - 1)]
    if rng.random() < MULTIPLICATION:
        operators[rng.randrange(count - 1)] = "*"
    return Problem(tuple(rng.choice(OPERANDS) for _ in range(count)), tuple(operators))


def draw_problems(rng: random.Random, count: int) -> list[Problem]:
    """`count` different problems."""
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        problems[draw_problem(rng)] = None
    return list(problems)


def work_out(
    problem: Problem,
    left_to_right: bool = False,
    minus_as_plus: bool = False,
    slip: Callable[[int], int] = lambda operation: 0,
) -> Work:
    """Work a problem out; without the further arguments, rightly.

    Args:
        slip: what to add to the result of the operation with this number (0-based, in the order
            in which they are done).
    """
    numbers, operators = list(problem.operands), list(problem.operators)
    lines = []
    while operators:
        at = operators.index("*") if "*" in operators and not left_to_right else 0
        sign = operators.pop(at)
        if minus_as_plus and sign == "-":
            sign = "+"
        left, right = numbers[at], numbers.pop(at + 1)
        numbers[at] = _OPERATIONS[sign](left, right) + slip(len(lines))
        lines.append(f"{left}{sign}{right}={numbers[at]}")
    return Work(tuple(lines), numbers[0])


def work_as(problem: Problem, kind: str, rng: random.Random) -> Work:
    """Work a problem out in the way named by `kind`, one of `KINDS`."""
    if kind == "slip":
        return work_out(problem, slip=lambda _: rng.choice(SLIPS) if rng.random() < SLIP_RATE else 0)
    return work_out(problem, left_to_right=kind == "left_to_right", minus_as_plus=kind == "minus_as_plus")


def response(work: Work, checks: int) -> str:
    """The trace as text: the work inside `<think>`, repeated `checks` times, then the box."""
    lines = list(work.lines)
    for _ in range(checks):
        lines += [CHECK, *work.lines]
    thoughts = "\n".join(lines)
    return f"<think>\n{thoughts}\n</think>\n\\boxed{{{work.answer}}}"


def answers(problem: Problem) -> dict[str, str | list[str]]:
    """What every kind of work answers: text for the right one and the two misreadings; for `slip`
    the sorted answers that one operation off by one of `SLIPS` leads to."""
    steps = len(problem.operators)
    slipped = {
        work_out(problem, slip=lambda n, at=at, off=off: off if n == at else 0).answer
        for at in range(steps)
        for off in SLIPS
    }
    return {
        "right": str(work_out(problem).answer),
        "left_to_right": str(work_out(problem, left_to_right=True).answer),
        "minus_as_plus": str(work_out(problem, minus_as_plus=True).answer),
        "slip": [str(answer) for answer in sorted(slipped)],
    }


def problem_row(problem: Problem) -> dict[str, object]:
    """A row of a problem file: question, answer, and what each kind of mistake would answer."""
    kinds = answers(problem)
    return {"question": problem.question, "answer": kinds.pop("right"), "mistakes": kinds}


def kind_of(answer: str | None, row: dict[str, object]) -> str:
    """Which kind of work gives this answer to the problem of `row`: `right`, else the first of
    the row's mistakes that fits, else `other` (None, no answer, is `other`)."""
    if answer == row["answer"]:
        return "right"
    mistakes = row["mistakes"]
    assert isinstance(mistakes, dict)
    for kind, expected in mistakes.items():
        if answer == expected or (isinstance(expected, list) and answer in expected):
            return kind
    return "other"


def draw_traces(rng: random.Random, count: int, held_out: set[str]) -> Iterator[dict[str, str | int]]:
    """Rows to learn from: question, response, and how the response came about (kind, checks).
    Questions repeat as they are drawn; those in `held_out` are left out."""
    made = 0
    while made < count:
        problem = draw_problem(rng)
        if problem.question in held_out:
            continue
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        checks = rng.randint(0, MOST_CHECKS)
        work = work_as(problem, kind, rng)
        yield {
            "question": problem.question,
            "response": response(work, checks),
            "kind": kind,
            "checks": checks,
        }
        made += 1


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Write JSON lines; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_problems(out: Path, seed: int) -> set[str]:
    """Write the two problem sets, which share no question; returns the held-out questions."""
    drawn = draw_problems(random.Random(seed), TRAIN_PROBLEMS + HELD_OUT_PROBLEMS)
    held_out = drawn[:HELD_OUT_PROBLEMS]
    write_rows(out / "heldout.jsonl", map(problem_row, held_out))
    write_rows(out / "train.jsonl", map(problem_row, drawn[HELD_OUT_PROBLEMS:]))
    return {problem.question for problem in held_out}


def write_traces(path: Path, count: int, seed: int, held_out: set[str]) -> None:
    """Write `count` traces, none about a held-out problem."""
    write_rows(path, draw_traces(random.Random(seed + 1), count, held_out))
