"""Samples of one model on many sets, graded and written down as they come.

Knows the client, the grader and files of answers; starts no server and knows no training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_meds.errors import UserError
from megatron_meds.evaluate.answers import Answer, Answers, Missing
from megatron_meds.rollout.client import Client
from megatron_meds.rollout.messages import Request, Sample, Sampling
from megatron_meds.trajectory import Prompt
from megatron_meds.verify import Verdict

AT_ONCE = 16
"""Samples of a request: few enough that many problems are under way, and little is lost in a stop."""
_SETTINGS = "evaluation.json"


@dataclass(frozen=True)
class Plan:
    """What is asked of every model."""

    sampling: Sampling
    samples: int
    seed: int
    keep_responses: bool = False
    """Write the responses' texts too."""

    def settings(self) -> dict[str, Any]:
        """What answers of one file must have in common; the number of samples may grow."""
        drawn = asdict(self.sampling)
        del drawn["logprobs"]
        return {**drawn, "seed": self.seed}


class EvaluationStopped(UserError, RuntimeError):  # noqa: N818
    """All servers are gone; what was answered is on the disk."""


def open_answers(
    folder: Path, sets: Mapping[str, Sequence[Prompt]], settings: Mapping[str, Any]
) -> dict[str, Answers]:
    """What a model's folder holds of these sets, which may be nothing.

    Args:
        settings: what all answers of the folder share; written at the first call.

    Raises:
        UserError: the folder's are others (each difference is named), or a file is damaged.
    """
    file = folder / _SETTINGS
    if file.exists():
        there = json.loads(file.read_text())
        unlike = [
            f"{folder}: holds answers of {key} = {there.get(key)!r}, not {value!r}; take another --out"
            for key, value in settings.items()
            if there.get(key) != value
        ]
        if unlike:
            raise UserError("\n".join(unlike))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(dict(settings), indent=1) + "\n")
    return {name: Answers(folder / f"{name}.jsonl", [p.id for p in sets[name]]) for name in sets}


def fill(
    answers: Mapping[str, Answers],
    sets: Mapping[str, Sequence[Prompt]],
    plan: Plan,
    client: Client,
    grade: Callable[[Sequence[tuple[str, str]]], list[Verdict]],
    decode: Callable[[Sequence[int]], str],
    on_done: Callable[[int], None] = lambda samples: None,
) -> str | None:
    """Ask for the samples that are missing, until every problem has `plan.samples`.

    Grading and writing go on beside the sampling, in a thread of their own.

    Args:
        on_done: called with the number of samples of each answer that was written.

    Returns:
        None when all are there; else why the servers cannot be asked. Call again then.

    Raises:
        GenerationError: a request that servers refuse or that fails on servers that are well.
    """
    wanted = [(name, one) for name, found in answers.items() for one in found.missing(plan.samples, AT_ONCE)]
    requests = [_request(name, one, sets[name][one.problem], plan) for name, one in wanted]
    if not requests:
        return None
    keeper = _Keeper(answers, sets, plan, grade, decode, on_done)
    with keeper:
        return client.generate(requests, on_answer=lambda i, samples: keeper.take(*wanted[i], samples))


class _Keeper:
    """Grades and writes answers in a thread, in the order in which they come."""

    def __init__(
        self,
        answers: Mapping[str, Answers],
        sets: Mapping[str, Sequence[Prompt]],
        plan: Plan,
        grade: Callable[[Sequence[tuple[str, str]]], list[Verdict]],
        decode: Callable[[Sequence[int]], str],
        on_done: Callable[[int], None],
    ) -> None:
        self._answers, self._sets, self._plan = answers, sets, plan
        self._grade, self._decode, self._on_done = grade, decode, on_done
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grading")
        self._under_way: list[Future[None]] = []

    def __enter__(self) -> _Keeper:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            self._raise_failures()

    def take(self, name: str, asked: Missing, samples: list[Sample]) -> None:
        """Keep these soon; raises what went wrong with earlier ones."""
        self._raise_failures()
        self._under_way.append(self._thread.submit(self._keep, name, asked, samples))

    def _raise_failures(self) -> None:
        done = [future for future in self._under_way if future.done()]
        self._under_way = [future for future in self._under_way if not future.done()]
        for future in done:
            future.result()

    def _keep(self, name: str, asked: Missing, samples: list[Sample]) -> None:
        prompt = self._sets[name][asked.problem]
        texts = [self._decode(sample.token_ids) for sample in samples]
        verdicts = self._grade([(text, prompt.answer) for text in texts])
        graded = [
            Answer(
                correct=verdict.correct,
                reason=verdict.reason,
                answer=verdict.answer,
                tokens=len(sample.token_ids),
                truncated=sample.finish_reason == "length",
                response=text if self._plan.keep_responses else None,
            )
            for sample, text, verdict in zip(samples, texts, verdicts, strict=True)
        ]
        with self._answers[name] as file:
            file.add(asked.problem, asked.first, graded)
        self._on_done(len(graded))


def _request(name: str, asked: Missing, prompt: Prompt, plan: Plan) -> Request:
    """Sample number k of a problem has the same seed however often the evaluation was stopped."""
    digest = hashlib.sha256(f"{plan.seed}/{name}/{asked.problem}/{prompt.id}".encode()).digest()
    base = int.from_bytes(digest[:4], "big") >> 2  # 30 bits: room for the samples' numbers
    return Request(list(prompt.token_ids), asked.count, base + asked.first, sampling=plan.sampling)
