"""`megatron-meds memory`: what a run remembers of its prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_meds.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_meds.meds.show import PromptView

memory = typer.Typer(help="Look at what a run remembers.", no_args_is_help=True)

_EXAMPLES = 2


@memory.callback()
def _group() -> None:
    pass  # keeps `show` a command of its own


@memory.command()
def show(
    run: Annotated[Path, typer.Argument(help="Folder of a run, of a checkpoint, or of memory shards.")],
    prompt: Annotated[str | None, typer.Option(help="Prompt id, or how it begins: its clusters.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page with the heat maps.")] = None,
    right: Annotated[bool, typer.Option("--right", help="Right answers instead of wrong ones.")] = False,
    limit: Annotated[int, typer.Option(help="Prompts to show.", min=1)] = 20,
) -> None:
    """Show the prompts with the largest clusters of mistakes, or the clusters of one prompt.

    Reads the memory of the run's newest whole checkpoint.
    """
    from rich.console import Console

    from megatron_meds.meds.show import views
    from megatron_meds.meds.state import read_shard, shard_files

    folder = _memory_folder(run)
    found = views((item for file in shard_files(folder) for item in read_shard(file)), correct=right)
    if prompt is not None:
        found = [view for view in found if view.prompt_id.startswith(prompt)]
    if not found:
        what = "prompt that begins so" if prompt is not None else f"{'right' if right else 'wrong'} answers"
        raise UserError(f"{folder}: no {what} in the memory")
    if prompt is not None and len(found) > 1:
        raise UserError(f"--prompt {prompt}: {len(found)} prompts begin so; give more of the id")
    console = Console(width=None if Console().is_terminal else 120)
    if prompt is not None:
        _print_prompt(console, found[0])
    else:
        _print_prompts(console, found, limit)
    if html is not None:
        _write_page(html, found[:limit], f"Memory of {run.name}")
        console.print(f"{html} written")


def _memory_folder(run: Path) -> Path:
    """Where the shards are: the folder itself, a checkpoint's, or that of the run's newest checkpoint."""
    from megatron_meds.checkpoint import whole_checkpoints
    from megatron_meds.meds.state import FOLDER

    if not run.is_dir():
        raise UserError(f"{run}: no such folder")
    for folder in (run, run / FOLDER):
        if any(folder.glob("shard_*.parquet")):
            return folder
    checkpoints = whole_checkpoints(run / "checkpoints")
    if not checkpoints:
        raise UserError(
            f"{run}: holds no whole checkpoint, and the memory is saved with one (run.save_every)"
        )
    if not (checkpoints[-1] / FOLDER).is_dir():
        raise UserError(f"{checkpoints[-1]}: holds no memory; the run had meds.enabled=false")
    return checkpoints[-1] / FOLDER


def _print_prompts(console: Console, found: list[PromptView], limit: int) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{len(found)} prompts; those with the largest clusters", title_justify="left")
    for name in ("prompt", "question", "commonest in the largest"):
        table.add_column(name, overflow="ellipsis", no_wrap=True, min_width=12 if name == "prompt" else 8)
    for name in ("answers", "clusters", "largest", "noise"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for one in found[:limit]:
        top = one.clusters[0]
        table.add_row(
            one.prompt_id[:12],
            Text(" ".join(one.remembered.question.split())),
            Text(top.answers[0][0] if one.largest else ""),
            str(len(one.remembered)),
            str(sum(c.label >= 0 for c in one.clusters)),
            str(one.largest),
            str(one.noise),
        )
    console.print(table)


def _print_prompt(console: Console, one: PromptView) -> None:
    from rich.rule import Rule
    from rich.text import Text

    console.print(Text(f"{one.prompt_id}\n{one.remembered.question}", style="bold"))
    for cluster in one.clusters:
        steps = f"steps {cluster.first_step} to {cluster.last_step}"
        console.print(Rule(f"{cluster.name}: {len(cluster)} answers, {steps}", align="left"))
        for answer, count in cluster.answers[:5]:
            console.print(Text(f"{count:5d} x  {answer or '(no text kept)'}"))
        for row in cluster.rows[:_EXAMPLES].tolist():
            if text := one.remembered.notes[row].response:
                where = f"step {one.remembered.steps[row]}, sample {one.remembered.samples[row]}"
                console.print(Text(f"\n{where}:", style="dim"))
                console.print(Text(text))


def _write_page(file: Path, found: list[PromptView], title: str) -> None:
    from megatron_meds.meds.page import page

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(found, title), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}") from error
