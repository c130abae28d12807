"""What ranks do in the tests of whole objectives and of the frozen reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_meds.actor.learning import MiniBatch
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.reference import Reference
from megatron_meds.actor.settings import ModelSettings
from megatron_meds.actor.state import load_state, save_state
from megatron_meds.algorithms import resolve
from megatron_meds.algorithms.objective import policy_objective, token_arrays, weigh
from megatron_meds.algorithms.settings import AlgorithmSettings
from megatron_meds.trajectory import Trajectory
from tests.distributed.bodies_parity import my_share, open_policy, whole_gradient
from tests.distributed.bodies_state import make_policy, train


def gradients(
    mesh: Mesh,
    folder: Path,
    actor: dict[str, Any],
    trajectories: list[Trajectory],
    advantages: list[np.ndarray],
    counted: list[int],
    cases: dict[str, dict[str, Any]],
    longest: int,
) -> dict[str, dict[str, torch.Tensor]]:
    """The gradient of every case's objective under Hugging Face names (on the sender)."""
    policy = open_policy(mesh, folder, {**actor, "distributed_optimizer": False})
    mine = my_share(mesh, trajectories)
    found = {}
    for case, settings in cases.items():
        algorithm = resolve(AlgorithmSettings(**settings))
        weights = weigh(
            [counted[i] for i in mine],
            algorithm.aggregation,
            longest,
            lambda own: sum(mesh.all_gather(own if mesh.is_head else 0.0)),
        )
        own = [trajectories[i] for i in mine]
        arrays = token_arrays(algorithm, own, [advantages[i] for i in mine], weights)
        policy.backward(MiniBatch(own, arrays), policy_objective(algorithm))
        found[case] = whole_gradient(policy)
    return found


def reference_through_a_resume(
    mesh: Mesh, model: Path, other: Path, folder: Path, trajectories: list[Trajectory]
) -> dict[str, dict[int, np.ndarray]]:
    """Log-probabilities by trajectory (on heads): of the reference before the policy learns, after, and
    in a run that goes on from the checkpoint; of that run's policy; of a reference of its own folder."""
    mine = my_share(mesh, trajectories)

    def scores_of(scorer) -> dict[int, np.ndarray]:
        found = scorer.score([trajectories[i] for i in mine]).logprobs
        return dict(zip(mine, found, strict=True)) if mesh.is_head else {}

    def refer(**options: Any) -> Reference:
        return Reference(ModelSettings(path=model, attention="sdpa", **options), policy.settings, mesh)

    policy = make_policy(mesh, model)
    reference = refer(offload_reference=True)
    found = {"before": scores_of(reference)}
    train(policy, range(2))
    found["after"] = scores_of(reference)
    save_state(policy, folder)
    resumed, again = make_policy(mesh, model), refer()
    load_state(resumed, folder)
    return found | {
        "resumed": scores_of(again),
        "policy": scores_of(resumed),
        "other": scores_of(refer(reference=other)),
        "trained": {0: np.array([p.requires_grad for chunk in again.chunks for p in chunk.parameters()])},
    }
