"""`megatron-meds data`: sets known by name, copies for where there is no network, and what sets share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_meds.errors import UserError

data = typer.Typer(help="Data sets known by name, copies of them, and what sets share.", no_args_is_help=True)

Folder = Annotated[Path | None, typer.Option(help="Local copies, as data.folder.")]
Cache = Annotated[Path | None, typer.Option(help="Where downloads are kept, as data.cache.")]


@data.command("list")
def list_sets(folder: Folder = None, cache: Cache = None) -> None:
    """List the data sets known by name."""
    from megatron_meds.data.known import KNOWN, Places

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
    typer.echo(f"copies are kept in {Places(folder, cache).kept}")


@data.command()
def get(
    names: Annotated[list[str], typer.Argument(help="Known sets to read, downloading what is not here.")],
    folder: Folder = None,
    cache: Cache = None,
) -> None:
    """Read known sets and keep copies.

    A copy made here, where there is a network, serves runs on nodes that have none.
    """
    from megatron_meds.data.datasets import Counts, load_rows, unique_rows
    from megatron_meds.data.known import KNOWN, Places
    from megatron_meds.data.settings import DatasetSettings

    unknown = [name for name in names if name not in KNOWN]
    if unknown:
        raise UserError(f"{', '.join(unknown)}: no such set; known are {', '.join(KNOWN)}")
    whole, every = Counts(), []
    for name in names:
        counts = Counts()
        rows = load_rows(DatasetSettings(name=name), counts, Places(folder, cache))
        typer.echo(f"{name}: {len(rows):,} problems ({counts})")
        whole.rows += counts.rows
        every += rows
    if len(names) > 1:
        unique = unique_rows(every, whole)
        typer.echo(f"together {len(unique):,} questions ({whole})")


@data.command()
def overlap(
    train: Annotated[str, typer.Argument(help="Known set, .jsonl or .parquet file.", show_default=False)],
    evaluation: Annotated[list[str], typer.Argument(help="Sets that it must not ask.", show_default=False)],
    threshold: Annotated[
        float, typer.Option(help="Similarity from which problems count as near-identical.", min=0.5, max=1.0)
    ] = 0.9,
    drop: Annotated[
        Path | None, typer.Option(help="Write the training set without the problems shown, as JSON lines.")
    ] = None,
    identical: Annotated[
        bool, typer.Option("--identical", help="Only those of the same letters, digits and signs.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Pairs to show.", min=0)] = 20,
    folder: Folder = None,
    cache: Cache = None,
) -> None:
    """Find training problems that an evaluation set asks too, word for word or nearly so.

    Similarity is the cosine of tf-idf weighted character 5-grams. Near-identical problems may be different
    ones (x^2 + 1 against x^2 - 1): look at them before you drop them.
    """
    from rich.console import Console

    from megatron_meds.data.datasets import load_rows
    from megatron_meds.data.known import Places
    from megatron_meds.data.near import find_near, kept_rows

    places = Places(folder, cache)
    training = load_rows(_named(train), places=places)
    console = Console(width=None if Console().is_terminal else 120)
    gone: set[int] = set()
    for name in evaluation:
        rows = load_rows(_named(name), places=places)
        pairs = find_near([r.question for r in training], [r.question for r in rows], threshold)
        pairs = [pair for pair in pairs if pair.identical or not identical]
        gone |= {pair.training for pair in pairs}
        asked = {pair.evaluation for pair in pairs}
        same = {pair.evaluation for pair in pairs if pair.identical}
        console.print(
            f"{name}: {len(asked)} of {len(rows)} problems are in {train}, {len(same)} of them identical",
            highlight=False,
        )
        for pair in sorted(pairs, key=lambda p: (p.identical, -p.similarity))[:limit]:
            console.print(f"  {pair.similarity:.3f}{' identical' if pair.identical else ''}", highlight=False)
            for question in (training[pair.training].question, rows[pair.evaluation].question):
                console.print(f"    {' '.join(question.split())[:200]}", highlight=False, markup=False)
    if drop is not None:
        count = kept_rows(training, gone, drop)
        console.print(f"{drop}: {count:,} of {len(training):,} problems", highlight=False)


def _named(text: str):
    from megatron_meds.data.known import KNOWN, set_of
    from megatron_meds.data.settings import DatasetSettings

    found = DatasetSettings.model_validate(set_of(text))
    if found.path is None and found.name not in KNOWN:
        raise UserError(f"{text}: no such file, and no known set; known are {', '.join(KNOWN)}")
    if found.path is not None and not Path(found.path).exists():
        raise UserError(f"{text}: no such file")
    return found
