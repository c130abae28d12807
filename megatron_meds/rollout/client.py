"""Samples from vLLM servers: token ids in, token ids out.

Speaks vLLM's token endpoint, so that no text is made of a prompt or a response on the way and every
sample says which version of the weights it came from. Every field that shapes the distribution is
sent. Knows HTTP and sampling; nothing of prompts as text, of rewards, or of server processes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from megatron_meds.errors import UserError
from megatron_meds.rollout.messages import GenerationError, Request, Sample, Sampling, parse_samples
from megatron_meds.rollout.settings import RolloutSettings
from megatron_meds.weights.control import INITIAL

ENDPOINT = "/inference/v1/generate"
_BACKOFF_SECONDS = 0.5
_PROBE_SECONDS = 15.0


class _ServerGoneError(Exception):
    """The server can give no samples now; what to do about it is the trainer's."""


class _FailedAttemptError(Exception):
    """This attempt failed, another may succeed."""


@dataclass(frozen=True)
class _Sent:
    """What a call of `generate` works on."""

    requests: Sequence[Request]
    answers: list[list[Sample] | None]
    on_answer: Callable[[int, list[Sample]], None]
    expected: str


@dataclass
class _Endpoint:
    url: str
    in_flight: int = 0
    gone: str | None = None
    """Why it is not asked any more."""


