"""`megatron-meds train`: read and check the settings, then run the ranks, or be one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    from megatron_meds.cli.outer import adopt, be_rank
    from megatron_meds.cli.torchrun import run_ranks
    from megatron_meds.config import load

    outer = adopt()
    if outer is not None and not dry_run:
        be_rank(outer, lambda: load(config, overrides or []))
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
