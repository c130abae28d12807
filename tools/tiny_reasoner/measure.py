"""How often a model gives each kind of answer to the tiny reasoner's problems, sampled by vLLM."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from megatron_meds.data.settings import TemplateSettings
from megatron_meds.data.templates import Template, end_token_ids, load_tokenizer
from megatron_meds.rollout.client import Client, Request
from megatron_meds.rollout.server import Servers
from megatron_meds.rollout.settings import RolloutSettings, ServerSettings
from megatron_meds.verify import last_boxed

from .problems import KINDS, kind_of

MAX_PROMPT, MAX_RESPONSE = 64, 256


@dataclass(frozen=True)
class Measured:
    """Shares are over all responses."""

    responses: int
    kinds: dict[str, float]
    """Kind of answer -> share; `other` is what no planted mistake explains."""
    boxed: float
    """Share with an answer in a box."""
    characters: float
    """Mean length of a response."""


def measure(model: Path, problems: Path, samples: int, seed: int, work: Path) -> Measured:
    """Sample `samples` responses to every problem of a file at temperature 1.

    Args:
        work: folder for the server's log.
    """
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    tokenizer = load_tokenizer(model)
    template = Template(TemplateSettings(), tokenizer)
    prompts = template.token_ids([template.text(row["question"]) for row in rows])
    settings = RolloutSettings(max_tokens=MAX_RESPONSE)
    with Servers.start(
        ServerSettings(),
        model,
        run_dir=work,
        max_model_len=MAX_PROMPT + MAX_RESPONSE,
        dtype="float32",
        device="cpu",
        transport="shm",
        seed=seed,
    ) as servers:
        client = Client(servers.urls, settings, stop_token_ids=end_token_ids(tokenizer, model))
        requests = [
            Request(list(ids), samples, seed + samples * number) for number, ids in enumerate(prompts)
        ]
        groups = client.sample(requests)
    texts = [
        [str(tokenizer.decode(sample.token_ids, skip_special_tokens=True)) for sample in group]
        for group in groups
    ]
    return summarise(rows, texts)


def summarise(rows: list[dict], texts: list[list[str]]) -> Measured:
    """Shares from the responses to each row's problem."""
    pairs = [(last_boxed(text), row) for row, group in zip(rows, texts, strict=True) for text in group]
    kinds = Counter(kind_of(answer, row) for answer, row in pairs)
    lengths = [len(text) for group in texts for text in group]
    return Measured(
        responses=len(pairs),
        kinds={kind: kinds[kind] / len(pairs) for kind in (*KINDS, "other")},
        boxed=sum(answer is not None for answer, _ in pairs) / len(pairs),
        characters=sum(lengths) / len(lengths),
    )
