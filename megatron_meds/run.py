"""A reinforcement-learning run: what each line of the loop in `train.py` does.

Heads talk to servers, grade, reward and write; the other ranks of a replica get by broadcast what
they need. Joins the parts and decides nothing that a part decides.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from megatron_meds import checks
from megatron_meds.actor.learning import MiniBatch
from megatron_meds.agreement import RankError, together
from megatron_meds.algorithms import resolve
from megatron_meds.algorithms.objective import policy_objective, spread, weigh
from megatron_meds.config import Settings
from megatron_meds.data.loader import PromptLoader
from megatron_meds.data.overlap import find_overlap, without_overlap
from megatron_meds.data.prompts import load_evaluation_prompts, load_training_prompts, places_of
from megatron_meds.data.templates import Template, end_token_ids, load_tokenizer
from megatron_meds.metrics import Sums, describe, describe_entropy, describe_mismatch, describe_rewards
from megatron_meds.rewards.compose import compose
from megatron_meds.rewards.form import in_loss
from megatron_meds.rollout.client import Client
from megatron_meds.rollout.sampler import Sampler, StepSamples
from megatron_meds.rollout.server import Servers
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
        self._load_data()
        self._start_servers()
        self.use(self._loader_of_prompts)

    # --- opening -----------------------------------------------------------------------------------

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
        self._servers: Servers | None = None
        transport = checks.transport(settings)

        def start() -> None:
            if mesh.local_rank == 0:
                self.tracker.say("starting vLLM")
                self._servers = self.stack.enter_context(
                    Servers.start(
                        settings.rollout.server,
                        settings.model.path,
                        run_dir=settings.run.folder,
                        max_model_len=settings.data.max_prompt_tokens + settings.rollout.max_tokens,
                        dtype="bfloat16" if self.policy.is_bf16 else "float32",
                        device="cuda" if mesh.device.type == "cuda" else "cpu",
                        transport=transport,
                        seed=settings.run.seed,
                        first_device=mesh.local_size,
                    )
                )

        together(start, "the rollout servers did not start", mesh.all_gather)
        mine = self._servers.urls if self._servers is not None else []
        urls = list(dict.fromkeys(url for part in mesh.all_gather(mine) for url in part))
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
            decode=lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=True)),
            draw=self._loader_of_prompts.next,
            resync=self._recover,
            seed=settings.run.seed,
        )
        self.sampler.on_trajectory = self.tracker.advance

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
        """Fill in the actor's log-probabilities and entropies, on every rank of the replica. Collective."""
        scores = self.policy.score(samples.trajectories)
        known = self.mesh.broadcast_in_replica((scores.logprobs, scores.entropy))
        for trajectory, logprobs, entropy in zip(samples.trajectories, *known, strict=True):
            trajectory.logprobs, trajectory.entropy = logprobs, entropy
        if self.mesh.is_head:
            self.metrics.ratio("score/real_tokens", scores.real_tokens, scores.tokens)

    def reward(self, samples: StepSamples) -> list[MiniBatch]:
        """Ledger and advantages of this replica's trajectories, as mini-batches. Collective."""
        trajectories = samples.trajectories
        advantages: list[np.ndarray] = []
        if self.mesh.is_head:
            ledger = compose(trajectories, self.settings.reward, self.settings.rollout.max_tokens)
            advantages = self.algorithm.advantages(ledger, trajectories)
            self._describe(samples, ledger)
        advantages = self.mesh.broadcast_in_replica(advantages)
        batches, start = [], 0
        for part in samples.mini_batches:
            batches.append(self._mini_batch(part, advantages[start : start + len(part)]))
            start += len(part)
        return batches

    def update(self, batches: list[MiniBatch]) -> None:  # type: ignore[override]
        """The step's optimizer updates. Collective."""
        for _ in range(self.settings.algorithm.epochs):
            for batch in batches:
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

    # --- help ----------------------------------------------------------------------------------------

    def _mini_batch(self, trajectories: list[Trajectory], advantages: list[np.ndarray]) -> MiniBatch:
        lengths = [len(t) for t in trajectories]
        used = in_loss(trajectories, self.settings.reward.overlong)
        counted = [n if use else 0 for n, use in zip(lengths, used, strict=True)]
        weights = weigh(
            counted, self.algorithm.aggregation, self.settings.rollout.max_tokens, self.sum_over_replicas
        )
        known = [t.logprobs for t in trajectories if t.logprobs is not None]
        return MiniBatch(
            trajectories,
            {"old_logprobs": known, "advantages": advantages, "weights": spread(weights, lengths)},
        )

    def _describe(self, samples: StepSamples, ledger: RewardLedger) -> None:
        """Metrics of the sampled trajectories, and their file. Collective of the heads."""
        trajectories = samples.trajectories
        describe(self.metrics, trajectories)
        kept = self.metrics.means.pop("accuracy", (0.0, 0.0))
        self.metrics.ratio("accuracy_kept", *kept)  # of the groups that dynamic sampling kept
        describe_rewards(self.metrics, ledger)
        describe_mismatch(self.metrics, trajectories)
        describe_entropy(self.metrics, trajectories)
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
