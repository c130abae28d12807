"""What ranks measure in the tests of the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_meds.actor.mesh import Mesh
from tests.distributed.bodies_state import make_policy, train, trajectories


def states(mesh: Mesh, folder: Path, distributed: bool) -> dict[str, float]:
    """Bytes of this rank's weights, gradient buffers and optimizer state after an update."""
    policy = make_policy(mesh, folder, distributed_optimizer=distributed)
    train(policy, range(1))
    buffers = [b for chunk in policy.chunks for b in chunk.buffers]  # type: ignore[union-attr]
    kept = {}
    for optimizer in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for state in optimizer.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    kept[value.untyped_storage().data_ptr(), value.storage_offset()] = value.nbytes
    return {
        "stage": mesh.pipeline_rank,
        "weights": sum(p.nbytes for chunk in policy.bare for p in chunk.parameters()),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "optimizer": sum(kept.values()),
    }


def kept_by_a_layer(mesh: Mesh, folder: Path, tokens: int) -> dict[str, Any]:
    """Bytes that a decoder layer keeps for its backward pass, beside parameters; median over layers."""
    policy = make_policy(mesh, folder)
    object.__setattr__(policy.settings, "tokens_per_micro_batch", tokens)
    per_layer: dict[int, dict[int, int]] = {}
    inside: list[int] = []
    layers = [m for chunk in policy.bare for m in chunk.modules() if isinstance(m, TransformerLayer)]
    weights = {p.untyped_storage().data_ptr() for chunk in policy.bare for p in chunk.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in weights:
            per_layer.setdefault(inside[-1], {})[storage.data_ptr()] = storage.nbytes()
        return tensor

    for layer in layers:
        layer.register_forward_pre_hook(lambda module, _: inside.append(module.layer_number))
        layer.register_forward_hook(lambda module, *_: inside.clear())
    sample = trajectories(0, 1)[0]
    long = [3 + i % 100 for i in range(tokens - len(sample.prompt.token_ids) - 1)]
    sample.response_ids, sample.rollout_logprobs = long, [0.0] * len(long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        policy_update(policy, sample)
    found = sorted(sum(kept.values()) for kept in per_layer.values())
    return {"bytes": found[len(found) // 2] if found else 0}


def policy_update(policy: Any, sample: Any) -> None:
    import numpy as np

    from megatron_meds.actor.learning import MiniBatch
    from tests.distributed.bodies_state import likelihood

    weights = [np.full(len(sample), 1.0 / len(sample), dtype=np.float32)]
    policy.begin_step()
    policy.update(MiniBatch([sample], {"weights": weights}), likelihood)
