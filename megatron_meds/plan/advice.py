"""What does not fit, and the setting to change first."""

from __future__ import annotations

from megatron_meds.config import Settings
from megatron_meds.plan.memory import GIB, ActorMemory, ServerMemory

REMEDIES = {
    "activations": "set actor.recompute=full, or lower actor.tokens_per_micro_batch to a sequence's",
    "optimizer": "take more data-parallel replicas, or a larger actor.layout.tensor or pipeline",
    "gradients": "take a larger actor.layout.tensor or pipeline",
    "weights": "take a larger actor.layout.tensor or pipeline",
    "critic": "take a larger actor.layout.tensor or pipeline, or an algorithm without a critic",
    "reference": "set model.offload_reference=true",
    "layer-logit tap": "lower data.prompts_per_step",
}


def advise(settings: Settings, actor: ActorMemory, server: ServerMemory, gpu_bytes: float) -> list[str]:
    """A line for each thing that does not fit; none where all does."""
    found = []
    if actor.total > gpu_bytes:
        largest = max((n for n in actor.parts if n in REMEDIES), key=lambda name: actor.parts[name])
        if largest == "activations" and settings.actor.recompute == "full":
            remedy = "take a larger actor.layout.tensor with sequence=true, or lower the lengths"
        else:
            remedy = REMEDIES[largest]
        found.append(
            f"does not fit: an actor GPU needs {actor.total / GIB:.1f} GiB and has {gpu_bytes / GIB:.0f}; "
            f"the largest part is {largest}: {remedy}"
        )
    if server.sequences < 1:
        found.append(
            f"does not fit: a server's KV cache holds {server.sequences:.2f} sequences of {server.longest:,} "
            "tokens; raise rollout.server.tensor_parallel, or lower rollout.max_tokens"
        )
    return found
