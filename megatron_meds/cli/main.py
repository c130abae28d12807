"""The `megatron-meds` command: names its commands and turns errors of ours into short messages.

Commands import what they need when they run, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from megatron_meds import __version__
from megatron_meds.cli.doctor import doctor
from megatron_meds.cli.train import train

app = typer.Typer(
    name="megatron-meds",
    help="Reinforcement-learning post-training of reasoning models on Megatron-Core and vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command()(doctor)


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
    """Console script. Faults of the settings end with exit code 2 and a line each, without a traceback."""
    try:
        app()
    except Exception as error:
        from megatron_meds.config import SettingsError

        if not isinstance(error, SettingsError):
            raise
        print_faults(error.faults)
        sys.exit(2)


def print_faults(faults: list[str]) -> None:
    """Faults on standard error, a line each."""
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)


if __name__ == "__main__":
    main()
