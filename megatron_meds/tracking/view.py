"""What a run shows: a table of its last steps that stays in place, or a line per step.

Knows the names of the metrics it shows; those that a run does not have leave no empty column.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Column:
    """How a metric is shown."""

    metric: str
    title: str
    format: str

    def show(self, metrics: Mapping[str, float]) -> str:
        value = metrics.get(self.metric)
        return "" if value is None else format(value, self.format)


COLUMNS = (
    Column("loss", "loss", ".4f"),
    Column("nll", "nll", ".4f"),
    Column("accuracy", "accuracy", ".1%"),
    Column("reward/total", "reward", ".3f"),
    Column("length", "length", ".1f"),
    Column("truncated", "truncated", ".1%"),
    Column("entropy", "entropy", ".3f"),
    Column("kl_old", "KL", ".1e"),
    Column("mismatch/kl", "mismatch", ".1e"),
    Column("clip_fraction", "clipped", ".1%"),
    Column("grad_norm", "grad norm", ".3f"),
    Column("lr", "lr", ".1e"),
    Column("tokens_per_second", "tokens/s", ",.0f"),
    Column("seconds/step", "seconds", ".1f"),
)
_NARROW = frozenset({"loss", "mismatch/kl", "clip_fraction", "lr"})
"""Left out of the table where the terminal has fewer than 120 columns."""
_MOST_ROWS = 12


def phase_seconds(metrics: Mapping[str, float]) -> str:
    """Seconds by phase, such as `rollout 12.1, update 20.4`."""
    return ", ".join(
        f"{name.removeprefix('seconds/')} {value:.1f}"
        for name, value in metrics.items()
        if name.startswith("seconds/") and name != "seconds/step"
    )


def evaluations(metrics: Mapping[str, float]) -> dict[str, float]:
    """Accuracy by evaluation set, from `evaluation/SET/accuracy`."""
    return {
        name.removeprefix("evaluation/").removesuffix("/accuracy"): value
        for name, value in metrics.items()
        if name.startswith("evaluation/") and name.endswith("/accuracy")
    }


class Lines:
    """A line per step; for logs and pipes."""

    def __init__(self, console: Console, name: str, steps: int | None) -> None:
        self._console, self._steps = console, steps
        self.note(f"{name}: {steps:,} steps" if steps else name)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def phase(self, name: str | None) -> None:
        """Phases show in the step's line only."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = [f"{column.title} {column.show(metrics)}" for column in COLUMNS if column.metric in metrics]
        parts += [f"{name} {value:.1%} right" for name, value in evaluations(metrics).items()]
        of = f"/{self._steps}" if self._steps else ""
        phases = phase_seconds(metrics)
        self.note(f"step {step}{of}: " + ", ".join(parts) + (f" ({phases})" if phases else ""))

    @contextmanager
    def progress(self, total: int, what: str) -> Iterator[None]:
        yield

    def advance(self, count: int, total: int | None = None) -> None:
        """Progress within a phase is not told."""

    def close(self) -> None:
        """Nothing is held."""


class InPlace:
    """The run's state on a terminal: last steps, evaluations, the phase at work and its progress."""

    def __init__(self, console: Console, name: str, steps: int | None) -> None:
        self._console, self._name, self._steps = console, name, steps
        self._rows: deque[tuple[int, dict[str, float]]] = deque(maxlen=_MOST_ROWS)
        self._evaluations: dict[str, list[tuple[int, float]]] = {}
        self._phase: tuple[str, float] | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=2)
        self._live.start()

    def note(self, text: str) -> None:
        """A line above the table."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def phase(self, name: str | None) -> None:
        self._phase = None if name is None else (name, time.monotonic())

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in evaluations(metrics).items():
            self._evaluations.setdefault(name, []).append((step, value))
        if any(column.metric in metrics for column in COLUMNS if not column.metric.startswith("seconds/")):
            self._rows.append((step, dict(metrics)))
        self._live.refresh()

    @contextmanager
    def progress(self, total: int, what: str) -> Iterator[None]:
        """A bar over `total` of `what` while the block runs; `advance` moves it."""
        task = self._bar.add_task(what, total=total)
        try:
            yield
        finally:
            self._bar.remove_task(task)

    def advance(self, count: int, total: int | None = None) -> None:
        for task in self._bar.task_ids:
            self._bar.update(task, advance=count, total=total)

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._phase = None
        self._live.stop()

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._heading()]
        if self._rows:
            parts.append(self._table())
            phases = phase_seconds(self._rows[-1][1])
            parts += [Text(f"last step, seconds: {phases}", style="dim")] if phases else []
        parts += [self._evaluation(name, found) for name, found in self._evaluations.items()]
        if self._phase is not None:
            name, since = self._phase
            parts.append(Text(f"{name} {time.monotonic() - since:.0f} s", style="cyan"))
        if self._bar.task_ids:
            parts.append(self._bar)
        return Group(*parts)

    def _heading(self) -> Text:
        done = self._rows[-1][0] if self._rows else 0
        of = f" of {self._steps:,}" if self._steps else ""
        return Text(f"{self._name}: step {done:,}{of}", style="bold")

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("step", justify="right")
        wide = self._console.width >= 120
        shown = [
            column
            for column in COLUMNS
            if (wide or column.metric not in _NARROW) and any(column.metric in row for _, row in self._rows)
        ]
        for column in shown:
            table.add_column(column.title, justify="right", no_wrap=True)
        fitting = max(1, min(_MOST_ROWS, self._console.height - 8))
        for step, row in list(self._rows)[-fitting:]:
            table.add_row(str(step), *(column.show(row) for column in shown))
        return table

    def _evaluation(self, name: str, found: list[tuple[int, float]]) -> Text:
        first, last = found[0], found[-1]
        text = Text(f"{name}: {first[1]:.1%} right at step {first[0]}", style="green")
        if len(found) > 1:
            text.append(f", {last[1]:.1%} at step {last[0]} ({(last[1] - first[1]) * 100:+.1f} points)")
        return text


class Nothing:
    """Shows nothing: `view: none`, and every rank but the writer."""

    def note(self, text: str) -> None: ...

    def phase(self, name: str | None) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    @contextmanager
    def progress(self, total: int, what: str) -> Iterator[None]:
        yield

    def advance(self, count: int, total: int | None = None) -> None: ...

    def close(self) -> None: ...


View = InPlace | Lines | Nothing


def make_view(kind: str, name: str, steps: int | None, console: Console | None = None) -> View:
    """The view of `tracking.view`; `auto` is in place on a terminal and lines elsewhere."""
    if kind == "none":
        return Nothing()
    console = console or Console()
    if kind == "live" or (kind == "auto" and console.is_terminal):
        return InPlace(console, name, steps)
    return Lines(console, name, steps)
