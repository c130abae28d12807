"""What every kind of training has: mesh, policy, tracker, checkpoints, a place in the data.

Opened once, closed in order; used by supervised training and by reinforcement learning alike.
Knows nothing of servers, rewards or losses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from megatron_meds.actor.learner import Learner
from megatron_meds.actor.learning import MiniBatch, Objective
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.policy import Policy
from megatron_meds.actor.state import load_state, save_state
from megatron_meds.agreement import together
from megatron_meds.checkpoint import Checkpoints, read_state
from megatron_meds.config import Settings, dump
from megatron_meds.data.loader import PromptLoader
from megatron_meds.errors import UserError
from megatron_meds.metrics import Sums
from megatron_meds.tracking import Tracker


class Workspace:
    """A run's mesh, policy, tracker and checkpoints on this rank.

    Attributes:
        done: steps finished before this one, those before a resume included.
    """

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        """Join the ranks, build the policy, open the run's folder. Collective; `stack` closes it all."""
        self.settings = settings
        self.stack = stack
        actor, run = settings.actor, settings.run
        self.mesh = Mesh.create(actor.layout, actor.device, actor.timeout_minutes)
        stack.callback(self.mesh.close, destroy=True)
        self.policy = Policy(
            settings.model,
            actor,
            settings.optimizer,
            self.mesh,
            steps=run.steps - settings.critic.steps_before_policy,
            seed=run.seed,
            temperature=settings.rollout.temperature if settings.algorithm.name != "sft" else 1.0,
        )
        self.checkpoints = Checkpoints(
            run.folder,
            run.keep_last,
            config=dump(settings),
            rank=self.mesh.rank,
            is_writer=self.mesh.is_first_head,
            all_gather=self.mesh.all_gather,
        )
        self.checkpoint = self.checkpoints.find(run.resume)
        self.done = 0 if self.checkpoint is None else read_state(self.checkpoint).step
        if self.done >= run.steps:
            raise UserError(
                f"run.folder = {run.folder}: holds a run that finished its {self.done} steps; raise "
                "run.steps to go on with it, choose another run.name, or delete the folder"
            )
        self.tracker = stack.enter_context(
            Tracker(run.folder, settings.tracking, is_writer=self.mesh.is_first_head, total_steps=run.steps)
        )
        together(self._write_config, f"{run.folder} cannot be written", self.mesh.all_gather)
        self._loader: PromptLoader | None = None
        self.metrics = Sums()
        self._learning_rate = 0.0
        self._started = time.monotonic()

    def use(self, loader: PromptLoader) -> None:
        """Take the place in the data, and the policy's state, from the checkpoint to go on from, if any.

        Collective.
        """
        self._loader = loader
        if self.checkpoint is None:
            return
        self.read_checkpoint(self.checkpoint)
        saved = read_state(self.checkpoint)
        loader.load_state_dict(saved.state["loader"])
        self.checkpoints.restore_random(self.checkpoint)
        self.tracker.resume(saved.step)
        self.tracker.say(f"going on from {self.checkpoint} after step {saved.step}")

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to do, from 1; moves the learning rate before each."""
        for step in range(self.done + 1, self.settings.run.steps + 1):
            self.metrics = Sums()
            self._started = time.monotonic()
            self.begin_step(step)
            yield step
            self.done = step

    def begin_step(self, step: int) -> None:
        """Move the learning rate to that of a step."""
        self._learning_rate = self.policy.begin_step()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time what is done inside as `seconds/NAME`."""
        return self.tracker.phase(name)

    def sum_over_replicas(self, value: float) -> float:
        """The sum of the replicas' values; every rank of a replica gives the same. Collective."""
        return sum(self.mesh.all_gather(value if self.mesh.is_head else 0.0))

    def update(self, batch: MiniBatch, objective: Objective) -> None:
        """One optimizer update of the policy, its metrics added to the step's. Collective."""
        self.learn(self.policy, batch, objective, "update")

    def learn(self, learner: Learner, batch: MiniBatch, objective: Objective, group: str) -> None:
        """One optimizer update of a model, its metrics added to the step's as `GROUP/NAME`. Collective."""
        found = learner.update(batch, objective)
        if not self.mesh.is_head:
            return
        tokens = found.pop("tokens")
        self.metrics.total(f"{group}/loss", found.pop("loss"))
        norm = found.pop("grad_norm")
        self.metrics.maximum(f"{group}/grad_norm", norm)
        for name, total in found.items():
            self.metrics.ratio(f"{group}/{name}", total, tokens)

    def finish(self, step: int) -> None:
        """Log the step, and save and export where it is time. Collective."""
        run = self.settings.run
        last = step == run.steps
        if last or (run.save_every and step % run.save_every == 0):
            with self.phase("save"):
                self.save(step)
        if run.export_every and step % run.export_every == 0 and not last:
            with self.phase("export"):
                self.policy.save_huggingface(run.folder / f"export_{step:06d}")
        self.log(step)

    def save(self, step: int) -> None:
        """Write the checkpoint of a step. Collective."""
        assert self._loader is not None  # `use` comes first
        self.checkpoints.save(step, self.write_checkpoint, {"loader": self._loader.state_dict()})

    def write_checkpoint(self, folder: Path) -> None:
        """What a checkpoint holds besides counters and positions: the policy. Collective."""
        save_state(self.policy, folder)

    def read_checkpoint(self, folder: Path) -> None:
        """The inverse of `write_checkpoint`. Collective."""
        load_state(self.policy, folder)

    def log(self, step: int) -> None:
        """Add up the step's metrics over replicas and write them down."""
        if not self.mesh.is_head:
            return
        values = Sums.merge(self.mesh.gather_heads(self.metrics)).values()
        seconds = time.monotonic() - self._started
        values["learning_rate"] = self._learning_rate
        values["seconds/step"] = seconds
        if "response_tokens" in values:
            values["tokens_per_second"] = (values["response_tokens"] + values["prompt_tokens"]) / seconds
        if self.mesh.is_first_head:
            self.tracker.log(step, values)

    def export(self) -> None:
        """Write the Hugging Face folder of the end. Collective."""
        if self.settings.run.export_at_end:
            target = self.settings.run.folder / "export"
            self.policy.save_huggingface(target)
            self.tracker.say(f"Hugging Face model: {target}")

    def _write_config(self) -> None:
        if self.mesh.is_first_head:
            folder = self.settings.run.folder
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(dump(self.settings))
