"""Actor to server and back: sync the weights, sample, score what was sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_meds.actor.mesh import Mesh
from megatron_meds.rollout.client import Client, Request
from megatron_meds.rollout.settings import RolloutSettings
from megatron_meds.trajectory import Prompt, Trajectory
from megatron_meds.weights.settings import WeightsSettings
from megatron_meds.weights.sync import WeightSync
from tests.distributed.bodies_parity import open_policy


def sample_and_score(
    mesh: Mesh, folder: Path, urls: list[str], actor: dict[str, Any], temperature: float, version: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(actor's, server's) log-probabilities of every sampled response, on heads."""
    policy = open_policy(mesh, folder, actor, temperature=temperature)
    sync = WeightSync(WeightsSettings(), urls, policy.live_weights(), mesh, transport="shm")
    sync.connect()
    sync.push(version)
    trajectories: list[Trajectory] = []
    if mesh.is_head:
        settings = RolloutSettings(temperature=temperature, max_tokens=24)
        client = Client(urls, settings, vocabulary=policy.shape.vocab, stop_token_ids=[1])
        client.version = version
        asked = [[3, 1 + i, 4 + mesh.replica, 7] for i in range(3)]
        answers = client.sample([Request(ids, 4, seed=i) for i, ids in enumerate(asked)])
        trajectories = [
            Trajectory(
                Prompt(id=str(ids), question="?", token_ids=tuple(ids), answer="1"),
                k,
                s.token_ids,
                "",
                s.logprobs,
                s.finish_reason,
                s.weight_version,
            )
            for ids, group in zip(asked, answers, strict=True)
            for k, s in enumerate(group)
        ]
    trajectories = mesh.broadcast_in_replica(trajectories)
    scores = policy.score(trajectories)
    sync.close()
    if not mesh.is_head:
        return []
    assert {t.weight_version for t in trajectories} == {version}
    return [
        (own, np.asarray(t.rollout_logprobs)) for own, t in zip(scores.logprobs, trajectories, strict=True)
    ]
