"""What ranks do in the tests of a policy's saved state."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_meds.actor.learning import MiniBatch
from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.policy import Policy
from megatron_meds.actor.settings import ActorSettings, ModelSettings, OptimizerSettings
from megatron_meds.actor.state import load_state, save_state
from megatron_meds.agreement import RankError
from megatron_meds.checkpoint import Checkpoints
from megatron_meds.trajectory import Prompt, Trajectory
from tests.tiny import VOCABULARY


def make_policy(mesh: Mesh, model: Path, optimizer: dict[str, Any] | None = None, **actor: Any) -> Policy:
    settings = ActorSettings(
        layout=mesh.layout,
        device="cpu",
        tokens_per_micro_batch=64,
        precision=actor.pop("precision", "fp32"),
        **actor,
    )
    chosen = {"lr": 1e-2, "warmup_steps": 2, "schedule": "cosine", "weight_decay": 0.1} | (optimizer or {})
    return Policy(
        ModelSettings(path=model, attention="sdpa"),
        settings,
        OptimizerSettings(**chosen),
        mesh,
        steps=20,
        seed=3,
    )


def trajectories(seed: int, count: int = 8) -> list[Trajectory]:
    """The same on every rank: prompts and responses of random ids and lengths."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(count):
        prompt, response = (
            random.integers(2, VOCABULARY, size=random.integers(2, 9)).tolist() for _ in range(2)
        )
        made.append(
            Trajectory(
                prompt=Prompt(id=f"{seed}-{index}", question="", token_ids=tuple(prompt), answer=""),
                sample=0,
                response_ids=response,
                text="",
                rollout_logprobs=[0.0] * len(response),
                finish_reason="stop",
                weight_version=0,
            )
        )
    return made


def mine(mesh: Mesh, all_of_them: list[Trajectory]) -> list[Trajectory]:
    return all_of_them[mesh.replica :: mesh.replicas]


def train(policy: Policy, steps: range) -> None:
    """Two updates a step towards the likelihood of that step's trajectories."""
    for step in steps:
        policy.begin_step()
        for half in range(2):
            batch = trajectories(seed=2 * step + half)
            tokens = sum(len(t) for t in batch)
            own = mine(policy.mesh, batch)
            weights = [np.full(len(t), 1.0 / tokens, dtype=np.float32) for t in own]
            policy.update(MiniBatch(own, {"weights": weights}), likelihood)


def likelihood(logprobs, entropy, arrays):
    return -(logprobs * arrays["weights"]).sum(), {}


def weights_of(policy: Policy) -> dict[str, torch.Tensor] | None:
    """The whole model under Hugging Face names, on the sender."""
    tensors = dict(policy.live_weights().tensors())
    return {name: tensor.cpu().clone() for name, tensor in tensors.items()} if policy.mesh.is_sender else None


def everything(policy: Policy) -> dict[str, torch.Tensor]:
    """All tensors of this rank that training changes: parameters, master weights, moments, steps."""
    found = {}
    for index, chunk in enumerate(policy.bare):
        found |= {f"{index}.{name}": p.detach().clone() for name, p in chunk.named_parameters()}
    number = 0
    for group in policy.optimizer.param_groups:
        for parameter in group["params"]:
            found[f"main.{number}"] = parameter.detach().clone()
            state = policy.optimizer.optimizer.state[parameter]
            found |= {f"{key}.{number}": torch.as_tensor(value).clone() for key, value in state.items()}
            number += 1
    return found


def scores_of(policy: Policy) -> list[np.ndarray] | None:
    """Log-probabilities of fixed trajectories; every replica scores all of them."""
    scores = policy.score(trajectories(seed=99))
    return scores.logprobs if policy.mesh.is_first_head else None


