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
from megatron_meds.tracking.sinks import JsonLines, Sink, TensorBoard, WeightsAndBiases
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
        name: str = "run",
        steps: int | None = None,
        resume_step: int | None = None,
        config: Mapping[str, Any] | None = None,
        view: View | None = None,
    ) -> None:
        """
        Args:
            steps: how many the run will have, for show.
            resume_step: the step after which a run goes on: what was written about later ones is
                dropped. None: a new run; what an earlier one left in `run_dir` is dropped.
            config: the settings, for Weights & Biases.

        Raises:
            ModuleNotFoundError: a tracker that is configured is not installed.
        """
        self.settings = settings
        self._is_writer = is_writer
        self._samples = run_dir / "trajectories"
        self._seconds: dict[str, float] = {}
        self._since = time.monotonic()
        self._sinks: list[Sink] = []
        self._view: View = Nothing()
        if not is_writer:
            return
        self._sinks.append(JsonLines(run_dir / "metrics.jsonl", resume_step))
        drop_samples(self._samples, resume_step)
        if settings.tensorboard:
            self._sinks.append(TensorBoard(run_dir / "tensorboard", resume_step))
        if settings.wandb_project is not None:
            self._sinks.append(
                WeightsAndBiases(settings.wandb_project, name, run_dir, config or {}, resume_step)
            )
        self._view = view or make_view(settings.view, name, steps)

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

    def note(self, text: str) -> None:
        """Show a line, such as a server that was started again."""
        self._view.note(text)

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write the numbers of a step (0: before the first) as one line; returns all that was written.

        Added are `seconds/PHASE` since the last call, `seconds/step` (all time since then),
        `tokens_per_second` where `prompt_tokens` or `response_tokens` are given, and memory:
        `memory/resident_gib` of this process and `memory/gpu_peak_gib` where it uses a GPU.
        """
        now = time.monotonic()
        elapsed, self._since = now - self._since, now
        phases = {f"seconds/{name}": value for name, value in self._seconds.items()}
        self._seconds = {}
        if not self._is_writer:
            return dict(metrics)
        found = {**metrics, **phases, "seconds/step": elapsed, **memory()}
        tokens = metrics.get("prompt_tokens", 0.0) + metrics.get("response_tokens", 0.0)
        if tokens:
            found["tokens_per_second"] = tokens / elapsed
        for sink in self._sinks:
            sink.write(step, found)
        self._view.step(step, found)
        return found

    def wants_samples(self, step: int) -> bool:
        """Whether this step's trajectories are to be written (the same on every rank)."""
        every = self.settings.trajectories_every
        return every > 0 and step % every == 0

    def write_samples(self, step: int, rows: Rows) -> None:
        """Write the step's trajectory file from rows of `sample_rows`, those of all heads together."""
        if self._is_writer:
            write_samples(self._samples, step, rows[: self.settings.trajectories_per_step])

    def close(self) -> None:
        """Close files and the view; further calls do nothing."""
        self._view.close()
        self._view = Nothing()
        for sink in self._sinks:
            sink.close()
        self._sinks = []

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