class Client:
    """Asks several servers, each request of the one that has the fewest in flight.

    Attributes:
        version: the weights to sample from, set after each push of weights; servers that hold others
            are not asked. None: those that the servers were started with.
    """

    def __init__(
        self,
        urls: Sequence[str],
        settings: RolloutSettings,
        *,
        vocabulary: int | None = None,
        stop_token_ids: Iterable[int] = (),
    ) -> None:
        """
        Args:
            urls: base URLs of the servers.
            vocabulary: entries of it; ids outside are refused here, because they end a server.
            stop_token_ids: ids that end a response, beside those of the settings: the tokenizer's
                end-of-text tokens. The servers load no tokenizer.
        """
        self.urls = list(urls)
        self.settings = settings
        self.version: int | None = None
        self._sampling = Sampling(
            settings.temperature, settings.top_p, settings.max_tokens, top_k=settings.top_k
        )
        self._vocabulary = vocabulary
        self._stop_token_ids = list(dict.fromkeys([*stop_token_ids, *settings.stop_token_ids]))

    def generate(
        self,
        requests: Sequence[Request],
        answers: list[list[Sample] | None] | None = None,
        on_done: Callable[[int], None] | None = None,
        on_answer: Callable[[int, list[Sample]], None] | None = None,
    ) -> str | None:
        """Sample what is not yet there.

        Fills `answers[i]` for each request i that has None there. When servers die in the middle,
        what they had not finished goes to the others. If none is left, the rest of `answers` stays
        None: start the servers again, bring them the weights, and call again with the same lists.
        Every request is then answered once, whatever happened in between.

        Args:
            answers: as long as `requests`; `requests[i].n` samples come to `answers[i]`.
            on_done: called with the number of samples of each request that was answered.
            on_answer: called with the number and the samples of each request that was answered; what it
                raises ends the call.

        Returns:
            None when every request is answered; else which servers cannot be asked, and why.

        Raises:
            GenerationError: a request that is wrong, or that failed on servers that are well,
                `rollout.retries` times after the first.
        """
        if answers is None:
            answers = [None for _ in requests]
        if len(answers) != len(requests):
            raise ValueError(f"{len(answers)} places for the answers to {len(requests)} requests")
        if not self.urls:
            raise ValueError("there is no server to ask")
        for request in requests:
            self._check(request)
        expected = INITIAL if self.version is None else str(self.version)

        def tell(index: int, samples: list[Sample]) -> None:
            if on_done is not None:
                on_done(len(samples))
            if on_answer is not None:
                on_answer(index, samples)

        sent = _Sent(requests, answers, tell, expected)
        if all(answer is not None for answer in answers):
            return None
        try:
            return asyncio.run(self._generate(sent))
        except* (GenerationError, UserError, OSError) as group:  # the first says what is wrong
            raise group.exceptions[0] from None

    def sample(
        self, requests: Sequence[Request], on_done: Callable[[int], None] | None = None
    ) -> list[list[Sample]]:
        """As `generate`, for callers who cannot mend servers.

        Raises:
            GenerationError: also if servers died and requests are left.
        """
        answers: list[list[Sample] | None] = [None] * len(requests)
        failure = self.generate(requests, answers, on_done)
        if failure is not None:
            raise GenerationError(failure)
        return [answer for answer in answers if answer is not None]

    def body(self, request: Request) -> dict[str, Any]:
        """What is sent for a request: no field that shapes the distribution is left to the server."""
        sampling = request.sampling or self._sampling
        return {
            "token_ids": request.prompt_ids,
            "stream": False,
            "sampling_params": {
                "n": request.n,
                "seed": request.seed,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "logit_bias": None,
                "allowed_token_ids": None,
                "bad_words": [],
                "max_tokens": sampling.max_tokens,
                "min_tokens": 0,
                "stop": [],
                "stop_token_ids": self._stop_token_ids,
                "ignore_eos": False,
                "logprobs": 0 if sampling.logprobs else None,  # 0: of the sampled token alone
                "detokenize": False,
                "skip_special_tokens": False,
            },
        }

    def greedy(self, prompt_ids: Sequence[int], tokens: int) -> list[Sample]:
        """The likeliest `tokens` tokens after a prompt, past any end of text: of each server, for checks.

        Raises:
            GenerationError: a server does not answer, refuses, or holds other weights than `version`.
        """
        body = self.body(Request(list(prompt_ids), 1))
        body["sampling_params"] |= {
            "temperature": 0.0, "max_tokens": tokens, "stop_token_ids": [], "ignore_eos": True,
        }  # fmt: skip
        timeout = self.settings.request_timeout_seconds
        found = []
        for url in self.urls:
            try:
                answer = httpx.post(url + ENDPOINT, json=body, timeout=timeout, trust_env=False)
            except httpx.TransportError as error:
                raise GenerationError(f"server {url}: {type(error).__name__}: {error}") from error
            if answer.status_code != httpx.codes.OK:
                raise GenerationError(f"server {url} refuses: {answer.text[:1000]}")
            (sample,) = parse_samples(answer.json())
            if sample.weight_version != (-1 if self.version is None else self.version):
                raise GenerationError(
                    f"server {url} sampled with weights {sample.weight_version}, not {self.version}"
                )
            found.append(sample)
        return found

    def prefix_cache(self) -> tuple[float, float]:
        """Prompt tokens that all servers looked for in their prefix caches since they started, and those
        they found there, by their own counters.

        Raises:
            GenerationError: a server does not answer.
        """
        asked = found = 0.0
        for url in self.urls:
            try:
                answer = httpx.get(f"{url}/metrics", timeout=_PROBE_SECONDS, trust_env=False)
            except httpx.TransportError as error:
                raise GenerationError(f"server {url}: {type(error).__name__}: {error}") from error
            if answer.status_code != httpx.codes.OK:
                raise GenerationError(f"server {url} shows no counters at /metrics ({answer.status_code})")
            asked += _counter(answer.text, "vllm:prefix_cache_queries_total")
            found += _counter(answer.text, "vllm:prefix_cache_hits_total")
        return asked, found

    def _check(self, request: Request) -> None:
        if not request.prompt_ids:
            raise GenerationError(f"{request}: the prompt is empty")
        if self._vocabulary is None:
            return
        outside = [i for i in request.prompt_ids if not 0 <= i < self._vocabulary]
        if outside:
            raise GenerationError(
                f"{request}: ids {outside[:5]} are outside the vocabulary of {self._vocabulary}"
            )

    async def _generate(self, sent: _Sent) -> str | None:
        endpoints = [_Endpoint(url) for url in self.urls]
        gate = asyncio.Semaphore(self.settings.concurrency)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.settings.concurrency)
        timeout = httpx.Timeout(self.settings.request_timeout_seconds, connect=30.0)
        async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as http:
            await asyncio.gather(*(_look_at(http, endpoint, sent.expected) for endpoint in endpoints))
            async with asyncio.TaskGroup() as tasks:
                for index, answer in enumerate(sent.answers):
                    if answer is None:
                        tasks.create_task(self._answer(http, endpoints, gate, sent, index))
        if all(answer is not None for answer in sent.answers):
            return None
        return "; ".join(f"server {e.url} {e.gone}" for e in endpoints if e.gone is not None)

    async def _answer(
        self,
        http: httpx.AsyncClient,
        endpoints: list[_Endpoint],
        gate: asyncio.Semaphore,
        sent: _Sent,
        index: int,
    ) -> None:
        """Ask for one request until it is answered or no server is left."""
        failures: list[str] = []
        last: _Endpoint | None = None
        while len(failures) <= self.settings.retries:
            async with gate:
                endpoint = _choose(endpoints, last, sent.requests[index].group)
                if endpoint is None:
                    return
                endpoint.in_flight += 1
                try:
                    samples = await self._ask(http, endpoint, sent.requests[index], sent.expected)
                except _ServerGoneError as gone:
                    endpoint.gone = endpoint.gone or str(gone)
                    continue  # not the request's fault
                except _FailedAttemptError as failure:
                    failures.append(f"{endpoint.url}: {failure}")
                else:
                    sent.answers[index] = samples
                    sent.on_answer(index, samples)
                    return
                finally:
                    endpoint.in_flight -= 1
            last = endpoint
            await asyncio.sleep(_BACKOFF_SECONDS * 2 ** (len(failures) - 1))
        raise GenerationError(
            f"{sent.requests[index]} failed {len(failures)} times, more often than rollout.retries = "
            f"{self.settings.retries} allows: {'; '.join(failures)}"
        )

    async def _ask(
        self, http: httpx.AsyncClient, endpoint: _Endpoint, request: Request, expected: str
    ) -> list[Sample]:
        try:
            response = await http.post(endpoint.url + ENDPOINT, json=self.body(request))
        except httpx.TimeoutException as error:
            limit = f"rollout.request_timeout_seconds = {self.settings.request_timeout_seconds:g}"
            failure = f"no answer within {limit} ({type(error).__name__})"
            raise await _after(failure, http, endpoint, expected) from error
        except httpx.TransportError as error:
            raise await _after(f"{type(error).__name__}: {error}", http, endpoint, expected) from error
        if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            failure = f"{response.status_code}: {response.text[:300]}"
            raise await _after(failure, http, endpoint, expected)
        if response.status_code != httpx.codes.OK:
            raise GenerationError(f"server {endpoint.url} refuses {request}: {response.text[:1000]}")
        samples = parse_samples(response.json())
        if len(samples) != request.n:
            raise _FailedAttemptError(f"{len(samples)} samples came")
        for sample in samples:
            if sample.finish_reason not in ("stop", "length"):
                raise _FailedAttemptError(f"a sample ended with {sample.finish_reason!r}")
            if str(sample.weight_version) != (expected if expected != INITIAL else "-1"):
                raise _ServerGoneError(f"sampled with weights {sample.weight_version}, not {expected}")
        return samples


