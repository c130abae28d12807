"""Ranks that somebody else started: what torchrun or srun say about this process, and being such a rank.

Imports torch only for the work itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from megatron_meds.checks import Job
    from megatron_meds.config import Settings


@dataclass(frozen=True)
class Rank:
    """This process among those of the run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def adopt(environ: MutableMapping[str, str] = os.environ) -> Rank | None:
    """The rank an outer torchrun or srun gave this process; None where `train` has to start the ranks.

    Under srun with several tasks the variables that torch reads (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) are set from Slurm's; MASTER_ADDR and MASTER_PORT that
    are set already stay. A single task is a place to start ranks from, not a rank.
    """
    if "RANK" not in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        _from_slurm(environ)
    if "RANK" not in environ:
        return None
    world_size = int(environ["WORLD_SIZE"])
    return Rank(
        rank=int(environ["RANK"]),
        world_size=world_size,
        local_rank=int(environ["LOCAL_RANK"]),
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", world_size)),
    )


def be_rank(
    outer: Rank,
    read: Callable[[], Settings],
    task: Sequence[str] = ("train",),
    check: Callable[[Settings, Job], None] | None = None,
) -> None:
    """Do the task as a rank that somebody else started. One rank of each node tells faults, others
    keep still.

    Args:
        check: refuses settings that cannot work; None: as for training.
    """
    from megatron_meds import checks
    from megatron_meds.cli.rank import perform
    from megatron_meds.cli.torchrun import set_threads
    from megatron_meds.errors import UserError

    set_threads(outer.local_world_size)
    speaks = outer.local_rank == 0
    try:
        settings = read()
        (check or checks.check)(
            settings, checks.Job(outer.world_size, outer.local_world_size, launcher=speaks)
        )
    except UserError:
        if speaks:
            raise
        raise typer.Exit(2) from None
    perform(settings, task[0], task[1:])


def _from_slurm(environ: MutableMapping[str, str]) -> None:
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", environ["SLURM_STEP_NUM_TASKS"]))
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["WORLD_SIZE"] = environ["SLURM_STEP_NUM_TASKS"]
    environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    environ["LOCAL_WORLD_SIZE"] = str(tasks[int(environ.get("SLURM_NODEID", "0"))])
    one_node = len(tasks) == 1
    environ.setdefault("MASTER_ADDR", "127.0.0.1" if one_node else first_host(environ["SLURM_STEP_NODELIST"]))
    # Steps of one job may run side by side: each gets a port of its own.
    step = int(environ["SLURM_JOB_ID"]) * 16 + int(environ.get("SLURM_STEP_ID", "0"))
    environ.setdefault("MASTER_PORT", str(20000 + step % 20000))


def _tasks_per_node(text: str) -> list[int]:
    """`4(x2),1` is [4, 4, 1]."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def first_host(nodes: str) -> str:
    """First host of a Slurm list: `gpu[03-05,9],login1` is `gpu03`."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    assert match is not None, "the pattern matches the empty string"
    return "".join(part or "" for part in match.groups())
