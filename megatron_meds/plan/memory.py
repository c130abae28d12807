"""Bytes of the busiest actor GPU and of a server's GPU, by part.

Weights, gradients and optimizer are exact; activations are counted from what a layer keeps for its
backward pass. Letters: T tokens of a micro-batch, H hidden, B samples of a replica.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_meds.actor.shape import ModelShape, read_model_config, with_value_head
from megatron_meds.arithmetic import batch_arithmetic, replicas
from megatron_meds.config import Settings
from megatron_meds.plan.parameters import StageParameters, stage_parameters, whole_parameters

GIB = 2**30
FRAMEWORK = 2.0 * GIB
"""CUDA context, NCCL buffers and what the allocator cannot use, of a GPU that the actor has."""
SERVER_OVERHEAD = 3.0 * GIB
"""The same for a server, its CUDA graphs and activations included."""


@dataclass(frozen=True)
class ActorMemory:
    """Bytes of the rank that needs most, by part."""

    stage: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class ServerMemory:
    """A server's GPU."""

    weights: float
    kv_cache: float
    """Bytes that are left for it."""
    token: float
    """Bytes of one token in the cache."""
    longest: int
    """Tokens of the longest sequence."""

    @property
    def sequences(self) -> float:
        """Sequences of full length that fit at once."""
        return max(0.0, self.kv_cache) / (self.token * self.longest)


def actor_memory(settings: Settings, shape: ModelShape, world_size: int, bf16: bool = True) -> ActorMemory:
    """Of the stage that needs most."""
    return max(
        (_stage(settings, shape, world_size, bf16, stage) for stage in range(settings.actor.layout.pipeline)),
        key=lambda m: m.total,
    )


def _stage(settings: Settings, shape: ModelShape, world_size: int, bf16: bool, stage: int) -> ActorMemory:
    layout, actor = settings.actor.layout, settings.actor
    count = replicas(layout, world_size)
    own = stage_parameters(shape, layout)[stage]
    parts = {"framework": FRAMEWORK, **model_states(own.total, count, bf16, actor.distributed_optimizer)}
    if settings.algorithm.name == "ppo":
        folder = settings.critic.path or settings.model.path
        value = stage_parameters(with_value_head(read_model_config(folder)), layout)[stage].total
        states = model_states(value, count, bf16, actor.distributed_optimizer)
        parts["critic"] = sum(states.values())
    kl, reference = settings.algorithm.kl, settings.model.reference
    if (kl.coefficient or reference is not None) and not settings.model.offload_reference:
        parts["reference"] = own.total * (2 if bf16 else 4)
    longest = settings.data.max_prompt_tokens + settings.rollout.max_tokens
    tokens = max(actor.tokens_per_micro_batch, longest)
    flight = _in_flight(settings, world_size, stage)
    parts["activations"] = flight * own.layers / layout.virtual * layer_activations(
        shape, tokens, layout.tensor, layout.sequence, actor.recompute, bf16
    ) + _beside_layers(shape, own, tokens, settings, bf16)
    if settings.meds.enabled:
        samples = math.ceil(settings.data.prompts_per_step / count) * settings.rollout.samples_per_prompt
        parts["layer-logit tap"] = 4.0 * samples * (shape.hidden + shape.layers)
    return ActorMemory(stage, parts)


def model_states(parameters: int, replicas: int, bf16: bool, distributed: bool) -> dict[str, float]:
    """Weights, gradients (fp32) and AdamW's state of a rank that holds so many parameters.

    In bf16 the optimizer keeps fp32 weights and both moments, in fp32 the moments alone; the
    distributed optimizer cuts them over the replicas.
    """
    state = (12 if bf16 else 8) * parameters
    return {
        "weights": parameters * (2 if bf16 else 4),
        "gradients": 4.0 * parameters,
        "optimizer": state / (replicas if distributed else 1),
    }


