"""Graded samples of one model on one set, on disk as they come: a stopped evaluation goes on from there.

    FOLDER/SET.jsonl      a line for some samples of a problem: {"problem", "first", "samples": [...]}

A line is written at once and read whole or not at all, so that no sample is lost or counted twice.
Knows no servers and no models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

from megatron_meds.errors import UserError


class AnswersError(UserError, RuntimeError):
    """A file of answers that is damaged, or of another evaluation; names it and the line."""


@dataclass(frozen=True)
class Answer:
    """One graded sample."""

    correct: bool
    reason: str
    """How the verdict came about: `right`, `wrong`, `no box`, `timeout`, ..."""
    answer: str | None
    """What stands in the last box; None without one."""
    tokens: int
    """Of the response, end of text included."""
    truncated: bool
    """Ended by the length limit."""
    response: str | None = None
    """The text, where it is kept."""


@dataclass(frozen=True)
class Missing:
    """Samples still to be asked for: numbers `first` to `first + count - 1` of a problem."""

    problem: int
    first: int
    count: int


class Answers:
    """The graded samples of a set, in memory and in a file that is only appended to.

    A context manager around writing; reading needs none.
    """

    def __init__(self, file: Path, problems: list[str]) -> None:
        """Read what is there.

        Args:
            file: made at the first `add` where it is not there.
            problems: [P] an id for each problem, in the set's order. The file must be of the same.

        Raises:
            AnswersError: a line that cannot be read (but the last, if it was cut off in writing: that
                one is dropped), of another set, or that repeats a sample.
        """
        self.file = file
        self.problems = problems
        self._found: list[dict[int, Answer]] = [{} for _ in problems]
        self._out: IO[bytes] | None = None
        self._whole_bytes = self._read() if file.exists() else 0

    def __enter__(self) -> Answers:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._out = self.file.open("ab")
        self._out.truncate(self._whole_bytes)  # what was cut off in writing
        return self

    def __exit__(self, *_: object) -> None:
        assert self._out is not None
        self._out.close()
        self._out = None

    def add(self, problem: int, first: int, samples: list[Answer]) -> None:
        """Keep samples `first`, `first + 1`, ... of a problem; on the disk when this returns.

        Raises:
            ValueError: one of them is there already.
        """
        assert self._out is not None
        self._take(problem, first, samples)
        line = {"problem": problem, "id": self.problems[problem], "first": first}
        line["samples"] = [_plain(sample) for sample in samples]
        data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
        self._out.write(data)
        self._out.flush()
        self._whole_bytes += len(data)
        os.fsync(self._out.fileno())

    def missing(self, samples: int, at_once: int) -> list[Missing]:
        """What is still to be asked for until every problem has `samples`: at most `at_once` in a row."""
        found = []
        for problem, there in enumerate(self._found):
            wanted = [n for n in range(samples) if n not in there]
            while wanted:
                first = wanted[0]
                row = [n for place, n in enumerate(wanted[:at_once]) if n == first + place]
                found.append(Missing(problem, first, len(row)))
                wanted = wanted[len(row) :]
        return found

    def of(self, problem: int, samples: int) -> list[Answer]:
        """The first `samples` of a problem.

        Raises:
            KeyError: one is missing.
        """
        return [self._found[problem][n] for n in range(samples)]

    def column(self, name: str, samples: int) -> np.ndarray:
        """[P, samples] one field of every answer."""
        return np.array([[getattr(a, name) for a in self.of(p, samples)] for p in range(len(self.problems))])

    def __len__(self) -> int:
        """Samples that are there."""
        return sum(map(len, self._found))

    def _read(self) -> int:
        """Take in the file; returns the bytes of its whole lines."""
        size = 0
        for number, line in _whole_lines(self.file):
            try:
                row = json.loads(line)
                samples = [Answer(**sample) for sample in row["samples"]]
                problem, first, name = row["problem"], row["first"], row["id"]
            except (ValueError, KeyError, TypeError) as error:
                raise AnswersError(f"{self.file}, line {number}: cannot be read: {error}") from error
            if not 0 <= problem < len(self.problems) or self.problems[problem] != name:
                raise AnswersError(
                    f"{self.file}, line {number}: is of another set of problems; take another --out"
                )
            try:
                self._take(problem, first, samples)
            except ValueError as error:
                raise AnswersError(f"{self.file}, line {number}: {error}") from error
            size += len(line)
        return size

    def _take(self, problem: int, first: int, samples: list[Answer]) -> None:
        found = self._found[problem]
        twice = [n for n in range(first, first + len(samples)) if n in found]
        if twice:
            raise ValueError(f"sample {twice[0]} of problem {problem} is there already")
        found.update(enumerate(samples, first))


def _whole_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line with its end); a last one without its end is left out."""
    with file.open("rb") as source:
        for number, line in enumerate(source, 1):
            if line.endswith(b"\n"):
                yield number, line


def _plain(sample: Answer) -> dict[str, object]:
    row = asdict(sample)
    if sample.response is None:
        del row["response"]
    return row
