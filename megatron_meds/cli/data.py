"""`megatron-meds data`: the data sets known by name, and copies of them for where there is no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_meds.errors import UserError


def data(
    names: Annotated[
        list[str] | None, typer.Argument(help="Known sets to read, downloading what is not here.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Local copies, as data.folder.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Where downloads are kept, as data.cache.")] = None,
) -> None:
    """List the data sets known by name; with names, read them and keep copies.

    A copy made here, where there is a network, serves runs on nodes that have none.
    """
    from megatron_meds.data.known import KNOWN, Places

    places = Places(folder, cache)
    unknown = [name for name in names or () if name not in KNOWN]
    if unknown:
        raise UserError(f"{', '.join(unknown)}: no such set; known are {', '.join(KNOWN)}")
    if names:
        _read(names, places)
        return
    for name, known in KNOWN.items():
        where = ", ".join(
            part
            for part in (
                known.hub,
                known.config,
                known.split,
                *(f"{key} in {values}" for key, values in known.where.items()),
            )
            if part
        )
        typer.echo(f"{name:14} {known.problems:>6,} problems   {where}")
    typer.echo(f"copies are kept in {places.kept}")


def _read(names: list[str], places) -> None:
    from megatron_meds.data.datasets import Counts, load_rows, unique_rows
    from megatron_meds.data.settings import DatasetSettings

    whole, every = Counts(), []
    for name in names:
        counts = Counts()
        rows = load_rows(DatasetSettings(name=name), counts, places)
        typer.echo(f"{name}: {len(rows):,} problems ({counts})")
        whole.rows += counts.rows
        every += rows
    if len(names) > 1:
        unique = unique_rows(every, whole)
        typer.echo(f"together {len(unique):,} questions ({whole})")