def layer_activations(
    shape: ModelShape, tokens: int, tensor: int, sequence: bool, recompute: str, bf16: bool
) -> float:
    """Bytes that one decoder layer keeps for the backward pass of a micro-batch on one tensor rank.

    Kept are the inputs of both norms, of the linear layers and of the activation, and queries, keys,
    values, output and log-sum-exp of the attention, whose kernel keeps no scores. What every tensor
    rank has is cut by sequence parallelism. This is what fused layers keep; Megatron-Core's local ones on
    the CPU keep 1.7 times as much (tests/plan). `selective` computes the MLP's inside again, `full`
    everything but the layer's input.
    """
    size = 2 if bf16 else 4
    cut = tensor if sequence else 1
    hidden, inner = shape.hidden * size / cut, shape.intermediate * size / tensor
    if recompute == "full":
        return tokens * hidden
    queries, keys = (
        shape.heads * shape.head_dim * size / tensor,
        shape.kv_heads * shape.head_dim * size / tensor,
    )
    attention = queries + 2 * keys + queries + 4.0 * shape.heads / tensor
    if shape.qk_norm:
        attention += queries + keys  # the norms' inputs
    # input and output of both norms; gate, up, and their product
    mlp = 0.0 if recompute == "selective" else 4 * inner
    return tokens * (4 * hidden + attention + mlp)


def _beside_layers(
    shape: ModelShape, own: StageParameters, tokens: int, settings: Settings, bf16: bool
) -> float:
    """Of the head's chunk, a recomputed layer and the final norm."""
    layout, actor = settings.actor.layout, settings.actor
    found = 0.0
    if own.head:
        rows = shape.vocab / layout.tensor
        found += min(actor.head_chunk, tokens) * rows * (4 * 3)  # fp32 logits, their softmax, its gradient
        found += 2 * tokens * shape.hidden * (2 if bf16 else 4)
    if actor.recompute == "full":
        found += layer_activations(shape, tokens, layout.tensor, layout.sequence, "none", bf16)
    elif actor.recompute == "selective":
        found += tokens * 4 * shape.intermediate * (2 if bf16 else 4) / layout.tensor
    return found


def _in_flight(settings: Settings, world_size: int, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, in chunks of its layers."""
    layout = settings.actor.layout
    batches = batch_arithmetic(settings, world_size).micro_batches
    if layout.virtual == 1:
        return min(layout.pipeline - stage, batches)
    warm = (layout.pipeline - stage - 1) * 2 + (layout.virtual - 1) * layout.pipeline + 1
    return min(warm, batches * layout.virtual)


def server_memory(settings: Settings, shape: ModelShape, gpu_bytes: float) -> ServerMemory:
    """Of each GPU of a server."""
    server = settings.rollout.server
    parallel = server.tensor_parallel
    weights = 2.0 * whole_parameters(shape) / parallel
    room = server.gpu_memory_utilization * gpu_bytes - weights - SERVER_OVERHEAD
    token = 2.0 * 2 * shape.layers * max(1, shape.kv_heads // parallel) * shape.head_dim
    longest = server.max_model_len or settings.data.max_prompt_tokens + settings.rollout.max_tokens
    return ServerMemory(weights, room, token, longest)


def mistake_memory(settings: Settings, shape: ModelShape, world_size: int, wrong: float) -> float:
    """Bytes of host memory that a replica head's share of the memory of mistakes grows by in a step.

    Args:
        wrong: share of wrong answers.
    """
    meds = settings.meds
    width = shape.layers if meds.last is None else shape.layers // 2 if meds.last == "half" else meds.last
    row = 4 * min(width, shape.layers) + 4 + 8 + 4 + 16  # feature, label, step, sample, tree
    row += 2 * shape.layers if meds.keep_layer_logits else 0
    row += meds.answer_characters + meds.response_characters
    samples = settings.data.prompts_per_step * settings.rollout.samples_per_prompt
    return wrong * samples * row / replicas(settings.actor.layout, world_size)
