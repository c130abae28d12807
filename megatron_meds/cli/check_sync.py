"""`megatron-meds check-sync`: do the servers hold what the actor holds?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatron_meds.checks import Job
    from megatron_meds.config import Settings


def check_sync(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings on top of it: actor.layout.pipeline=2", show_default=False),
    ] = None,
    rejoin: Annotated[
        bool, typer.Option("--rejoin", help="Also start one server again: it must get the current weights.")
    ] = False,
    outputs: Annotated[
        bool, typer.Option(help="Compare greedy outputs with transformers too (fp32, on CPU).")
    ] = True,
) -> None:
    """Check the way of the weights from the actor to the servers.

    Starts the run's ranks and servers, changes the weights and syncs them, twice, and compares what
    every server then holds, tensor by tensor, with a server started from a fresh export. Works in
    RUN/check_sync and leaves the run alone. A difference is named, and the exit code is not 0.
    """
    from megatron_meds.arithmetic import own_world_size
    from megatron_meds.checks import Job
    from megatron_meds.cli.outer import adopt, be_rank
    from megatron_meds.cli.torchrun import run_ranks
    from megatron_meds.config import load

    task = ["check-sync", *(["rejoin"] if rejoin else []), *([] if outputs else ["no-outputs"])]

    def read() -> Settings:
        return _beside_the_run(load(config, overrides or []))

    def check(settings: Settings, job: Job) -> None:
        _check(settings, job, rejoin)

    outer = adopt()
    if outer is not None:
        be_rank(outer, read, task, check)
        return
    settings = read()
    check(settings, Job.own(settings))
    raise typer.Exit(run_ranks(settings, own_world_size(settings.actor.layout), task=task))


def _beside_the_run(settings: Settings) -> Settings:
    """The run's settings, with a folder of the check's own, which may be there from an earlier one."""
    run = settings.run.model_copy(update={"folder": settings.run.folder / "check_sync", "resume": "auto"})
    return settings.model_copy(update={"run": run})


def _check(settings: Settings, job: Job, rejoin: bool) -> None:
    from megatron_meds.checks import find_faults, find_reference_faults
    from megatron_meds.config import SettingsError

    faults = [*find_faults(settings, job), *find_reference_faults(settings, job, rejoin)]
    if faults:
        raise SettingsError(faults)
