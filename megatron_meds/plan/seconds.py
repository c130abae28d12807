"""Seconds of a step by phase, from a stated cost model. An estimate: 30 % off is good.

The model, with a GPU's peak F (dense bf16 FLOP/s) and memory bandwidth W:

    score     2 P tokens / (0.40 F x GPUs)                  forward, all sequences of the step
    update    6 P tokens / (0.40 F x GPUs), 8 with full recomputation; the critic the same again
    rollout   each server GPU decodes its share in waves of as many sequences as its KV cache holds (and
              max_num_seqs allows); a token of a wave takes (weights + the cache that is read) / (0.6 W),
              or 2 P x sequences / (0.5 F) where that is longer
    steps     VSRM's continuations in the same way; prefixes come from the cache
    sync      bytes of the model / 50 GB/s, once
    reward    grading 600 answers a second and worker

P parameters, tokens: prompt and response, of a mean length that is given. Pipeline bubbles lengthen score
and update by (stages - 1) / micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_meds.actor.shape import ModelShape
from megatron_meds.arithmetic import batch_arithmetic
from megatron_meds.config import Settings
from megatron_meds.plan.memory import ServerMemory
from megatron_meds.plan.parameters import whole_parameters

UTILISATION = 0.40
"""Of the peak, in score and update."""
DECODE_BANDWIDTH = 0.6
DECODE_FLOPS = 0.5
SYNC_BYTES = 50e9
GRADED = 600.0


@dataclass(frozen=True)
class Gpu:
    """A card's data sheet."""

    name: str
    bytes: float
    flops: float
    """Dense bf16, a second."""
    bandwidth: float
    """Bytes a second."""


GPUS = {
    "a100": Gpu("A100 80 GB", 80e9, 312e12, 2.0e12),
    "h100": Gpu("H100 80 GB", 80e9, 989e12, 3.35e12),
    "h200": Gpu("H200 141 GB", 141e9, 989e12, 4.8e12),
    "b200": Gpu("B200 180 GB", 180e9, 2250e12, 8.0e12),
}


@dataclass(frozen=True)
class StepTime:
    """Seconds by phase."""

    phases: dict[str, float]
    tokens: float
    """Sampled and prompt tokens that the step learns from."""

    @property
    def total(self) -> float:
        return sum(self.phases.values())

    @property
    def tokens_per_day(self) -> float:
        return 86_400 * self.tokens / self.total


def step_time(
    settings: Settings,
    shape: ModelShape,
    server: ServerMemory,
    gpu: Gpu,
    *,
    world_size: int,
    server_gpus: int,
    response: float,
    resampled: float = 1.0,
) -> StepTime:
    """Of one step.

    Args:
        response: mean tokens of a response.
        resampled: groups sampled for each that is kept (dynamic sampling).
    """
    rollout, layout, vsrm = settings.rollout, settings.actor.layout, settings.vsrm
    parameters = whole_parameters(shape)
    samples = settings.data.prompts_per_step * rollout.samples_per_prompt
    prompt = settings.data.max_prompt_tokens / 4  # most prompts are far below the limit
    tokens = samples * (prompt + response)
    batches = batch_arithmetic(settings, world_size).micro_batches
    bubble = 1 + (layout.pipeline - 1) / max(1, batches) / layout.virtual
    compute = UTILISATION * gpu.flops * world_size / bubble
    models = 2 if settings.algorithm.name == "ppo" else 1
    passes = models + (1 if settings.algorithm.kl.coefficient else 0)
    backward = 8 if settings.actor.recompute == "full" else 6
    phases = {
        "rollout": _decode(
            samples * resampled, response, prompt, server, gpu, server_gpus, settings, parameters
        ),
        "score": passes * 2 * parameters * tokens / compute,
    }
    if vsrm.enabled:
        steps = min(vsrm.max_prefixes or 1e9, max(0.0, 4 * response - vsrm.skip) / max(1, vsrm.gap) + 2)
        asked = samples * vsrm.share * steps * vsrm.candidates
        length = min(vsrm.max_tokens, 250)
        phases["steps"] = _decode(asked, length, response / 2, server, gpu, server_gpus, settings, parameters)
    heads = world_size / (layout.tensor * layout.pipeline * layout.context)
    phases["reward"] = samples / heads / (GRADED * settings.verify.workers)
    phases["update"] = models * settings.algorithm.epochs * backward * parameters * tokens / compute
    phases["sync"] = 2 * parameters / SYNC_BYTES
    return StepTime(phases, tokens)


def _decode(
    samples: float,
    length: float,
    before: float,
    server: ServerMemory,
    gpu: Gpu,
    gpus: int,
    settings: Settings,
    parameters: int,
) -> float:
    """Seconds to sample so many responses of that length after so many tokens, over all servers."""
    parallel = settings.rollout.server.tensor_parallel
    servers = max(1, gpus // parallel)
    fit = max(1.0, server.kv_cache / (server.token * (before + length)))
    at_once = max(1.0, min(samples / servers, settings.rollout.server.max_num_seqs, fit))
    waves = math.ceil(samples / servers / at_once - 1e-9)
    read = server.weights + at_once * server.token * (before + length / 2)
    token = max(
        read / (DECODE_BANDWIDTH * gpu.bandwidth),
        2 * parameters / parallel * at_once / (DECODE_FLOPS * gpu.flops),
    )
    return waves * length * token
