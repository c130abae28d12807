"""Responses to verdicts: the last box against the reference, in processes that can be killed.

Knows boxes and the pool; knows neither prompts nor rewards.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from megatron_meds.errors import UserError
from megatron_meds.verify.boxed import last_boxed
from megatron_meds.verify.pool import Item, Result, WorkerPool

_log = logging.getLogger(__name__)

_PLAIN_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_NOTABLE_SHARE = 0.01


@dataclass(frozen=True)
class Verdict:
    """Whether a response is right, and how that was found."""

    correct: bool
    reason: str
    """`right`; `wrong`; `no box` (none, or the last one empty or never closed); `timeout`; `crash` (the
    grading process died over it); `error` (the user's function raised, or returned no bool)."""
    answer: str | None
    """What stands in the last box."""
    detail: str = ""
    """The exception, if there was one."""


class GoldError(UserError, ValueError):
    """Reference answers that cannot be compared; names each one's row."""


class Grader:
    """Grades responses in a pool of processes.

        with Grader(workers=4, timeout=5.0) as grader:
            verdicts = grader.grade([(response, gold), ...])

    What holds: every verdict arrives within (items / workers + 1) * `timeout` plus the time to start
    the processes that had to be replaced; nothing that a response holds can stall or end the caller,
    or run anything. The grader may be shared by threads, whose calls take turns. It needs no
    `__main__` guard. The processes end with the context, or when the caller's process ends.
    """

    def __init__(
        self,
        workers: int = 2,
        timeout: float = 5.0,
        function: str | None = None,
        memory_mib: int | None = 4096,
    ) -> None:
        """
        Args:
            workers: processes.
            timeout: wall clock for one item, seconds; then the verdict is wrong, reason `timeout`.
            function: `module:name` of `(response: str, gold: str) -> bool` to ask instead of comparing
                the last box by math-verify. It runs in the same processes, under the same clock.
            memory_mib: address space of a process, MiB; None: no limit (a function that loads CUDA).
        """
        self._own = function is not None
        self._pool = WorkerPool(workers, timeout, function, memory_mib)
        self._timeout = timeout
        self.counts: Counter[str] = Counter()
        """Verdicts given so far, by reason."""

    def __enter__(self) -> Self:
        self._pool.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()

    def grade(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Verdicts of (response, gold) pairs, in their order.

        An answer that reads exactly like its gold is right without being parsed; equal pairs are
        graded once. A share of failed gradings that is notable, and twice what it has been so far,
        is logged as a warning with counts.

        Raises:
            RuntimeError: outside of the context.
            WorkerError: the processes cannot be started again.
        """
        answers = [last_boxed(response) for response, _ in pairs]
        items = [self._item(pair, answer) for pair, answer in zip(pairs, answers, strict=True)]
        distinct = list(dict.fromkeys(item for item in items if isinstance(item, tuple)))
        graded = dict(zip(distinct, self._pool.run(distinct), strict=True))
        results = [graded[item] if isinstance(item, tuple) else item for item in items]
        self._count(results)
        return [
            Verdict(result.reason == "right", result.reason, answer, result.detail)
            for result, answer in zip(results, answers, strict=True)
        ]

    def check_golds(
        self, golds: Sequence[str], rows: Sequence[str] | None = None, as_text: bool = False
    ) -> None:
        """Refuse reference answers that math-verify cannot parse. Nothing is asked of a user's function.

        Args:
            golds: reference answers.
            rows: where each stands, for the message, such as `train.jsonl:17`; None: `row 0` on.
            as_text: warn instead: an answer is then right where it reads like such a reference.

        Raises:
            GoldError: lists the rows, the first ten in full.
        """
        if self._own:
            return
        names = [f"row {i}" for i in range(len(golds))] if rows is None else rows
        doubtful = list(dict.fromkeys(g for g in golds if not _PLAIN_NUMBER.fullmatch(g.strip())))
        results = self._pool.run([("gold", "", gold) for gold in doubtful])
        faults = {g: r.reason for g, r in zip(doubtful, results, strict=True) if r.reason != "right"}
        bad = [(name, gold) for name, gold in zip(names, golds, strict=True) if gold in faults]
        if not bad:
            return
        shown = "\n".join(
            f"  {name}: {gold!r:.200}" + (f" ({faults[gold]})" if faults[gold] != "wrong" else "")
            for name, gold in bad[:10]
        )
        more = f"\n  and {len(bad) - 10} more" if len(bad) > 10 else ""
        message = f"{len(bad)} of {len(golds)} reference answers cannot be parsed:\n{shown}{more}\n"
        if as_text:
            _log.warning("%sthey are compared as text", message)
        else:
            raise GoldError(
                f"{message}mend or drop these rows, set verify.unparsed=text to compare them as text, "
                "or grade with verify.function"
            )

    def _item(self, pair: tuple[str, str], answer: str | None) -> Item | Result:
        """What a process has to look at, or the result where that is plain."""
        response, gold = pair
        if self._own:
            return ("call", response, gold)
        if answer is None:
            return Result("no box")
        if answer == gold.strip():
            return Result("right")
        return ("compare", answer, gold)

    def _count(self, results: Sequence[Result]) -> None:
        now = Counter(result.reason for result in results)
        before, seen = self.counts.copy(), self.counts.total()
        self.counts.update(now)
        kinds = {"timeout": f"a timeout (limit {self._timeout:g} s)", "crash": "a crash", "error": "an error"}
        for reason, words in kinds.items():
            share = now[reason] / max(1, len(results))
            if share < _NOTABLE_SHARE or share <= 2.0 * before[reason] / max(1, seen):
                continue
            first = next(r.detail for r in results if r.reason == reason)
            _log.warning(
                "grading: %d of %d answers ended in %s, %d of %d before; they count as wrong%s",
                now[reason],
                len(results),
                words,
                before[reason],
                seen,
                f"; the first: {first}" if first else "",
            )
