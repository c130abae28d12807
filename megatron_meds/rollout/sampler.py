"""Prompts to graded trajectories: ask the servers, grade, keep the groups that teach, deal them out.

All ranks call it together; the heads do the work and the others follow their decisions. Knows
servers only through a client, weights only through `resync`, and nothing of losses.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_meds.algorithms.filtering import mixed
from megatron_meds.rollout.client import Client, Request, Sample
from megatron_meds.rollout.dealing import cut_mini_batches, deal, next_round
from megatron_meds.rollout.settings import RolloutSettings
from megatron_meds.trajectory import Prompt, Trajectory


class Heads(Protocol):
    """What the sampler needs of the mesh."""

    replica: int
    replicas: int

    @property
    def is_head(self) -> bool: ...
    def all_gather(self, value: object) -> list: ...
    def gather_heads(self, value: object) -> list: ...
    def exchange_heads(self, outgoing: Sequence[Any]) -> list: ...
    def broadcast_in_replica(self, value: object = None) -> object: ...


Grade = Callable[[Sequence[tuple[str, str]]], list]
"""(response, gold) pairs to verdicts with `.correct` and `.reason`."""


@dataclass
class StepSamples:
    """A replica's share of a step, the same on all its ranks."""

    mini_batches: list[list[Trajectory]]
    """Whole groups per mini-batch; equally many mini-batches on every replica, some may be empty."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Counts over all replicas."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All of them, mini-batch after mini-batch."""
        return [t for batch in self.mini_batches for t in batch]


@dataclass
class _Group:
    order: int
    """Place in the order in which the step's prompts were drawn."""
    trajectories: list[Trajectory]

    @property
    def verdicts(self) -> list[bool]:
        return [bool(t.correct) for t in self.trajectories]

    @property
    def tokens(self) -> int:
        return sum(len(t.prompt.token_ids) + len(t) for t in self.trajectories)


