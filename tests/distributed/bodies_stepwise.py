"""Step rewards on real ranks, over a scripted server: what is asked, how often, and what comes of it."""

from __future__ import annotations

from typing import Any

from megatron_meds.metrics import Sums
from megatron_meds.rollout.client import Request, Sample
from megatron_meds.rollout.sampler import Sampler
from megatron_meds.rollout.settings import RolloutSettings
from megatron_meds.stepwise import Stepwise
from megatron_meds.trajectory import Prompt, RewardLedger, Trajectory
from megatron_meds.vsrm.settings import VsrmSettings
from tests.distributed.bodies_sampler import Verdict

VERSION = 3
STEP = "But it is.\n"
EMPTY = "<think>One and two.\n</think>\\boxed{9}"


def ids_of(text: str) -> list[int]:
    return [ord(c) for c in text]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


class CountingClient:
    """Continuation k of a prefix is right if it has more than k steps. Fails once after `dies_after`."""

    def __init__(self, dies_after: int | None) -> None:
        self.dies_after = dies_after
        self.asked: list[Request] = []

    def generate(self, requests: list[Request], answers: list, on_done: Any = None) -> str | None:
        for i, request in enumerate(requests):
            if answers[i] is not None:
                continue
            if self.dies_after is not None and len(self.asked) >= self.dies_after:
                self.dies_after = None
                return "server gone"
            self.asked.append(request)
            steps = decode(request.prompt_ids).count("But")
            answers[i] = [self._sample("\\boxed{1}" if steps > k else "none") for k in range(request.n)]
        return None

    def _sample(self, text: str) -> Sample:
        return Sample(ids_of(text), [0.0] * len(text), "stop", VERSION)

    def prefix_cache(self) -> tuple[float, float]:
        return 100.0 * len(self.asked), 80.0 * len(self.asked)


def trajectories(texts: list[str], of: int, prompt_end: str) -> list[Trajectory]:
    """The two responses to prompt number `of`."""
    found = []
    for number, text in enumerate(texts):
        prompt = Prompt(
            f"p{number // 2}", str(number // 2), tuple(ids_of(f"Q{number // 2}:{prompt_end}")), "1"
        )
        found.append(Trajectory(prompt, number % 2, ids_of(text), text, [0.0] * len(text), "stop", VERSION))
    return found[2 * of : 2 * of + 2]


def step(
    mesh: Any,
    texts: list[str],
    dies_after: int | None = None,
    limit: int = 500,
    number: int = 1,
    prompt_end: str = "",
    **vsrm: Any,
) -> dict[str, Any]:
    """One step of the given responses, two a prompt, dealt over replicas by prompt."""
    settings = VsrmSettings(
        enabled=True, **({"skip": 3, "gap": 3, "candidates": 4, "max_tokens": 20, "min_tokens": 4} | vsrm)
    )
    client = CountingClient(dies_after) if mesh.is_head else None
    grade = (lambda pairs: [Verdict("\\boxed{1}" in text) for text, _ in pairs]) if mesh.is_head else None
    resyncs: list[int] = []
    sampler = Sampler(
        RolloutSettings(), mesh, client=client, grade=grade, decode=decode, draw=lambda n: [],  # type: ignore[arg-type]
        resync=lambda: resyncs.append(1), seed=7,
    )  # fmt: skip
    stepwise = Stepwise(
        settings, mesh, complete=sampler.complete, client=client, grade=grade, decode=decode,  # type: ignore[arg-type]
        close_ids=ids_of("</think>"), server_tokens=limit, seed=7,
    )  # fmt: skip
    mine = [
        t
        for p in range(mesh.replica, len(texts) // 2, mesh.replicas)
        for t in trajectories(texts, p, prompt_end)
    ]
    sums = Sums()
    stepwise.measure(mine, number, sums)
    entries: list[tuple[int, int, float]] = []
    if mesh.is_head:
        ledger = RewardLedger(mine)
        stepwise.enter(ledger, mine)
        entries = ledger.entries("steps")
    parts = mesh.gather_heads(sums) if mesh.is_head else []
    return {
        "head": mesh.is_head,
        "steps": {
            t.key: (t.steps.accuracies, t.steps.rewards, t.steps.weight_version) for t in mine if t.steps
        },
        "entries": entries,
        "asked": [(decode(r.prompt_ids), r) for r in client.asked] if client else [],
        "resyncs": len(resyncs),
        "metrics": Sums.merge(parts).values(),
    }
