"""How ranks, prompts and tokens divide: what `train --dry-run` shows and what `checks` reasons with.

Pure arithmetic on settings. Starts no process and reads no file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_meds.actor.settings import LayoutSettings
from megatron_meds.config import Settings


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the layout; every number 0-based."""

    rank: int
    replica: int
    stage: int
    context: int
    tensor: int
    head: bool
    """Head of its replica: tensor and context rank 0 on the last stage."""


def model_ranks(layout: LayoutSettings) -> int:
    """Ranks that hold one copy of the model."""
    return layout.tensor * layout.pipeline * layout.context


def own_world_size(layout: LayoutSettings) -> int:
    """Ranks that `train` starts by itself: `data: auto` is one replica."""
    return model_ranks(layout) * (1 if layout.data == "auto" else layout.data)


def replicas(layout: LayoutSettings, world_size: int) -> int:
    """Data-parallel replicas among `world_size` ranks (a remainder is `checks`' matter)."""
    return world_size // model_ranks(layout)


def places(layout: LayoutSettings, world_size: int) -> list[Place]:
    """Every rank's place: tensor ranks lie next to each other, then context, data, pipeline
    (Megatron-Core's order tp-cp-dp-pp)."""
    count = replicas(layout, world_size)
    found = []
    for rank in range(world_size):
        rest, tensor = divmod(rank, layout.tensor)
        rest, context = divmod(rest, layout.context)
        stage, replica = divmod(rest, count)
        head = tensor == 0 and context == 0 and stage == layout.pipeline - 1
        found.append(Place(rank, replica, stage, context, tensor, head))
    return found


def server_tokens(settings: Settings, positions: int) -> int:
    """Longest sequence of the servers: prompt and response, and where steps are measured the continuation
    of such a prefix, as far as the model has positions for it."""
    longest = settings.data.max_prompt_tokens + settings.rollout.max_tokens
    if settings.vsrm.enabled:
        longest = max(longest, min(longest + settings.vsrm.room, positions))
    return settings.rollout.server.max_model_len or longest


@dataclass(frozen=True)
class BatchArithmetic:
    """One training step in numbers. Token counts are upper bounds: every sequence at its limit."""

    prompts: int
    """Prompts of a step (sft: examples)."""
    samples_per_prompt: int
    samples: int
    """Trajectories of a step."""
    replicas: int
    prompts_per_replica: int
    """Of the replica that has most."""
    prompts_per_update: int
    last_update_prompts: int
    """Prompts of the last update of a pass; fewer where mini-batches do not divide the step."""
    updates: int
    """Optimizer updates of a step, all epochs."""
    total_updates: int
    """Optimizer updates of the run."""
    sequence_tokens: int
    """Longest sequence: prompt and response."""
    tokens: int
    """Tokens of a step."""
    micro_batches: int
    """Micro-batches of an update on one replica if all sequences have the most tokens; padded ones may be
    more where lengths differ, since a row of its own then costs less than padding."""


def batch_arithmetic(settings: Settings, world_size: int) -> BatchArithmetic:
    """The numbers of one step on `world_size` ranks."""
    algorithm, data, rollout = settings.algorithm, settings.data, settings.rollout
    group = 1 if algorithm.name == "sft" else rollout.samples_per_prompt
    prompts = data.prompts_per_step
    mini = algorithm.mini_batch_prompts or prompts
    per_pass = math.ceil(prompts / mini)
    count = replicas(settings.actor.layout, world_size)
    sequence = data.max_prompt_tokens + rollout.max_tokens
    update_samples = math.ceil(mini / count) * group
    in_one = max(1, settings.actor.tokens_per_micro_batch // sequence)
    micro_batches = math.ceil(update_samples / in_one)
    layout = settings.actor.layout
    if layout.virtual > 1:  # interleaved schedules run whole rounds of the stages
        micro_batches = math.ceil(micro_batches / layout.pipeline) * layout.pipeline
    return BatchArithmetic(
        prompts=prompts,
        samples_per_prompt=group,
        samples=prompts * group,
        replicas=count,
        prompts_per_replica=math.ceil(prompts / count),
        prompts_per_update=mini,
        last_update_prompts=prompts - (per_pass - 1) * mini,
        updates=per_pass * algorithm.epochs,
        total_updates=per_pass * algorithm.epochs * settings.run.steps,
        sequence_tokens=sequence,
        tokens=prompts * group * sequence,
        micro_batches=micro_batches,
    )
