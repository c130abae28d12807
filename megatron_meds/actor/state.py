"""A policy or a critic on disk: weights, optimizer and learning-rate schedule, for any layout to load.

    FOLDER/megatron/       Megatron's distributed checkpoint, fully reshardable
    FOLDER/huggingface/    config.json and tokenizer of the model, so that the folder stands alone
    FOLDER/policy.json     what has to be known before it is loaded; a critic's is critic.json

Saved by one layout (tensor, pipeline, virtual, data-parallel), loaded by another. What is state
comes from disk, what is a setting does not: a learning rate, a schedule or a weight decay that was
changed in the settings holds after a resume. Knows nothing of steps, of checkpoints' names, of
when to save.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import MegatronModule

from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.shape import ModelShape, read_model_config, with_value_head
from megatron_meds.agreement import together
from megatron_meds.errors import UserError
from megatron_meds.weights.files import copy_companions

if TYPE_CHECKING:
    from megatron_meds.actor.learner import Learner

MEGATRON, HUGGINGFACE = "megatron", "huggingface"
PRECISIONS: dict[str, Literal["fp32", "bf16"]] = {"float32": "fp32", "bfloat16": "bf16"}
"""Setting of `actor.precision` by the dtype of the parameters."""
_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,  # replica 0 alone gathers and writes
    "non_homogeneous_layers": True,  # layers under names of their own
}


class StateError(UserError, ValueError):
    """A saved state does not fit what it is to be loaded into; the message says what to change."""


@dataclass(frozen=True)
class Description:
    """What `policy.json`, or `critic.json`, says."""

    optimizer: str
    """`distributed` or `plain`: they keep their state differently."""
    dtype: str
    """Of the parameters, as torch names it: `bfloat16`."""
    schedule_steps: int
    """Steps that the learning-rate schedule has made."""


def save_state(learner: Learner, folder: Path) -> None:
    """Write a policy or a critic into `folder`, which is made if need be. Collective.

    Host memory: replica 0's ranks hold their part of the optimizer's state (12 bytes a parameter)
    once more while they save.

    Raises:
        RankError, OSError: on every rank, when any rank could not write; names it and its reason.
    """
    mesh = learner.mesh
    together(lambda: _write_companions(learner, folder), f"{folder} was not written", mesh.all_gather)
    _fill(learner.optimizer)
    model = _sharded_model(learner.bare)
    optimizer = learner.optimizer.sharded_state_dict(model, metadata=dict(_FORMAT))
    if optimizer.get("param_state", optimizer) is None:  # not on replica 0, which has it for all
        del optimizer["param_state"]
    state = model | {"optimizer": optimizer}
    dist_checkpointing.save(state, str(folder / MEGATRON), _Writer())


def load_state(learner: Learner, folder: Path) -> None:
    """Set a policy or a critic to what `save_state` wrote, under whatever layout that was. Collective.

    Weights, moments and step counts are equal bit by bit, so that at the same layout training goes
    on as if it had not stopped.

    Raises:
        RankError: the folder is damaged, or of another model, precision or kind of optimizer.
    """
    together(lambda: _load(learner, folder), f"{folder} was not loaded", learner.mesh.all_gather)


def load_weights_only(chunks: Sequence[MegatronModule], folder: Path, shape: ModelShape, mesh: Mesh) -> None:
    """Fill bare model chunks, of any layout, with the weights that `save_state` wrote. Collective.

    Load before an optimizer is made of them. Values are converted to the parameters' dtype.

    Raises:
        RankError: the folder is damaged or of another model.
    """

    def load() -> None:
        _check_shape(folder, shape)
        _load_model(chunks, _read(_sharded_model(chunks), folder))

    together(load, f"the weights of {folder} were not loaded", mesh.all_gather)


def read_description(folder: Path, kind: str = "policy") -> Description:
    """What the state in `folder` is of.

    Args:
        kind: `policy` or `critic`.

    Raises:
        StateError: `save_state` did not write this folder.
    """
    path = folder / f"{kind}.json"
    if not path.is_file():
        raise StateError(f"{folder} is not a {kind}'s state: it has no {path.name}")
    return Description(**json.loads(path.read_text()))


# --- saving ----------------------------------------------------------------------------------------


class _Writer(strategies.TorchDistSaveShardedStrategy):
    """Megatron's format, written by each rank itself. Megatron's own writer hands the data to a
    helper process, which outlives a rank that is killed; this one needs none, and torch tells all
    ranks when one of them could not write."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        by_key, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        planner = strategies.MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
        )
        with _ordinary_errors():
            torch_checkpoint.save(
                strategies.mcore_to_pyt_state_dict(by_key, False),
                storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
                planner=planner,
            )