async def _look_at(http: httpx.AsyncClient, endpoint: _Endpoint, expected: str) -> None:
    """Note if a server is not well, or does not hold the weights to sample from."""
    if endpoint.gone is None:
        endpoint.gone = await _what_is_wrong(http, endpoint.url, expected)


async def _after(
    failure: str, http: httpx.AsyncClient, endpoint: _Endpoint, expected: str
) -> _ServerGoneError | _FailedAttemptError:
    """What a failed call means: the server is gone, or this attempt alone failed."""
    await _look_at(http, endpoint, expected)
    return _FailedAttemptError(failure) if endpoint.gone is None else _ServerGoneError(endpoint.gone)


async def _what_is_wrong(http: httpx.AsyncClient, url: str, expected: str) -> str | None:
    try:
        health = await http.get(f"{url}/health", timeout=_PROBE_SECONDS)
        if health.status_code != httpx.codes.OK:
            return f"is not healthy ({health.status_code})"
        info = await http.get(f"{url}/weight_info", timeout=_PROBE_SECONDS)
    except httpx.TransportError as error:
        return f"does not answer ({type(error).__name__})"
    if info.status_code != httpx.codes.OK:
        return f"does not tell its weight version ({info.status_code}): start it with VLLM_SERVER_DEV_MODE=1"
    held = info.json()["weight_version"]
    if held != expected:
        return f"holds weights {held!r}, not {expected!r}: push the weights before sampling"
    return None


def _choose(endpoints: Sequence[_Endpoint], last: _Endpoint | None, group: int | None) -> _Endpoint | None:
    """The usable server of the group, else the one with the fewest requests in flight; not the last one
    tried, if there is another."""
    usable = [e for e in endpoints if e.gone is None]
    others = [e for e in usable if e is not last] or usable
    if group is not None and others:
        return others[group % len(others)]
    return min(others, key=lambda e: e.in_flight, default=None)


def _counter(text: str, name: str) -> float:
    """The sum of a counter over its labels, in the text of vLLM's /metrics."""
    lines = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, lines))
