"""What the ranks do in the tests of layer logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_meds.actor.mesh import Mesh
from megatron_meds.trajectory import Trajectory
from tests.distributed.bodies_parity import open_policy


def layer_logits(
    mesh: Mesh,
    folder: Path,
    trajectories: list[Trajectory],
    tokens: list[int | None],
    shares: list[list[int]],
    variants: list[tuple[str, str]],
) -> list[dict[str, Any]]:
    """Per (batching, final_norm): the indexes this replica scored and their layer logits on this rank.

    Raises:
        AssertionError: the pass with the tap gave other log-probabilities than the pass without.
    """
    found = []
    policy = open_policy(mesh, folder, {"tokens_per_micro_batch": 24})
    mine = shares[mesh.replica] if mesh.replica < len(shares) else []
    for batching, final_norm in variants:
        policy.settings = policy.settings.model_copy(update={"batching": batching})
        scores = policy.score([trajectories[i] for i in mine], [tokens[i] for i in mine], final_norm)  # type: ignore[arg-type]
        found.append({"rows": mine, "table": scores.layer_logits})
    plain = policy.score([trajectories[i] for i in mine])  # after the last pass: no hook is left
    assert plain.layer_logits is None
    assert all(np.array_equal(a, b) for a, b in zip(plain.logprobs, scores.logprobs, strict=True))
    return found
