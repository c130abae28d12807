"""What ranks do in the tests of the critic: values, gradients, a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_meds.actor.critic import Critic
from megatron_meds.actor.learning import MiniBatch
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.settings import ActorSettings, CriticSettings, ModelSettings
from megatron_meds.actor.state import load_state, save_state
from megatron_meds.agreement import RankError
from megatron_meds.algorithms.objective import value_arrays, value_objective, weigh
from megatron_meds.trajectory import Trajectory
from tests.distributed.bodies_parity import my_share, whole_gradient
from tests.distributed.bodies_state import differing, everything, trajectories, weights_of

OPTIMIZER = {"lr": 1e-2, "warmup_steps": 2, "schedule": "cosine", "weight_decay": 0.1}


def open_critic(mesh: Mesh, folder: Path, actor: dict[str, Any], seed: int = 1, **critic: Any) -> Critic:
    return Critic(
        CriticSettings(**{"optimizer": OPTIMIZER} | critic),
        ModelSettings(path=folder, attention="sdpa"),
        ActorSettings(layout=mesh.layout, device="cpu", **actor),
        mesh,
        steps=20,
        seed=seed,
    )


def set_head(critic: Critic, head: np.ndarray) -> None:
    """Give the value head a weight [H] other than zeros, on the ranks that have it."""
    for chunk in critic.bare:
        if chunk.post_process:
            chunk.output_layer.weight.data.copy_(torch.from_numpy(head)[None])


def value_batch(
    critic: Critic, everyone: list[Trajectory], returns: list[np.ndarray | None], counted: list[int]
) -> MiniBatch:
    """This replica's share, weighed over all of them."""
    mesh, rows = critic.mesh, my_share(critic.mesh, everyone)
    weights = weigh(
        [counted[i] for i in rows],
        "token-mean",
        64,
        lambda own: sum(mesh.all_gather(own if mesh.is_head else 0.0)),
    )
    own = [everyone[i] for i in rows]
    return MiniBatch(own, value_arrays(own, [returns[i] for i in rows], weights))


def parity(
    mesh: Mesh,
    folder: Path,
    actor: dict[str, Any],
    head: np.ndarray,
    everyone: list[Trajectory],
    returns: list[np.ndarray | None],
    counted: list[int],
    clip: float,
) -> dict[str, Any]:
    """Values by trajectory (on heads), the value loss's gradient under Hugging Face names (on the sender),
    its metrics, and the sizes of this rank's parameters."""
    # the plain optimizer leaves the whole gradient on every rank
    critic = open_critic(mesh, folder, {**actor, "distributed_optimizer": False})
    rows = my_share(mesh, everyone)
    at_first = critic.values([everyone[i] for i in rows])
    set_head(critic, head)
    values = critic.values([everyone[i] for i in rows])
    sums = critic.backward(value_batch(critic, everyone, returns, counted), value_objective(clip))
    return {
        "at_first": dict(zip(rows, at_first, strict=True)) if mesh.is_head else {},
        "values": dict(zip(rows, values, strict=True)) if mesh.is_head else {},
        "sums": sums if mesh.is_head else None,
        "gradient": whole_gradient(critic),
        "parameters": {name: tuple(p.shape) for chunk in critic.bare for name, p in chunk.named_parameters()},
    }


def train(critic: Critic, steps: range) -> None:
    """Two updates a step, towards returns of each step's own."""
    for step in steps:
        critic.begin_step()
        for half in range(2):
            batch = trajectories(seed=2 * step + half)
            random = np.random.default_rng(step)
            returns: list[np.ndarray | None] = []
            for t in batch:
                t.values = np.zeros(len(t), dtype=np.float32)
                returns.append(random.normal(size=len(t)).astype(np.float32))
            own = value_batch(critic, batch, returns, [len(t) for t in batch])
            critic.update(own, value_objective(0.5))


def resume_bit_by_bit(
    mesh: Mesh, folder: Path, state: Path, before: int = 2, after: int = 2, **actor: Any
) -> list[str]:
    """What differs between training straight on and saving, loading into a new critic, going on."""
    straight = open_critic(mesh, folder, actor)
    train(straight, range(before + after))
    first = open_critic(mesh, folder, actor)
    train(first, range(before))
    save_state(first, state)
    second = open_critic(mesh, folder, actor, seed=9)
    load_state(second, state)
    at_resume = differing(everything(second), everything(first))
    train(second, range(before, before + after))
    rates = {group["lr"] for critic in (straight, second) for group in critic.optimizer.param_groups}
    return (
        [f"at the resume: {name}" for name in at_resume]
        + differing(everything(second), everything(straight))
        + ([] if len(rates) == 1 else [f"learning rates {rates}"])
    )


def _of(critic: Critic) -> dict[str, Any]:
    """Weights under Hugging Face names, and values of fixed trajectories, of which every replica has all."""
    values = critic.values(trajectories(seed=99))
    return {"weights": weights_of(critic), "values": values if critic.mesh.is_first_head else None}


def train_and_save(mesh: Mesh, folder: Path, state: Path) -> dict[str, Any]:
    """Train for two steps, save, and go on for a step."""
    critic = open_critic(mesh, folder, {})
    train(critic, range(2))
    save_state(critic, state)
    saved = _of(critic)
    train(critic, range(2, 3))
    return {"saved": saved, "later": _of(critic)}


def load_and_go_on(mesh: Mesh, folder: Path, state: Path) -> dict[str, Any]:
    """Load in whatever layout this is, and go on for a step."""
    critic = open_critic(mesh, folder, {})
    load_state(critic, state)
    saved = _of(critic)
    train(critic, range(2, 3))
    return {"saved": saved, "later": _of(critic)}


def load_what_does_not_fit(mesh: Mesh, folder: Path, state: Path) -> str:
    try:
        load_state(open_critic(mesh, folder, {}), state)
    except RankError as error:
        return str(error)
    return "loaded"


def weights_of_state(mesh: Mesh, folder: Path, state: Path, **actor: Any) -> dict[str, torch.Tensor] | None:
    """A saved critic's weights under Hugging Face names."""
    critic = open_critic(mesh, folder, actor)
    load_state(critic, state)
    return weights_of(critic)