@contextlib.contextmanager
def _ordinary_errors() -> Iterator[None]:
    """torch tells what failed on which rank in no Exception, with every stack: make it one, of a line."""
    try:
        yield
    except torch_checkpoint.CheckpointException as error:
        reasons = [
            f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()
        ]
        raise OSError("; ".join(reasons)) from error


def _write_companions(learner: Learner, folder: Path) -> None:
    """Everything but the tensors, by the rank that writes files."""
    if not learner.mesh.is_first_head:
        return
    (folder / MEGATRON).mkdir(parents=True)
    (folder / HUGGINGFACE).mkdir()
    copy_companions(learner.folder, folder / HUGGINGFACE, None)
    description = json.dumps(asdict(_describe(learner)), indent=2)
    (folder / f"{learner.kind}.json").write_text(description + "\n")


def _describe(learner: Learner) -> Description:
    kinds = {isinstance(optimizer, DistributedOptimizer) for optimizer in _members(learner.optimizer)}
    dtype = next(learner.bare[0].parameters()).dtype
    return Description(
        optimizer="distributed" if kinds == {True} else "plain",
        dtype=str(dtype).removeprefix("torch."),
        schedule_steps=learner.schedule.num_steps,
    )


def _sharded_model(chunks: Sequence[MegatronModule]) -> dict[str, Any]:
    """Every parameter with its place in the whole model, under the names megatron's optimizer looks for."""
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    return {
        name: {
            key: value
            for key, value in chunk.sharded_state_dict(metadata=dict(_FORMAT)).items()
            if not key.endswith("_extra_state")  # of transformer-engine's FP8, which is not used
        }
        for name, chunk in zip(names, chunks, strict=True)
    }


# --- loading ---------------------------------------------------------------------------------------


def _load(learner: Learner, folder: Path) -> None:
    """This rank's part; nothing in it waits for other ranks."""
    saved, here = read_description(folder, learner.kind), _describe(learner)
    _check_shape(folder, learner.shape, learner.origin)
    if saved.optimizer != here.optimizer:
        wanted = str(saved.optimizer == "distributed").lower()
        raise StateError(f"it holds a {saved.optimizer} optimizer: set actor.distributed_optimizer={wanted}")
    if saved.dtype != here.dtype:
        raise StateError(f"it holds {saved.dtype} weights: set actor.precision={PRECISIONS[saved.dtype]}")
    _fill(learner.optimizer)
    model = _sharded_model(learner.bare)
    optimizer = learner.optimizer.sharded_state_dict(model, is_loading=True, metadata=dict(_FORMAT))
    loaded = _read(model | {"optimizer": optimizer}, folder)
    _load_model(learner.bare, loaded)
    _load_optimizer(learner.optimizer, loaded["optimizer"])
    learner.schedule.num_steps = 0
    learner.schedule.step(saved.schedule_steps)