def differing(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> list[str]:
    if here.keys() != there.keys():
        return sorted(here.keys() ^ there.keys())
    return [key for key in here if not torch.equal(here[key], there[key])]


def train_and_save(mesh: Mesh, model: Path, folder: Path, steps: int = 2, **actor: Any) -> dict[str, Any]:
    """Train, save, and go on for a step."""
    policy = make_policy(mesh, model, **actor)
    train(policy, range(steps))
    save_state(policy, folder)
    saved = {"weights": weights_of(policy), "scores": scores_of(policy)}
    train(policy, range(steps, steps + 1))
    return saved | {"later": weights_of(policy)}


def load_and_go_on(
    mesh: Mesh, model: Path, folder: Path, again: Path, steps: int = 2, **actor: Any
) -> dict[str, Any]:
    """Load in whatever layout this is, save at once, and go on for a step."""
    policy = make_policy(mesh, model, **actor)
    load_state(policy, folder)
    save_state(policy, again)
    loaded = {"weights": weights_of(policy), "scores": scores_of(policy)}
    train(policy, range(steps, steps + 1))
    return loaded | {"later": weights_of(policy)}


def resume_bit_by_bit(
    mesh: Mesh, model: Path, folder: Path, before: int = 2, after: int = 2, **actor: Any
) -> list[str]:
    """What differs between training straight on and saving, loading into a new policy, going on."""
    straight = make_policy(mesh, model, **actor)
    train(straight, range(before + after))
    first = make_policy(mesh, model, **actor)
    train(first, range(before))
    save_state(first, folder)
    second = make_policy(mesh, model, **actor)
    load_state(second, folder)
    at_resume = differing(everything(second), everything(first))
    train(second, range(before, before + after))
    rates = [group["lr"] for policy in (straight, second) for group in policy.optimizer.param_groups]
    return (
        [f"at the resume: {name}" for name in at_resume]
        + differing(everything(second), everything(straight))
        + ([] if len(set(rates)) == 1 else [f"learning rates {rates}"])
    )


def resume_with_other_settings(mesh: Mesh, model: Path, folder: Path) -> dict[str, Any]:
    """Save at one learning rate and weight decay, load at others; what holds then."""
    first = make_policy(mesh, model)
    train(first, range(3))
    save_state(first, folder)
    changed = {"lr": 5e-3, "weight_decay": 0.2, "schedule": "constant", "beta1": 0.8}
    second = make_policy(mesh, model, changed)
    load_state(second, folder)
    second.begin_step()
    groups = second.optimizer.param_groups
    return {
        "lr": {group["lr"] for group in groups},
        "weight_decay": {group["weight_decay"] for group in groups},
        "beta1": {group["betas"][0] for group in groups},
        "schedule_steps": second.schedule.num_steps,
    }


def load_what_does_not_fit(mesh: Mesh, model: Path, folder: Path, **actor: Any) -> str:
    policy = make_policy(mesh, model, **actor)
    try:
        load_state(policy, folder)
    except RankError as error:
        return str(error)
    return "loaded"


def fill_the_disk(mesh: Mesh, model: Path, run: Path, failing: int, limit: int) -> dict[str, Any]:
    """The second of three saves cannot write a file beyond `limit` bytes on one rank."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    policy = make_policy(mesh, model)
    checkpoints = Checkpoints(
        run, keep_last=1, rank=mesh.rank, is_writer=mesh.is_first_head, all_gather=mesh.all_gather
    )
    told = []
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (1, 2, 3):
        full = step == 2 and mesh.rank == failing
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit if full else hard, hard))
        try:
            checkpoints.save(step, lambda folder: save_state(policy, folder), {"at": step})
        except RankError as error:
            told.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        found = checkpoints.find("auto")
        told.append(found.name if found else None)
        if found:
            load_state(policy, found)
    return {"told": told}


def save_a_run(mesh: Mesh, model: Path, run: Path, live: Path, **actor: Any) -> None:
    """A checkpoint of a run, and the same weights straight from the live policy."""
    policy = make_policy(mesh, model, **actor)
    train(policy, range(1))
    checkpoints = Checkpoints(run, rank=mesh.rank, is_writer=mesh.is_first_head, all_gather=mesh.all_gather)
    checkpoints.save(1, lambda folder: save_state(policy, folder), {})
    policy.save_huggingface(live)
