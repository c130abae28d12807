"""Where the numbers of a step go: metrics.jsonl, TensorBoard, Weights & Biases.

A sink takes (step, numbers by name) and knows nothing of what they mean. Going on after step k drops
what was written about later steps, so that no step is told twice.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """A place for the numbers of a step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: an object per line with `step` first, on disk when `write` returns.

    Numbers that are not finite are written as null, which JSON has, not as NaN, which it has not.
    """

    def __init__(self, file: Path, resume_step: int | None) -> None:
        """
        Args:
            resume_step: keep the lines up to this step; None: a new run, keep none.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_step is None else _lines_until(file, resume_step)
        fresh = file.with_name(file.name + ".new")
        fresh.write_text("".join(kept))
        fresh.replace(file)
        self._file = file.open("a")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        """
        Args:
            resume_step: TensorBoard hides what earlier files say about later steps; None: all of it.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=0 if resume_step is None else resume_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run on Weights & Biases, which a resumed run goes on with."""

    def __init__(
        self, project: str, name: str, folder: Path, config: Mapping[str, Any], resume_step: int | None
    ) -> None:
        import wandb

        remembered = folder / "wandb_id"
        go_on = resume_step is not None and remembered.is_file()
        self._run = wandb.init(
            project=project,
            name=name,
            dir=str(folder),
            config=dict(config),
            id=remembered.read_text().strip() if go_on else None,
            resume="allow" if go_on else None,
        )
        remembered.write_text(self._run.id + "\n")
        # Their own step counter cannot go back after a resume; ours is the axis instead.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


def require_wandb(project: str) -> None:
    """Raises ModuleNotFoundError where Weights & Biases is asked for and not installed."""
    if importlib.util.find_spec("wandb") is None:
        raise ModuleNotFoundError(
            f"tracking.wandb_project = {project}: wandb is not installed; "
            "`pip install wandb`, or set it to null",
            name="wandb",
        )


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl; a last line that a crash cut short is left out."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in _whole_lines(file)]


def _whole_lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _lines_until(file: Path, step: int) -> list[str]:
    if not file.is_file():
        return []
    return [line for line in _whole_lines(file) if json.loads(line)["step"] <= step]
