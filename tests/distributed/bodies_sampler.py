"""A sampler on real ranks, over a scripted server: what it asks, keeps and deals out."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from megatron_meds.data.loader import PromptLoader
from megatron_meds.rollout.client import Request, Sample
from megatron_meds.rollout.sampler import Sampler
from megatron_meds.rollout.settings import DynamicSamplingSettings, RolloutSettings
from megatron_meds.trajectory import Prompt

RIGHT, WRONG = 1, 2


@dataclass
class Verdict:
    correct: bool
    reason: str = ""


class ScriptedClient:
    """Answers by the prompt's first id: 0 always right, 1 always wrong, else as its seed says. Fails once
    after `dies_after` requests, leaving the rest unanswered."""

    def __init__(self, dies_after: int | None) -> None:
        self.dies_after = dies_after
        self.asked: list[tuple[int, ...]] = []

    def generate(self, requests: list[Request], answers: list, on_done: Any = None) -> str | None:
        for i, request in enumerate(requests):
            if answers[i] is not None:
                continue
            if self.dies_after is not None and len(self.asked) >= self.dies_after:
                self.dies_after = None
                return "server gone"
            self.asked.append(tuple(request.prompt_ids))
            answers[i] = [self._sample(request, k) for k in range(request.n)]
        return None

    def _sample(self, request: Request, k: int) -> Sample:
        assert request.seed is not None
        rng = random.Random(request.seed + k)
        kind = request.prompt_ids[0]
        right = kind == 0 or (kind != 1 and rng.random() < 0.5)
        ids = [RIGHT if right else WRONG] + [3] * rng.randrange(1, 6)
        return Sample(ids, [0.0] * len(ids), "stop", 1)


def prompts(kinds: list[int]) -> list[Prompt]:
    return [
        Prompt(id=f"p{i}", question=str(i), token_ids=(kind, 10 + i), answer="1")
        for i, kind in enumerate(kinds)
    ]


def make(
    mesh: Any,
    kinds: list[int],
    dynamic: bool,
    rounds: int = 4,
    dies_after: int | None = None,
    all_wrong: bool = False,
) -> Any:
    client = ScriptedClient(dies_after) if mesh.is_head else None
    loader = PromptLoader(prompts(kinds), 4, seed=0, shuffle=False)
    resyncs: list[int] = []
    dynamic_sampling = DynamicSamplingSettings(enabled=dynamic, max_rounds=rounds, keep_all_wrong=all_wrong)
    settings = RolloutSettings(samples_per_prompt=4, dynamic_sampling=dynamic_sampling)
    sampler = Sampler(
        settings,
        mesh,
        client=client,  # type: ignore[arg-type]
        grade=(lambda pairs: [Verdict(text.startswith("1")) for text, _ in pairs]) if mesh.is_head else None,
        decode=lambda ids: "".join(map(str, ids)),
        draw=loader.next,
        resync=lambda: resyncs.append(1),
        seed=7,
    )
    return sampler, client, resyncs


def step(mesh: Any, kinds: list[int], wanted: int, mini: int | None, **options: Any) -> dict[str, Any]:
    """One step's mini-batches as (prompt, sample, ids), what was asked, and how often servers were mended."""
    sampler, client, resyncs = make(mesh, kinds, **options)
    found = sampler.sample(wanted, mini, step=1)
    batches = [[(t.prompt.id, t.sample, tuple(t.response_ids)) for t in b] for b in found.mini_batches]
    return {
        "replica": mesh.replica,
        "is_head": mesh.is_head,
        "batches": batches,
        "metrics": found.metrics,
        "asked": client.asked if client else [],
        "resyncs": len(resyncs),
    }


def evaluation(mesh: Any, kinds: list[int], samples: int) -> list[tuple[str, int]]:
    """(prompt, sample) of what came back, on heads."""
    sampler, _, _ = make(mesh, [2], dynamic=False)
    return [(t.prompt.id, t.sample) for t in sampler.evaluate(prompts(kinds), samples, seed="e")]
