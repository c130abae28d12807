"""Trajectory files: RUN/trajectories/step_000012.parquet, one row per response, readable by anything.

Columns: what was asked and answered (text and ids), the verdict, the reward by source
(`reward/NAME`, `reward/total`), the weight version, and where steps were measured their places,
accuracies and rewards (`step_...`). A file is complete or absent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_meds.trajectory import RewardLedger, Trajectory

Rows = list[dict[str, Any]]

_NAME = re.compile(r"step_(\d+)\.parquet")


def sample_rows(trajectories: Sequence[Trajectory], ledger: RewardLedger, limit: int) -> Rows:
    """Plain rows of at most `limit` trajectories: whole groups, evenly spread over the prompts (part of
    one group where even that is longer). Can be sent between processes."""
    totals = {source: ledger.totals(source) for source in ledger.sources}
    whole = ledger.totals()
    rows = []
    for index in thin(trajectories, limit):
        t = trajectories[index]
        row = {
            "prompt_id": t.prompt.id,
            "question": t.prompt.question,
            "answer": t.prompt.answer,
            "source": t.prompt.source,
            "sample": t.sample,
            "text": t.text,
            "correct": t.correct,
            "verdict": t.verdict,
            "finish_reason": t.finish_reason,
            "weight_version": t.weight_version,
            "prompt_tokens": len(t.prompt.token_ids),
            "response_tokens": len(t),
            "prompt_ids": list(t.prompt.token_ids),
            "response_ids": list(t.response_ids),
        }
        if t.steps is not None:
            row |= {
                "step_offsets": t.steps.offsets,
                "step_bounds": t.steps.bounds,
                "step_accuracies": t.steps.accuracies,
                "step_rewards": t.steps.rewards,
                "step_weight_version": t.steps.weight_version,
            }
        row |= {f"reward/{source}": float(values[index]) for source, values in totals.items()}
        rows.append(row | {"reward/total": float(whole[index])})
    return rows


def thin(trajectories: Sequence[Trajectory], limit: int) -> list[int]:
    """Indexes of at most `limit` trajectories, in order: whole groups, evenly spread."""
    groups: dict[str, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.prompt.id, []).append(index)
    chosen = list(groups.values())
    if len(trajectories) > limit:
        keep = max(1, len(chosen) * limit // len(trajectories))
        chosen = [chosen[i * len(chosen) // keep] for i in range(keep)]
        while len(chosen) > 1 and sum(map(len, chosen)) > limit:  # groups of unlike sizes
            chosen.pop()
    return sorted(index for group in chosen for index in group)[:limit]


def write_samples(folder: Path, step: int, rows: Rows) -> Path:
    """Write a step's rows; returns the file."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([{"step": step, **row} for row in rows], schema=_schema(rows))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step_{step:06d}.parquet"
    unfinished = folder / f".{file.name}.{os.getpid()}"
    pyarrow.parquet.write_table(table, unfinished)
    unfinished.replace(file)
    return file


def drop_samples(folder: Path, after_step: int | None) -> None:
    """Remove the files of steps after this one (None: of all), and unfinished ones."""
    for file in folder.glob("step_*.parquet"):
        match = _NAME.fullmatch(file.name)
        if match and (after_step is None or int(match[1]) > after_step):
            file.unlink()
    for file in folder.glob(".step_*.parquet.*"):
        file.unlink()


def _schema(rows: Rows) -> Any:
    import pyarrow

    ids = pyarrow.list_(pyarrow.int32())
    columns = {
        "step": pyarrow.int64(),
        "prompt_id": pyarrow.string(),
        "question": pyarrow.string(),
        "answer": pyarrow.string(),
        "source": pyarrow.string(),
        "sample": pyarrow.int32(),
        "text": pyarrow.string(),
        "correct": pyarrow.bool_(),
        "verdict": pyarrow.string(),
        "finish_reason": pyarrow.string(),
        "weight_version": pyarrow.int64(),
        "prompt_tokens": pyarrow.int32(),
        "response_tokens": pyarrow.int32(),
        "prompt_ids": ids,
        "response_ids": ids,
    }
    numbers = pyarrow.list_(pyarrow.float64())
    of_steps = {
        "step_offsets": ids,
        "step_bounds": ids,
        "step_accuracies": numbers,
        "step_rewards": numbers,
        "step_weight_version": pyarrow.int64(),
    }
    if any("step_offsets" in row for row in rows):
        columns |= of_steps
    rewards = dict.fromkeys(name for row in rows for name in row if name.startswith("reward/"))
    rewards.pop("reward/total", None)
    names = [*columns.items(), *((name, pyarrow.float64()) for name in (*rewards, "reward/total"))]
    return pyarrow.schema(names)
