"""The one object through which the loop tells what happens: phases, numbers, samples, progress.

Every rank holds one, so that the loop reads the same everywhere; only the writer's writes and shows.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_meds.tracking.samples import Rows, drop_samples, write_samples
from megatron_meds.tracking.settings import TrackingSettings
from megatron_meds.tracking.sinks import JsonLines, Sink, TensorBoard, WeightsAndBiases, require_wandb
from megatron_meds.tracking.view import Nothing, View, make_view


class Tracker:
    """Writes RUN/metrics.jsonl, RUN/tensorboard, RUN/trajectories, Weights & Biases, and the view.

    A context manager; closing it gives the terminal back. Methods may be called on every rank and do
    nothing but keep time where `is_writer` is false.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: TrackingSettings,
        is_writer: bool,
        *,
        total_steps: int | None = None,
        config: Mapping[str, Any] | None = None,
        view: View | None = None,
    ) -> None:
        """
        Args:
            run_dir: the run's folder; its name is the run's.
            total_steps: how many the run will have, for show.
            config: the settings, for Weights & Biases.

        Raises:
            ModuleNotFoundError: a tracker that is configured is not installed.
        """
        self.settings = settings
        self._is_writer = is_writer
        self._folder = run_dir
        self._config = config or {}
        self._seconds: dict[str, float] = {}
        self._since = time.monotonic()
        self._sinks: list[Sink] | None = None
        self._view: View = Nothing()
        if is_writer:
            if settings.wandb_project is not None:
                require_wandb(settings.wandb_project)
            self._view = view or make_view(settings.view, run_dir.name, total_steps)

    def resume(self, step: int) -> None:
        """Go on after `step`: drop what was written about later ones. To be called before the first
        `log`; a run that does not call it is a new one, and drops all that an earlier one left here."""
        if self._is_writer:
            self._open(step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; its seconds are logged as `seconds/NAME` with the next `log`."""
        start = time.monotonic()
        self._view.phase(name)
        try:
            yield
        finally:
            self._view.phase(None)
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    @contextmanager
    def progress(self, total: int, what: str = "trajectories") -> Iterator[None]:
        """Show a bar over `total` while a block runs."""
        with self._view.progress(total, what):
            yield

    def advance(self, count: int = 1, total: int | None = None) -> None:
        """Move the bar on by `count`; `total` corrects how many there will be."""
        self._view.advance(count, total)

    def say(self, text: str) -> None:
        """Show a line, such as a server that was started again."""
        self._view.say(text)

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write the numbers of a step (0: before the first) as one line; returns all that was written.

        Added are the seconds of each phase since the last call, `seconds/step` (all time since then)
        unless given, and memory: `memory/resident_gib` of this process and `memory/gpu_peak_gib` where
        it uses a GPU.
        """
        now = time.monotonic()
        elapsed, self._since = now - self._since, now
        phases = {f"seconds/{name}": value for name, value in self._seconds.items()}
        self._seconds = {}
        if not self._is_writer:
            return dict(metrics)
        found = {"seconds/step": elapsed, **metrics, **phases, **memory()}
        for sink in self._sinks if self._sinks is not None else self._open(None):
            sink.write(step, found)
        self._view.step(step, found)
        return found

    def wants_samples(self, step: int) -> bool:
        """Whether this step's trajectories are to be written (the same on every rank)."""
        every = self.settings.trajectories_every
        return every > 0 and step % every == 0

    def write_samples(self, step: int, rows: Rows) -> None:
        """Write the step's trajectory file from rows of `sample_rows`, those of all heads together."""
        if not self._is_writer:
            return
        if self._sinks is None:
            self._open(None)
        write_samples(self._folder / "trajectories", step, rows[: self.settings.trajectories_per_step])

    def close(self) -> None:
        """Close files and the view; further calls do nothing."""
        self._view.close()
        self._view = Nothing()
        for sink in self._sinks or ():
            sink.close()
        self._sinks = []

    def _open(self, resume_step: int | None) -> list[Sink]:
        """Open the places to write to, from after `resume_step` on (None: afresh)."""
        assert not self._sinks, "resume comes before the first log"
        folder, project = self._folder, self.settings.wandb_project
        drop_samples(folder / "trajectories", resume_step)
        self._sinks = [JsonLines(folder / "metrics.jsonl", resume_step)]
        if self.settings.tensorboard:
            self._sinks.append(TensorBoard(folder / "tensorboard", resume_step))
        if project is not None:
            self._sinks.append(WeightsAndBiases(project, folder.name, folder, self._config, resume_step))
        return self._sinks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def memory() -> dict[str, float]:
    """GiB of memory this process holds now, and the most it ever had allocated on its GPU."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"memory/resident_gib": pages * os.sysconf("SC_PAGE_SIZE") / 2**30}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found["memory/gpu_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found
