"""The heads of a real mesh share one memory over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_meds.meds import Meds, load_memory, save_memory
from megatron_meds.meds.settings import MedsSettings
from megatron_meds.trajectory import RewardLedger
from tests.meds.samples import LAYERS, decode, step_samples


def penalties(mesh: Any, folder: str, first: int, last: int, lone: bool = False) -> dict[tuple, float] | None:
    """Steps `first` to `last` on the heads: load what `folder` holds, play, save. (step, question, sample)
    -> penalty, of this replica's groups; with `lone` the last replica samples everything. None elsewhere."""
    if not mesh.is_head:
        return None
    meds = Meds(MedsSettings(enabled=True, workers=1), mesh.replica, mesh.replicas, mesh.exchange_heads)
    if Path(folder).exists():
        load_memory(meds.memory, Path(folder), mesh.replica, mesh.replicas)
    found = {}
    for step in range(first, last):
        home = [mesh.replicas - 1 if lone else (i // 8 + step) % mesh.replicas for i in range(96)]
        mine = [s for s, replica in zip(step_samples(step), home, strict=True) if replica == mesh.replica]
        trajectories = [t for t, _ in mine]
        ledger = RewardLedger(trajectories)
        logits = np.array([row for _, row in mine]).reshape(-1, LAYERS)
        meds.shape(ledger, trajectories, meds.answer_tokens(trajectories, decode), logits, step)
        for i, _, value in ledger.entries("meds"):
            found[step, trajectories[i].prompt.question, trajectories[i].sample] = value
    mesh.gather_heads(None)  # all have read before anyone writes
    save_memory(meds.memory, Path(folder), mesh.replica, mesh.replicas)
    return found
