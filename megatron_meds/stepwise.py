"""VSRM within a run: the prefixes of this step's trajectories asked of its servers, graded, and rewarded.

Joins `vsrm`, which knows no servers, to the mesh: heads cut, ask and grade; the other ranks only take
part in mending servers. All continuations come from the weights that sampled the trajectories.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_meds.actor.mesh import Mesh
from megatron_meds.errors import UserError
from megatron_meds.imports import load_function
from megatron_meds.metrics import Sums
from megatron_meds.rollout.client import Client
from megatron_meds.rollout.messages import Request, Sample, Sampling
from megatron_meds.rollout.sampler import Grade
from megatron_meds.tokens import Decode
from megatron_meds.trajectory import MeasuredSteps, RewardLedger, Trajectory
from megatron_meds.vsrm import StepPlan, enter_steps, plan_prefixes, step_rewards
from megatron_meds.vsrm.rewards import own_step_rewards
from megatron_meds.vsrm.settings import VsrmSettings

Complete = Callable[[Sequence[Request]], list[list[Sample]]]
"""Answers all requests of this head, whatever happens to servers. Collective over all ranks."""
Ids = tuple[int, ...]


@dataclass
class _Question:
    """One prefix to be continued, for all the trajectories of a prompt that share it."""

    answer: str
    """Reference answer."""
    group: int
    """Trajectory that it was first cut from."""
    right: int = 0
    """Continuations that are right."""


class Stepwise:
    """Measures and rewards the reasoning steps of a run's trajectories."""

    def __init__(
        self,
        settings: VsrmSettings,
        mesh: Mesh,
        *,
        complete: Complete,
        client: Client | None,
        grade: Grade | None,
        decode: Decode,
        close_ids: Sequence[int],
        server_tokens: int,
        seed: int,
    ) -> None:
        """
        Args:
            client, grade: on heads; None elsewhere.
            decode: ids to text, as the trajectories' own text is made.
            close_ids: the closing tag, by the tokenizer.
            server_tokens: longest sequence of the servers.

        Raises:
            UserError: the tags are not read back as they are written: a special token, for instance.
            FunctionError: `vsrm.reward_function` leads to no function.
        """
        if decode(list(close_ids)) != settings.close_tag:
            raise UserError(
                f"vsrm.close_tag = {settings.close_tag!r}: its ids {list(close_ids)} decode to "
                f"{decode(list(close_ids))!r}, so that no response would show it; choose the text with which "
                "this model closes its reasoning"
            )
        self.settings = settings
        self._function = (
            load_function(settings.reward_function, "vsrm.reward_function")
            if settings.reward_function is not None
            else None
        )
        self._mesh, self._complete, self._client, self._grade = mesh, complete, client, grade
        self._decode, self._close, self._limit, self._seed = decode, list(close_ids), server_tokens, seed

    def measure(self, trajectories: Sequence[Trajectory], step: int, metrics: Sums) -> None:
        """Fill in `steps` of the trajectories that have any, on heads. Collective over all ranks."""
        started = time.perf_counter()
        plans = {i: self._plan(t) for i, t in enumerate(trajectories) if self._chosen(t, step)}
        questions = _ask_once(plans, trajectories) if self._mesh.is_head else {}
        requests = [self._request(ids, q, step) for ids, q in questions.items()]
        before = self._look_up()
        answers = self._complete(requests)  # ends when every head has its answers
        after = self._look_up()
        if not self._mesh.is_head:
            return
        texts = [[self._decode(s.token_ids) for s in samples] for samples in answers]
        self._verify(list(questions.values()), texts)
        version = next((s.weight_version for samples in answers for s in samples), -1)
        for index, plan in plans.items():
            if len(plan):
                trajectories[index].steps = self._measured(plan, questions, version, trajectories[index].key)
        self._describe(plans, trajectories, answers, metrics)
        asked, found = after[0] - before[0], after[1] - before[1]
        if asked > 0 and found >= 0:  # counters of a server that was started again begin anew
            metrics.ratio("vsrm/cached_share", found, asked)
            metrics.total("vsrm/prefill_tokens", asked - found)
        metrics.maximum("vsrm/seconds", time.perf_counter() - started)

    def enter(self, ledger: RewardLedger, trajectories: Sequence[Trajectory]) -> None:
        """Add the rewards of all measured steps, as source `steps`."""
        ledger.open("steps")
        for index, trajectory in enumerate(trajectories):
            if (steps := trajectory.steps) is not None:
                place, outcome = self.settings.rewarded_token, self.settings.on_outcome
                enter_steps(ledger, index, steps.bounds, steps.rewards, place, outcome)

    def _chosen(self, trajectory: Trajectory, step: int) -> bool:
        """Whether a trajectory is within `share`: by the seed, however trajectories are dealt out."""
        return self._mesh.is_head and (
            self._number(f"share/{step}/{trajectory.prompt.id}/{trajectory.sample}")
            < self.settings.share * 2**31
        )

    def _plan(self, trajectory: Trajectory) -> StepPlan:
        settings = self.settings
        prompt_ids = list(trajectory.prompt.token_ids)
        try:
            return plan_prefixes(
                prompt_ids,
                trajectory.response_ids,
                trajectory.text,
                self._decode,
                self._close,
                settings.rules(),
                opened=self._decode(prompt_ids).rstrip().endswith(settings.open_tag),
                truncated=settings.last_prefix,
                most=settings.max_prefixes,
                longest=self._limit - min(settings.min_tokens, settings.max_tokens),
            )
        except ValueError as error:
            raise ValueError(f"sample {trajectory.key}: {error}") from error

    def _request(self, ids: Ids, question: _Question, step: int) -> Request:
        settings = self.settings
        room = min(settings.max_tokens, self._limit - len(ids))
        return Request(
            prompt_ids=list(ids),
            n=settings.candidates,
            seed=self._number(f"prefix/{step}/{','.join(map(str, ids))}"),
            sampling=Sampling(settings.temperature, settings.top_p, room, logprobs=False),
            group=question.group,
        )

    def _look_up(self) -> tuple[float, float]:
        """The servers' cache counters at a moment that all ranks agree on; on the first head."""
        self._mesh.barrier()
        if self._client is None or not self._mesh.is_first_head:
            return 0.0, 0.0
        return self._client.prefix_cache()

    def _verify(self, questions: Sequence[_Question], texts: Sequence[Sequence[str]]) -> None:
        """Count right continuations. A continuation is graded on its own, so that a box in the reasoning
        before it counts for nothing; equal ones are graded once."""
        assert self._grade is not None  # heads have a grader
        pairs = [(text, q.answer) for q, found in zip(questions, texts, strict=True) for text in found]
        once = list(dict.fromkeys(pairs))
        right = {pair: v.correct for pair, v in zip(once, self._grade(once), strict=True)}
        for question, found in zip(questions, texts, strict=True):
            question.right = sum(right[text, question.answer] for text in found)

    def _measured(
        self, plan: StepPlan, questions: dict[Ids, _Question], version: int, key: str
    ) -> MeasuredSteps:
        settings = self.settings
        accuracies = [questions[ids].right / settings.candidates for ids in plan.prefixes]
        if self._function is not None:
            rewards = own_step_rewards(self._function, accuracies, key)
        else:
            rewards = step_rewards(accuracies, settings.gamma, settings.window, settings.least_change)
        return MeasuredSteps(plan.offsets, plan.bounds, accuracies, rewards.tolist(), version)

    def _describe(
        self,
        plans: dict[int, StepPlan],
        trajectories: Sequence[Trajectory],
        answers: Sequence[Sequence[Sample]],
        metrics: Sums,
    ) -> None:
        """Metrics of the step, all named `vsrm/...`."""
        metrics.mean("vsrm/steps", [float(len(plan)) for plan in plans.values()])
        wanted = sum(len(plan.prefixes) for plan in plans.values())
        metrics.total("vsrm/prefixes_asked", float(len(answers)))
        metrics.total("vsrm/prefixes_reused", float(wanted - len(answers)))
        metrics.total("vsrm/prefixes_dropped", float(sum(plan.dropped for plan in plans.values())))
        metrics.total("vsrm/prefixes_thinned", float(sum(plan.thinned for plan in plans.values())))
        samples = [s for found in answers for s in found]
        metrics.total("vsrm/continuation_tokens", float(sum(len(s.token_ids) for s in samples)))
        metrics.mean("vsrm/continuations_cut", [float(s.finish_reason == "length") for s in samples])
        measured = [t.steps for t in trajectories if t.steps is not None]
        metrics.ratio("vsrm/measured", len(measured), len(trajectories))
        rewards = np.array([r for steps in measured for r in steps.rewards], dtype=np.float64)
        metrics.mean("vsrm/step_reward", rewards)
        metrics.mean("vsrm/step_reward_abs", np.abs(rewards))
        for name, share in (("zero", rewards == 0), ("positive", rewards > 0), ("negative", rewards < 0)):
            metrics.mean(f"vsrm/step_reward_{name}", share.astype(np.float64))
        for name, place in (("first", 0.0), ("middle", 0.5), ("last", 1.0)):
            accuracies = [s.accuracies[round(place * (len(s.accuracies) - 1))] for s in measured]
            metrics.mean(f"vsrm/accuracy_{name}", accuracies)

    def _number(self, label: str) -> int:
        """31 bits that depend on the seed and the label alone."""
        digest = hashlib.sha256(f"{self._seed}/vsrm/{label}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


def _ask_once(plans: dict[int, StepPlan], trajectories: Sequence[Trajectory]) -> dict[Ids, _Question]:
    """The different prefixes of all plans, those of a response together, shortest first."""
    questions: dict[Ids, _Question] = {}
    for index, plan in plans.items():
        for ids in sorted(plan.prefixes, key=len):
            questions.setdefault(ids, _Question(trajectories[index].prompt.answer, index))
    return questions
