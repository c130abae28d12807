"""What is asked of a vLLM server and what it answers, as plain data. Knows no connection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_meds.weights.control import INITIAL

_NO_LOGPROB = -9999.0
"""What the endpoint sends in place of a log-prob that is missing, NaN or -inf."""


class GenerationError(RuntimeError):
    """A request that cannot be answered; the message names it and the server."""


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    temperature: float
    top_p: float
    max_tokens: int
    top_k: int = -1
    logprobs: bool = True
    """Ask for the log-probability of each sampled token."""


@dataclass(frozen=True)
class Request:
    """One prompt and how many responses to sample."""

    prompt_ids: list[int]
    n: int
    seed: int | None = None
    """Response k is sampled with seed + k, so that a request sent again gives the same responses
    (up to the rounding of another batch); None: the server's own."""
    sampling: Sampling | None = None
    """None: as the client's settings say."""
    group: int | None = None
    """Requests of one group go to one server, where the beginning they share is computed once."""

    def __str__(self) -> str:
        ids = ", ".join(map(str, self.prompt_ids[:8])) + (", ..." if len(self.prompt_ids) > 8 else "")
        return f"{self.n} samples of a prompt of {len(self.prompt_ids)} tokens [{ids}] (seed {self.seed})"


@dataclass(frozen=True)
class Sample:
    """One response, as it was sampled."""

    token_ids: list[int]
    """With the stop token that ended it, if one did."""
    logprobs: list[float]
    """Per token: log-probability under the distribution it was drawn from; NaN where the server gave none."""
    finish_reason: str
    """`stop` or `length`."""
    weight_version: int
    """-1: the weights that the server was started with."""

    @property
    def missing_logprobs(self) -> int:
        """Tokens without a log-probability."""
        return sum(map(math.isnan, self.logprobs))


def parse_samples(answer: dict[str, Any]) -> list[Sample]:
    """The samples in an answer of the endpoint, in their order.

    A log-prob that is missing, None, NaN or the endpoint's stand-in for these becomes NaN.

    Raises:
        GenerationError: the answer lacks ids or versions, or has a log-prob for another token.
    """
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [_parse_choice(choice) for choice in choices]


def _parse_choice(choice: dict[str, Any]) -> Sample:
    token_ids = choice["token_ids"]
    content = (choice.get("logprobs") or {}).get("content") or [None] * len(token_ids)
    if len(content) != len(token_ids):
        raise GenerationError(f"the server sent {len(content)} log-probs for {len(token_ids)} tokens")
    logprobs = []
    for token, entry in zip(token_ids, content, strict=True):
        if entry is not None and entry["token_id"] != token:
            raise GenerationError(f"the server sent the log-prob of token {entry['token_id']} for {token}")
        value = None if entry is None else entry["logprob"]
        logprobs.append(math.nan if value is None or value <= _NO_LOGPROB else float(value))
    return Sample(token_ids, logprobs, choice["finish_reason"], _version(choice))


def _version(choice: dict[str, Any]) -> int:
    """The one version of the weights that sampled it.

    Raises:
        GenerationError: several did: weights were changed under a running request.
    """
    labels = list(dict.fromkeys(span["version"] for span in choice.get("weight_versions") or []))
    if len(labels) != 1:
        raise GenerationError(f"a response was sampled with weights {labels}; one version was expected")
    return -1 if labels == [INITIAL] else int(labels[0])
