"""A reinforcement-learning run: what each line of the loop in `train.py` does.

Heads talk to servers, grade, reward and write; the other ranks of a replica get by broadcast what
they need. Joins the parts and decides nothing that a part decides.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from megatron_meds import checks
from megatron_meds.actor.critic import Critic
from megatron_meds.actor.learning import MiniBatch
from megatron_meds.actor.reference import Reference
from megatron_meds.actor.state import load_state, save_state
from megatron_meds.agreement import RankError, together
from megatron_meds.algorithms import resolve
from megatron_meds.algorithms.mismatch import diverged
from megatron_meds.algorithms.objective import (
    policy_objective,
    token_arrays,
    value_arrays,
    value_objective,
    weigh,
)
from megatron_meds.arithmetic import server_tokens
from megatron_meds.config import Settings
from megatron_meds.data.loader import PromptLoader
from megatron_meds.data.overlap import find_overlap, without_overlap
from megatron_meds.data.prompts import load_evaluation_prompts, load_training_prompts, places_of
from megatron_meds.data.templates import Template, end_token_ids, load_tokenizer
from megatron_meds.metrics import (
    Sums,
    describe,
    describe_critic,
    describe_entropy,
    describe_mismatch,
    describe_reference,
    describe_rewards,
)
from megatron_meds.mistakes import Mistakes
from megatron_meds.rewards.compose import compose
from megatron_meds.rewards.divergence import add_kl
from megatron_meds.rewards.form import in_loss
from megatron_meds.rollout.client import Client
from megatron_meds.rollout.sampler import Sampler, StepSamples
from megatron_meds.serving import start_servers
from megatron_meds.stepwise import Stepwise
from megatron_meds.tracking.samples import sample_rows
from megatron_meds.trajectory import Prompt, RewardLedger, Trajectory
from megatron_meds.verify import Grader
from megatron_meds.weights.sync import WeightSync
from megatron_meds.workspace import Workspace

log = logging.getLogger(__name__)


class Run(Workspace):
    """A workspace with servers, a sampler and an algorithm."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        """Open everything. Collective."""
        super().__init__(settings, stack)
        self.algorithm = resolve(settings.algorithm)
        self._objective = policy_objective(self.algorithm)
        self._before: dict[str, float] = {}
        self._open_reference()
        self._open_critic()
        self._load_data()
        self._mistakes = (
            Mistakes(settings.meds, self.mesh, self._decode, stack) if settings.meds.enabled else None
        )
        self._start_servers()
        self._steps = self._open_steps() if settings.vsrm.enabled else None
        self.use(self._loader_of_prompts)

    # --- opening -----------------------------------------------------------------------------------

    def _open_reference(self) -> None:
        """The frozen reference, where there is something to measure against it."""
        settings = self.settings
        self._reference: Reference | None = None
        if settings.algorithm.kl.coefficient or settings.model.reference is not None:
            self._reference = Reference(
                settings.model, settings.actor, self.mesh, temperature=settings.rollout.temperature
            )
            self.tracker.say(f"reference policy: {self._reference.folder}")

    def _open_critic(self) -> None:
        """The critic, where the algorithm has one learn."""
        settings, run = self.settings, self.settings.run
        self._critic: Critic | None = None
        if self.algorithm.returns is not None:
            self._critic = Critic(
                settings.critic, settings.model, settings.actor, self.mesh, steps=run.steps, seed=run.seed
            )
            self._value_objective = value_objective(settings.critic.value_clip)
            self.tracker.say(f"critic: starts from {self._critic.folder}")

    def _load_data(self) -> None:
        settings, folder = self.settings, self.settings.model.path
        self._tokenizer = load_tokenizer(folder)
        self._stop_ids = end_token_ids(self._tokenizer, folder)
        template = Template(settings.data.template, self._tokenizer)
        places = places_of(settings.data)
        prompts, counts = load_training_prompts(
            settings.data.train, template, settings.data.max_prompt_tokens, places
        )
        self.tracker.say(f"training prompts: {len(prompts)} ({counts})")
        self._evaluation = load_evaluation_prompts(
            settings.data.evaluation, template, settings.data.max_prompt_tokens, places
        )
        if (overlap := find_overlap(prompts, self._evaluation)).asked:
            drop = settings.data.overlap == "drop"
            prompts = without_overlap(prompts, overlap) if drop else prompts
            self.tracker.say(f"asked in training too: {overlap}{'; left out of it' if drop else ''}")
        self._loader_of_prompts = PromptLoader(
            prompts, settings.data.prompts_per_step, settings.run.seed, settings.data.shuffle
        )
        self._grader: Grader | None = None
        if self.mesh.is_head:
            verify = settings.verify
            self._grader = self.stack.enter_context(
                Grader(verify.workers, verify.timeout_seconds, verify.function, verify.memory_mib)
            )
        graded = [p for part in (prompts, *self._evaluation.values()) for p in part]
        if not settings.reward.function_replaces_outcome:
            together(lambda: self._check_golds(graded), "data", self.mesh.all_gather)

    def _check_golds(self, prompts: list[Prompt]) -> None:
        """Refuse reference answers that cannot be compared, on the first head."""
        if self._grader is not None and self.mesh.is_first_head:
            places = [f"{p.source}: {p.question:.60}" for p in prompts]
            as_text = self.settings.verify.unparsed == "text"
            self._grader.check_golds([p.answer for p in prompts], places, as_text=as_text)

    def _start_servers(self) -> None:
        settings, mesh = self.settings, self.mesh
        transport = checks.transport(settings)
        self.tracker.say("starting vLLM")
        self._servers, urls = start_servers(settings, mesh, self.policy, self.stack, settings.run.folder)
        self._client = (
            Client(urls, settings.rollout, vocabulary=self.policy.shape.vocab, stop_token_ids=self._stop_ids)
            if mesh.is_head
            else None
        )
        self._sync = WeightSync(settings.weights, urls, self.policy.live_weights(), mesh, transport=transport)
        self.stack.callback(self._sync.close)
        self._sync.connect()
        self._version = 0
        self.sampler = Sampler(
            settings.rollout,
            mesh,
            client=self._client,
            grade=self._grader.grade if self._grader is not None else None,
            decode=self._decode,
            draw=self._loader_of_prompts.next,
            resync=self._recover,
            seed=settings.run.seed,
        )
        self.sampler.on_trajectory = self.tracker.advance

    def _open_steps(self) -> Stepwise:
        settings = self.settings
        close_ids = self._tokenizer(settings.vsrm.close_tag, add_special_tokens=False)["input_ids"]
        return Stepwise(
            settings.vsrm,
            self.mesh,
            complete=self.sampler.complete,
            client=self._client,
            grade=self._grader.grade if self._grader is not None else None,
            decode=self._decode,
            close_ids=close_ids,
            server_tokens=server_tokens(settings, self.policy.shape.max_positions),
            seed=settings.run.seed,
        )

    def begin_step(self, step: int) -> None:
        """Move the learning rates to those of a step; the policy's begins when the critic learnt alone."""
        if self._critic is not None:
            self.metrics.maximum("critic/learning_rate", self._critic.begin_step())
        self._policy_learns = step > self.settings.critic.steps_before_policy
        if self._policy_learns:
            super().begin_step(step)

    # --- the lines of the loop -----------------------------------------------------------------------

    def sync(self) -> None:
        """Bring the servers to the actor's weights; dead ones are started again first. Collective."""
        try:
            report = self._sync.push(self._version + 1)
        except RankError:
            if not self._restart_dead():
                raise
            report = self._sync.push(self._version + 1)
        self._version += 1
        if self._client is not None:
            self._client.version = self._version
        self.metrics.maximum("sync/seconds", report.seconds)
        self.metrics.maximum("sync/bytes", float(report.bytes))

    def sample(self, step: int) -> StepSamples:
        """Trajectories of this step, graded and dealt out. Collective."""
        data, rollout = self.settings.data, self.settings.rollout
        with self.tracker.progress(data.prompts_per_step * rollout.samples_per_prompt // self.mesh.replicas):
            return self.sampler.sample(
                data.prompts_per_step, self.settings.algorithm.mini_batch_prompts, step
            )

    def score(self, samples: StepSamples) -> None:
        """Fill in log-probabilities and entropies, the reference's and the critic's values where there are
        these, and layer logits where mistakes are remembered, on every rank of the replica. Collective."""
        if self._reference is not None:
            found = self._reference.score(samples.trajectories).logprobs
            for trajectory, logprobs in zip(
                samples.trajectories, self.mesh.broadcast_in_replica(found), strict=True
            ):
                trajectory.reference_logprobs = logprobs
        if self._critic is not None:
            found = self.mesh.broadcast_in_replica(self._critic.values(samples.trajectories))
            for trajectory, values in zip(samples.trajectories, found, strict=True):
                trajectory.values = values
        tokens = self._mistakes.answer_tokens(samples.trajectories) if self._mistakes is not None else None
        scores = self.policy.score(samples.trajectories, tokens, self.settings.meds.final_norm)
        known = self.mesh.broadcast_in_replica((scores.logprobs, scores.entropy))
        for trajectory, logprobs, entropy in zip(samples.trajectories, *known, strict=True):
            trajectory.logprobs, trajectory.entropy = logprobs, entropy
        if scores.layer_logits is not None:
            for trajectory, row in zip(samples.trajectories, scores.layer_logits, strict=True):
                trajectory.layer_logits = row
        if self.mesh.is_head:
            self.metrics.ratio("score/real_tokens", scores.real_tokens, scores.tokens)

    def measure_steps(self, samples: StepSamples) -> None:
        """Accuracies along the reasoning of this replica's trajectories, by continuations. Collective."""
        assert self._steps is not None  # in a run with vsrm.enabled
        self._steps.measure(samples.trajectories, self.done + 1, self.metrics)

    def reward(self, samples: StepSamples) -> list[MiniBatch]:
        """Ledger and advantages of this replica's trajectories, as mini-batches. Collective."""
        trajectories = samples.trajectories
        advantages: list[np.ndarray] = []
        returns: list[np.ndarray | None] = [None] * len(trajectories)
        if self.mesh.is_head:
            ledger = compose(trajectories, self.settings.reward, self.settings.rollout.max_tokens)
            if self._mistakes is not None:
                self._mistakes.shape(ledger, trajectories, self.done + 1, self.metrics)
            if self._steps is not None:
                self._steps.enter(ledger, trajectories)
            kl = self.settings.algorithm.kl
            if kl.coefficient and kl.term == "reward":
                add_kl(ledger, trajectories, kl)
            advantages = self.algorithm.advantages(ledger, trajectories, self._add_up_over_heads)
            if self.algorithm.returns is not None:
                returns = self.algorithm.returns(ledger, trajectories)
                describe_critic(self.metrics, trajectories, returns, self._add_up_over_heads)
            self._describe(samples, ledger)
        advantages, returns = self.mesh.broadcast_in_replica((advantages, returns))
        batches, start = [], 0
        for part in samples.mini_batches:
            here = slice(start, start + len(part))
            batches.append(self._mini_batch(part, advantages[here], returns[here]))
            start += len(part)
        return batches

    def update(self, batches: list[MiniBatch]) -> None:  # type: ignore[override]
        """The step's optimizer updates, the critic's before the policy's. Collective."""
        for _ in range(self.settings.algorithm.epochs):
            for batch in batches:
                if self._critic is not None:
                    self.learn(self._critic, batch, self._value_objective, "critic")
                if self._policy_learns:
                    super().update(batch, self._objective)

    def finish(self, step: int) -> None:
        """Evaluate where it is time, then log, save and export. Collective."""
        run = self.settings.run
        if step == run.steps:
            due = run.evaluate_at_end
        else:
            due = run.evaluate_every > 0 and step % run.evaluate_every == 0
        if due:
            self._evaluate(step)
        super().finish(step)

    def evaluate_at_start(self) -> None:
        """Accuracy before the first step, unless the run was resumed. Collective."""
        if self.settings.run.evaluate_at_start and self.done == 0 and self._evaluation:
            self._evaluate(0)
            self.log(0)

    def write_checkpoint(self, folder: Path) -> None:
        """The policy, and critic and memory of mistakes where there are these. Collective."""
        super().write_checkpoint(folder)
        if self._critic is not None:
            save_state(self._critic, folder / self._critic.kind)
        if self._mistakes is not None:
            self._mistakes.save(folder)

    def read_checkpoint(self, folder: Path) -> None:
        """The policy, and critic and memory of mistakes where there are these. Collective."""
        super().read_checkpoint(folder)
        if self._critic is not None:
            load_state(self._critic, folder / self._critic.kind)
        if self._mistakes is not None and not self._mistakes.load(folder):
            self.tracker.say(f"{folder} holds no memory of mistakes: they are remembered from here on")

    # --- help ----------------------------------------------------------------------------------------

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _add_up_over_heads(self, numbers: np.ndarray) -> np.ndarray:
        return np.sum(self.mesh.gather_heads(numbers), axis=0)

    def _mini_batch(
        self,
        trajectories: list[Trajectory],
        advantages: list[np.ndarray],
        returns: list[np.ndarray | None],
    ) -> MiniBatch:
        used = in_loss(trajectories, self.settings.reward.overlong)
        gone = diverged(trajectories, self.settings.algorithm.mismatch)
        counted = [len(t) if u and not g else 0 for t, u, g in zip(trajectories, used, gone, strict=True)]
        arrays = token_arrays(self.algorithm, trajectories, advantages, self._weigh(counted))
        if self._critic is not None:
            known = [0 if r is None else n for r, n in zip(returns, counted, strict=True)]
            arrays |= value_arrays(trajectories, returns, self._weigh(known))
        return MiniBatch(trajectories, arrays)

    def _weigh(self, counted: list[int]) -> list[float]:
        """The weight of one token of each sequence of this replica, over the whole mini-batch. Collective."""
        longest = self.settings.rollout.max_tokens
        return weigh(counted, self.algorithm.aggregation, longest, self.sum_over_replicas)

    def _describe(self, samples: StepSamples, ledger: RewardLedger) -> None:
        """Metrics of the sampled trajectories, and their file. Collective of the heads."""
        trajectories = samples.trajectories
        describe(self.metrics, trajectories)
        kept = self.metrics.means.pop("accuracy", (0.0, 0.0))
        self.metrics.ratio("accuracy_kept", *kept)  # of the groups that dynamic sampling kept
        describe_rewards(self.metrics, ledger)
        describe_mismatch(self.metrics, trajectories, self.settings.algorithm.mismatch)
        describe_entropy(self.metrics, trajectories)
        if self._reference is not None:
            describe_reference(self.metrics, trajectories)
        if self.mesh.is_first_head:
            for name, value in samples.metrics.items():
                self.metrics.total(name, value)
        step = self.done + 1
        if self.tracker.wants_samples(step):
            limit = -(-self.settings.tracking.trajectories_per_step // self.mesh.replicas)
            parts = self.mesh.gather_heads(sample_rows(trajectories, ledger, limit))
            self.tracker.write_samples(step, [row for part in parts for row in part])

    def _evaluate(self, step: int) -> None:
        count = self.settings.run.evaluate_samples
        for name, prompts in self._evaluation.items():
            with self.phase("evaluate"), self.tracker.progress(len(prompts) * count // self.mesh.replicas):
                answered = self.sampler.evaluate(prompts, count, seed=f"evaluation/{name}")
            if self.mesh.is_first_head:
                found = Sums()
                describe(found, answered)
                for metric in ("accuracy", "length", "truncated"):
                    self.metrics.maximum(f"evaluation/{name}/{metric}", found.values()[metric])
                self._tell(name, step, found.values()["accuracy"])

    def _tell(self, name: str, step: int, accuracy: float) -> None:
        """Say an evaluation's accuracy beside that before training."""
        if step == 0:
            self._before[name] = accuracy
        before = self._before.get(name)
        change = f" (before training {before:.1%})" if before is not None and step else ""
        self.tracker.say(f"{name}, step {step}: accuracy {accuracy:.1%}{change}")

    def _recover(self) -> None:
        """Start dead servers again and bring all of them the current weights. Collective."""
        self._restart_dead()
        self._sync.push(self._version)

    def _restart_dead(self) -> list[str]:
        """Start dead servers again and connect to all anew; returns their URLs. Collective."""

        def restart() -> list[str]:
            dead = self._servers.check() if self._servers is not None else []
            for index in dead:
                assert self._servers is not None
                self._servers.restart(index)
            return [self._servers.urls[i] for i in dead] if self._servers is not None else []

        again = together(restart, "a rollout server could not be started again", self.mesh.all_gather)
        restarted = [url for part in self.mesh.all_gather(again) for url in part]
        self.tracker.say(f"started again: {', '.join(restarted) or 'no server'}; bringing them the weights")
        self._sync.reconnect()
        if self.mesh.is_head:
            self.metrics.maximum("rollout/servers_restarted", float(len(restarted)))
        return restarted


@contextmanager
def open_run(settings: Settings) -> Iterator[Run]:
    """Open a run and close it in order: servers, grader, tracker, process groups."""
    with ExitStack() as stack:
        yield Run(settings, stack)
