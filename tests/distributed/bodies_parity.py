"""What the ranks do in the parity tests: score, gradient, one update; results back to the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.utils import unwrap_model

from megatron_meds.actor.learning import MiniBatch
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.policy import Policy
from megatron_meds.actor.settings import ActorSettings, ModelSettings, OptimizerSettings
from megatron_meds.trajectory import Trajectory


def open_policy(mesh: Mesh, folder: Path, actor: dict[str, Any], **options: Any) -> Policy:
    """A policy on the mesh's layout; `options` may hold lr, temperature."""
    return Policy(
        ModelSettings(path=folder),
        ActorSettings(layout=mesh.layout, device="cpu", **actor),
        OptimizerSettings(lr=options.get("lr", 1e-3), warmup_steps=0, weight_decay=0.1, clip_grad=1.0),
        mesh,
        steps=10,
        seed=1,
        temperature=options.get("temperature", 1.0),
    )


def weighted_logprobs(logprobs, entropy, arrays):
    """The objective of the parity tests: any weights on log-probabilities and entropies."""
    loss = (arrays["on_logprobs"] * logprobs + arrays["on_entropy"] * entropy).sum()
    return loss, {"loss": loss.detach()}


def my_share(mesh: Mesh, items: list) -> list[int]:
    return list(range(mesh.replica, len(items), mesh.replicas))


def parity(
    mesh: Mesh,
    folder: Path,
    actor: dict[str, Any],
    trajectories: list[Trajectory],
    arrays: dict[str, list[np.ndarray]],
    temperature: float,
) -> dict[str, Any]:
    """Scores by trajectory index, and the gradient under Hugging Face names (on the sender)."""
    # the plain optimizer leaves the whole gradient on every rank
    policy = open_policy(mesh, folder, {**actor, "distributed_optimizer": False}, temperature=temperature)
    mine = my_share(mesh, trajectories)
    scores = policy.score([trajectories[i] for i in mine])
    batch = MiniBatch(
        [trajectories[i] for i in mine], {name: [values[i] for i in mine] for name, values in arrays.items()}
    )
    sums = policy.backward(batch, weighted_logprobs)
    gradient = whole_gradient(policy)
    found = {i: (lp, en) for i, lp, en in zip(mine, scores.logprobs, scores.entropy, strict=False)}
    return {"scores": found if mesh.is_head else {}, "gradient": gradient, "sums": sums}


def whole_gradient(policy: Policy) -> dict[str, torch.Tensor]:
    """The gradient under Hugging Face names (on the sender). The policy's weights are as before."""
    parameters = [p for chunk in policy.chunks for p in unwrap_model(chunk).parameters()]
    kept = [p.data.clone() for p in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    gradient = {name: t.clone() for name, t in policy.live_weights().tensors() if t is not None}
    for parameter, weights in zip(parameters, kept, strict=True):
        parameter.data.copy_(weights)
    return gradient


def updates(
    mesh: Mesh,
    folder: Path,
    actor: dict[str, Any],
    trajectories: list[Trajectory],
    arrays: dict[str, list[np.ndarray]],
    count: int,
) -> dict[str, torch.Tensor]:
    """The weights after `count` updates on the same mini-batch (on the sender)."""
    policy = open_policy(mesh, folder, actor)
    mine = my_share(mesh, trajectories)
    batch = MiniBatch(
        [trajectories[i] for i in mine], {name: [values[i] for i in mine] for name, values in arrays.items()}
    )
    for _ in range(count):
        policy.begin_step()
        policy.update(batch, weighted_logprobs)
    return {name: t.clone() for name, t in policy.live_weights().tensors() if t is not None}
