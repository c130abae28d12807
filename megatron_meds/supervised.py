"""Supervised training through the actor: the same micro-batches, schedules and optimizer, with
given responses in place of sampled ones. Makes starting points for reinforcement learning.
"""

from __future__ import annotations

from contextlib import ExitStack

from megatron_meds.actor.learning import MiniBatch
from megatron_meds.algorithms.objective import spread, supervised_objective, weigh
from megatron_meds.config import Settings
from megatron_meds.data.loader import PromptLoader
from megatron_meds.data.prompts import load_examples, places_of
from megatron_meds.data.templates import Template, load_tokenizer
from megatron_meds.rollout.dealing import cut_mini_batches, deal
from megatron_meds.trajectory import Trajectory
from megatron_meds.workspace import Workspace


def supervise(settings: Settings) -> None:
    """Minimise the cross-entropy of `data.train`'s responses, `data.prompts_per_step` examples a step.

    Every rank calls it.
    """
    with ExitStack() as stack:
        work = Workspace(settings, stack)
        template = Template(settings.data.template, load_tokenizer(settings.model.path))
        data = settings.data
        examples, counts = load_examples(
            data.train, template, data.max_prompt_tokens, settings.rollout.max_tokens, places_of(data)
        )
        work.tracker.say(f"examples: {len(examples)} ({counts})")
        loader = PromptLoader(examples, data.prompts_per_step, settings.run.seed, data.shuffle)
        work.use(loader)
        for step in work.steps():
            with work.phase("update"):
                _step(work, loader.next())
            work.finish(step)
        work.export()


def _step(work: Workspace, examples: list[Trajectory]) -> None:
    sizes = [len(e.prompt.token_ids) + len(e) for e in examples]
    for rows in cut_mini_batches(len(examples), work.settings.algorithm.mini_batch_prompts):
        mine = [examples[i] for i in deal(sizes, rows, work.mesh.replicas)[work.mesh.replica]]
        lengths = [len(e) for e in mine]
        aggregation = work.settings.algorithm.aggregation or "token-mean"
        weights = weigh(lengths, aggregation, work.settings.rollout.max_tokens, work.sum_over_replicas)
        work.update(MiniBatch(mine, {"weights": spread(weights, lengths)}), supervised_objective)
        work.metrics.total("response_tokens", float(sum(lengths)))
        work.metrics.total("prompt_tokens", float(sum(len(e.prompt.token_ids) for e in mine)))
