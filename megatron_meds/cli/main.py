"""The `megatron-meds` command: names its commands and turns errors of ours into short messages.

Commands import what they need when they run, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from megatron_meds import __version__
from megatron_meds.cli.check_sync import check_sync
from megatron_meds.cli.convert import convert
from megatron_meds.cli.data import data
from megatron_meds.cli.doctor import doctor
from megatron_meds.cli.evaluate import evaluate
from megatron_meds.cli.memory import memory
from megatron_meds.cli.plan import plan
from megatron_meds.cli.train import train
from megatron_meds.errors import UserError

app = typer.Typer(
    name="megatron-meds",
    help="Reinforcement-learning post-training of reasoning models on Megatron-Core and vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command()(evaluate)
app.command()(convert)
app.command()(check_sync)
app.command()(doctor)
app.command()(plan)
app.add_typer(data, name="data")
app.add_typer(memory, name="memory")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megatron-meds {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Console script. What the user can mend ends with exit code 2 and a line each, without a traceback."""
    try:
        app()
    except UserError as error:
        for fault in error.faults:
            print(f"error: {fault}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