class Sampler:
    """Samples groups of trajectories from the current weights."""

    def __init__(
        self,
        settings: RolloutSettings,
        heads: Heads,
        *,
        client: Client | None,
        grade: Grade | None,
        decode: Callable[[list[int]], str],
        draw: Callable[[int], list[Prompt]],
        resync: Callable[[], None],
        seed: int,
    ) -> None:
        """
        Args:
            client, grade: on heads; None elsewhere.
            decode: response ids to text, special tokens left out.
            draw: the next n prompts of the epoch; gives the same on every rank.
            resync: collective over all ranks: dead servers start again and get the current weights.
        """
        self.settings = settings
        self.heads = heads
        self._client, self._grade, self._decode = client, grade, decode
        self._draw, self._resync, self._seed = draw, resync, seed
        self.on_trajectory: Callable[[int], None] | None = None

    def sample(self, prompts_per_step: int, mini_batch_prompts: int | None, step: int) -> StepSamples:
        """One step's trajectories, dealt over replicas. Collective over all ranks.

        With dynamic sampling, rounds follow until `prompts_per_step` groups have both right and
        wrong answers (or, with `keep_all_wrong`, wrong ones), at most `max_rounds`; then the step goes
        on with what there is.

        Raises:
            RuntimeError: no group at all was kept; says how many were all right and all wrong.
        """
        dynamic = self.settings.dynamic_sampling
        rounds = dynamic.max_rounds if dynamic.enabled else 1
        kept: list[_Group] = []
        counts: Counter[str] = Counter(asked=0, kept=0, all_right=0, all_wrong=0)
        for number in range(rounds):
            wanted = next_round(prompts_per_step, counts["kept"], counts["asked"])
            prompts = self._draw(wanted)
            groups = self._ask(prompts, counts["asked"], seed=f"{step}/{number}")
            chosen = [g for g in groups if self._teaches(g.verdicts)]
            kept += chosen
            counts["asked"] += len(prompts)
            for found in self.heads.all_gather(_count(groups, chosen)):
                counts.update(found)
            if counts["kept"] >= prompts_per_step:
                break
        if counts["kept"] == 0:
            raise RuntimeError(
                f"step {step}: after {rounds} rounds and {counts['asked']} prompts no group had both right "
                f"and wrong answers ({counts['all_right']} all right, {counts['all_wrong']} all wrong): take "
                "easier or harder problems, more rollout.samples_per_prompt, or no rollout.dynamic_sampling"
            )
        samples = self._deal(kept, prompts_per_step, mini_batch_prompts)
        samples.metrics = {
            "accuracy": counts["right_answers"] / counts["answers"],
            "sampling/prompts": float(counts["asked"]),
            "sampling/rounds": float(number + 1),
            "sampling/all_right": float(counts["all_right"]),
            "sampling/all_wrong": float(counts["all_wrong"]),
            "sampling/surplus": float(max(counts["kept"] - prompts_per_step, 0)),
            "sampling/missing": float(max(prompts_per_step - counts["kept"], 0)),
        }
        return samples

    def evaluate(self, prompts: Sequence[Prompt], samples: int, seed: str) -> list[Trajectory]:
        """`samples` graded trajectories of each prompt, on every head in the order of the prompts;
        [] on other ranks. Every prompt is asked exactly once. Collective."""
        groups = self._ask(prompts, 0, seed=seed, samples=samples)
        if not self.heads.is_head:
            return []
        everyone = [g for part in self.heads.gather_heads(groups) for g in part]
        return [t for g in sorted(everyone, key=lambda g: g.order) for t in g.trajectories]

    def complete(
        self, requests: Sequence[Request], on_done: Callable[[int], None] | None = None
    ) -> list[list[Sample]]:
        """This head's requests, each answered once; dead servers are mended on the way. Collective over all
        ranks: those that are no heads, and heads that ask nothing, give no requests."""
        answers: list[list[Sample] | None] = [None] * len(requests)
        while True:
            failure = self._client.generate(requests, answers, on_done) if self._client and requests else None
            if not any(self.heads.all_gather(failure)):
                return [answer or [] for answer in answers]
            self._resync()

    def _ask(
        self, prompts: Sequence[Prompt], offset: int, *, seed: str, samples: int | None = None
    ) -> list[_Group]:
        """This head's share of the prompts, answered and graded; [] on other ranks."""
        count = samples or self.settings.samples_per_prompt
        mine = (
            list(range(self.heads.replica, len(prompts), self.heads.replicas)) if self.heads.is_head else []
        )
        pending = [
            Request(prompt_ids=list(prompts[i].token_ids), n=count, seed=self._seed_of(seed, offset + i))
            for i in mine
        ]
        answers = self.complete(pending, self.on_trajectory)
        if not mine:
            return []
        groups = [
            _Group(offset + i, [self._trajectory(prompts[i], k, s) for k, s in enumerate(found)])
            for i, found in zip(mine, answers, strict=True)
        ]
        self._verify([t for g in groups for t in g.trajectories])
        return groups

    def _teaches(self, verdicts: Sequence[bool]) -> bool:
        """Whether dynamic sampling keeps a group."""
        dynamic = self.settings.dynamic_sampling
        if not dynamic.enabled or mixed(verdicts):
            return True
        return dynamic.keep_all_wrong and not any(verdicts)

    def _verify(self, trajectories: Sequence[Trajectory]) -> None:
        assert self._grade is not None  # heads have a grader
        verdicts = self._grade([(t.text, t.prompt.answer) for t in trajectories])
        for trajectory, verdict in zip(trajectories, verdicts, strict=True):
            trajectory.correct, trajectory.verdict = verdict.correct, verdict.reason

    def _deal(self, kept: list[_Group], wanted: int, mini_batch_prompts: int | None) -> StepSamples:
        """Bring whole groups to the replicas that learn from them."""
        batches: list[list[Trajectory]] = []
        if self.heads.is_head:
            shares = self.heads.gather_heads([(g.order, g.tokens) for g in kept])
            listing = sorted(entry for share in shares for entry in share)[:wanted]
            tokens = [size for _, size in listing]
            destination: dict[int, int] = {}
            hands = []
            for rows in cut_mini_batches(len(listing), mini_batch_prompts):
                hand = deal(tokens, rows, self.heads.replicas)
                hands.append(hand[self.heads.replica])
                destination.update({listing[g][0]: r for r, gs in enumerate(hand) for g in gs})
            outgoing: list[list[_Group]] = [[] for _ in range(self.heads.replicas)]
            for group in kept:
                if group.order in destination:
                    outgoing[destination[group.order]].append(group)
            arrived = {g.order: g for part in self.heads.exchange_heads(outgoing) for g in part}
            batches = [[t for g in hand for t in arrived[listing[g][0]].trajectories] for hand in hands]
        return StepSamples(self.heads.broadcast_in_replica(batches))  # type: ignore[arg-type]

    def _trajectory(self, prompt: Prompt, number: int, sample: Sample) -> Trajectory:
        return Trajectory(
            prompt=prompt,
            sample=number,
            response_ids=sample.token_ids,
            text=self._decode(sample.token_ids),
            rollout_logprobs=sample.logprobs,
            finish_reason=sample.finish_reason,
            weight_version=sample.weight_version,
        )

    def _seed_of(self, label: str, index: int) -> int:
        """31 bits, the same however prompts are spread over replicas and servers."""
        digest = hashlib.sha256(f"{self._seed}/{label}/{index}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


def _count(groups: Sequence[_Group], chosen: Sequence[_Group]) -> dict[str, int]:
    """What one head found in a round."""
    return {
        "kept": len(chosen),
        "all_right": sum(all(g.verdicts) for g in groups),
        "all_wrong": sum(not any(g.verdicts) for g in groups),
        "right_answers": sum(sum(g.verdicts) for g in groups),
        "answers": sum(len(g.verdicts) for g in groups),
    }