def _read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read the tensors that `state` describes; each rank for itself."""
    with warnings.catch_warnings(), _ordinary_errors():
        # Megatron reads without collectives, and torch guesses that it did not mean to.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="The argument order of load has been changed")
        loaded = dist_checkpointing.load(state, str(folder / MEGATRON), validate_access_integrity=False)
    return cast(dict[str, Any], loaded)


def _load_model(chunks: Sequence[MegatronModule], loaded: dict[str, Any]) -> None:
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    for name, chunk in zip(names, chunks, strict=True):
        keys = chunk.load_state_dict(loaded[name], strict=False)
        absent = [key for key in keys.missing_keys if not key.endswith("_extra_state")]
        if absent or keys.unexpected_keys:
            raise StateError(f"weights are missing: {absent}, or unexpected: {keys.unexpected_keys}")


def _load_optimizer(optimizer: MegatronOptimizer, loaded: dict[Any, Any]) -> None:
    members = _members(optimizer)
    for member, state in zip(members, [loaded] if len(members) == 1 else loaded.values(), strict=True):
        _keep_settings(member, state)
        _add_absent_step(member, state)
    with contextlib.ExitStack() as stack:
        for member in members:
            if isinstance(member, DistributedOptimizer):
                stack.enter_context(_step_left_out(member))
        optimizer.load_state_dict(loaded)
    for member in members:
        _own_steps(member)


def _keep_settings(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Put this run's learning rates, betas, weight decay into the loaded state, in place of the old
    run's; only the step count, where groups have one, is the old run's."""
    inner = _inner_state(state)
    saved, here = inner["param_groups"], optimizer.optimizer.param_groups
    if len(saved) != len(here):
        raise StateError(f"its optimizer has {len(saved)} parameter groups, this one has {len(here)}")
    inner["param_groups"] = [
        {key: value for key, value in group.items() if key != "params"}
        | {key: old[key] for key in ("params", "step") if key in old}
        for group, old in zip(here, saved, strict=True)
    ]


def _check_shape(folder: Path, shape: ModelShape, setting: str = "model.path") -> None:
    stored = read_model_config(folder / HUGGINGFACE)
    saved, here = asdict(with_value_head(stored) if shape.head == "value" else stored), asdict(shape)
    differences = [f"{key} {saved[key]} instead of {here[key]}" for key in here if saved[key] != here[key]]
    if differences:
        raise StateError(f"it is of another model, with {', '.join(differences)}: check {setting}")


# --- megatron's distributed optimizer over torch's AdamW -------------------------------------------
# As it is, it has nothing to load into before its first step, asks for a per-parameter step count
# that the format does not hold, and leaves one count shared by all parameters, so that it counts
# every parameter's update. transformer-engine's and apex's optimizers count steps per group.


def _members(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _fill(optimizer: MegatronOptimizer) -> None:
    """Give an optimizer that has made no step the state it would have: moments and steps of 0."""
    for member in _members(optimizer):
        inner = member.optimizer
        member.init_state_fn(inner, member.config)
        if isinstance(inner, torch.optim.Adam):
            for state in inner.state.values():
                state.setdefault("step", torch.tensor(0.0))


@contextlib.contextmanager
def _step_left_out(optimizer: DistributedOptimizer) -> Iterator[None]:
    """While it loads, the optimizer takes no per-parameter step from the parameter state."""
    take = optimizer._set_main_param_and_optimizer_states
    optimizer._set_main_param_and_optimizer_states = lambda model_param, tensors: take(
        model_param, {"step": None} | tensors
    )
    try:
        yield
    finally:
        del optimizer._set_main_param_and_optimizer_states


def _add_absent_step(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """The plain optimizers store a common step count unless it is 0."""
    if not isinstance(optimizer, DistributedOptimizer) and isinstance(optimizer.optimizer, torch.optim.Adam):
        _inner_state(state)["state"].setdefault("common_step", torch.tensor(0.0))


def _inner_state(state: dict[str, Any]) -> dict[str, Any]:
    """The torch optimizer's state within a megatron optimizer's."""
    return state if "param_groups" in state else state["optimizer"]


def _own_steps(optimizer: MegatronOptimizer) -> None:
    """Every parameter counts its own steps."""
    inner = optimizer.optimizer
    if isinstance(inner, torch.optim.Adam):
        for state in inner.state.values():
            state["step"] = state["step"].clone()
