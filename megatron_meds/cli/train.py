"""`megatron-meds train`: read and check the settings, then run the ranks, or be one of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatron_meds.cli.outer import Rank


def train(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings on top of it: rollout.samples_per_prompt=16", show_default=False),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, print the layout and the batch arithmetic, stop.")
    ] = False,
) -> None:
    """Train a model: reinforcement learning, or supervised with algorithm.name=sft.

    Starts the ranks on this machine by itself; under torchrun or srun it is one of theirs.
    """
    from megatron_meds.arithmetic import own_world_size
    from megatron_meds.checks import Job, check
    from megatron_meds.cli.dry_run import show
    from megatron_meds.cli.outer import adopt
    from megatron_meds.cli.torchrun import run_ranks
    from megatron_meds.config import load

    outer = adopt()
    if outer is not None and not dry_run:
        _be_rank(outer, config, overrides or [])
        return
    settings = load(config, overrides or [])
    job = (
        Job.own(settings) if outer is None else Job(outer.world_size, outer.local_world_size, launcher=False)
    )
    check(settings, job)
    if not dry_run:
        raise typer.Exit(run_ranks(settings, own_world_size(settings.actor.layout)))
    if outer is None or outer.rank == 0:
        show(settings, job)


def _be_rank(outer: Rank, config: Path, overrides: list[str]) -> None:
    """Train as a rank that somebody else started. One rank of each node tells faults, others keep still."""
    from megatron_meds.checks import Job, check
    from megatron_meds.cli.torchrun import set_threads
    from megatron_meds.config import load
    from megatron_meds.errors import UserError

    set_threads(outer.local_world_size)
    try:
        settings = load(config, overrides)
        check(settings, Job(outer.world_size, outer.local_world_size, launcher=outer.local_rank == 0))
    except UserError:
        if outer.local_rank == 0:
            raise
        raise typer.Exit(2) from None
    from megatron_meds.train import train as run

    run(settings)
