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

    title: str
    format: str
    metrics: tuple[str, ...]
    """Names it goes by; the first that is there is shown."""
    wide: bool = False
    """Only where the terminal has 120 columns or more."""

    def show(self, metrics: Mapping[str, float]) -> str:
        """The formatted value; empty where there is none."""
        value = next((metrics[name] for name in self.metrics if name in metrics), None)
        return "" if value is None else format(value, self.format)


COLUMNS = (
    Column("loss", ".4f", ("update/nll",)),
    Column("accuracy", ".1%", ("accuracy",)),
    Column("reward", ".3f", ("reward/total",)),
    Column("length", ".1f", ("length",)),
    Column("truncated", ".1%", ("truncated",)),
    Column("entropy", ".3f", ("entropy", "update/entropy")),
    Column("KL", ".1e", ("update/kl_old",)),
    Column("penalised", ".1%", ("meds/penalised_share",)),
    Column("KL ref", ".1e", ("reference/kl",), wide=True),
    Column("mismatch", ".1e", ("mismatch/kl",), wide=True),
    Column("clipped", ".2%", ("update/clip_fraction",), wide=True),
    Column("grad norm", ".3f", ("update/grad_norm",)),
    Column("rate", ".1e", ("learning_rate",), wide=True),
    Column("tokens/s", ",.0f", ("tokens_per_second",)),
    Column("seconds", ".1f", ("seconds/step",)),
)
_OF_A_STEP = COLUMNS[:-1]
"""Without these a row would be empty: an evaluation alone is not a step."""
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
        self.say(f"{name}: {steps:,} steps" if steps else name)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def phase(self, name: str | None) -> None:
        """Phases show in the step's line only."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = [f"{column.title} {shown}" for column in COLUMNS if (shown := column.show(metrics))]
        parts += [f"{name} {value:.1%} right" for name, value in evaluations(metrics).items()]
        of = f"/{self._steps}" if self._steps else ""
        phases = phase_seconds(metrics)
        self.say(f"step {step}{of}: " + ", ".join(parts) + (f" ({phases})" if phases else ""))

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
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=2)
        self._live.start()

    def say(self, text: str) -> None:
        """A line above the table."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def phase(self, name: str | None) -> None:
        self._phase = None if name is None else (name, time.monotonic())

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in evaluations(metrics).items():
            self._evaluations.setdefault(name, []).append((step, value))
        if any(column.show(metrics) for column in _OF_A_STEP):
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
        """Move the bar; it grows where more comes than was announced (dynamic sampling)."""
        for task in self._bar.tasks:
            announced = task.total or 0.0 if total is None else total
            self._bar.update(task.id, advance=count, total=max(announced, task.completed + count))

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._phase = None
        self._live.stop()

    def render(self) -> RenderableType:
        """What is on the screen now."""
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
            if (wide or not column.wide) and any(column.show(row) for _, row in self._rows)
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

    def say(self, text: str) -> None: ...

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
