"""MEDS within a run: the answers' tokens before the score pass, their penalties after it, the memory's files.

Joins `meds`, which knows no ranks, to the mesh: heads look for answers and keep the memory, the other
ranks are told which tokens the score pass is to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from megatron_meds.actor.mesh import Mesh
from megatron_meds.agreement import together
from megatron_meds.meds import AnswerToken, Meds, load_memory, save_memory
from megatron_meds.meds.positions import NoFeature
from megatron_meds.meds.settings import MedsSettings
from megatron_meds.meds.state import FOLDER
from megatron_meds.metrics import Sums
from megatron_meds.tokens import Decode
from megatron_meds.trajectory import RewardLedger, Trajectory


class Mistakes:
    """The memory of mistakes of a run, spread over the heads."""

    def __init__(self, settings: MedsSettings, mesh: Mesh, decode: Decode, stack: ExitStack) -> None:
        """Start with an empty memory; `stack` ends its worker processes.

        Args:
            decode: ids to text, as the trajectories' own text is made.
        """
        self._mesh = mesh
        self._decode = decode
        self._answers: list[AnswerToken | NoFeature | None] = []
        self._meds: Meds | None = None
        if mesh.is_head:
            self._meds = Meds(settings, mesh.replica, mesh.replicas, mesh.exchange_heads)
            stack.callback(self._meds.close)

    def answer_tokens(self, trajectories: Sequence[Trajectory]) -> list[int | None]:
        """[n] number of the response token that begins each answer, for `Policy.score`; None where there
        is none or none is wanted. A collective of the replica."""
        if self._meds is not None:
            self._answers = self._meds.answer_tokens(trajectories, self._decode)
        tokens = [a.index if isinstance(a, AnswerToken) else None for a in self._answers]
        return self._mesh.broadcast_in_replica(tokens)

    def shape(
        self, ledger: RewardLedger, trajectories: Sequence[Trajectory], step: int, metrics: Sums
    ) -> None:
        """Visit the memory, enter the penalties, add to the step's metrics. A collective of the heads.

        Args:
            trajectories: those of the last `answer_tokens`, with their layer logits.
        """
        assert self._meds is not None  # heads only
        rows = [t.layer_logits for t in trajectories if t.layer_logits is not None]  # scored before: all
        table = np.stack(rows) if rows else np.empty((0, 1), dtype=np.float32)
        report = self._meds.shape(ledger, trajectories, self._answers, table, step)
        metrics.add(Sums(report.means, report.maxima, report.totals))

    def save(self, checkpoint: Path) -> None:
        """Write this head's share below a checkpoint's folder; other ranks have none."""
        if self._meds is not None:
            save_memory(self._meds.memory, checkpoint / FOLDER, self._mesh.replica, self._mesh.replicas)

    def load(self, checkpoint: Path) -> bool:
        """Take the memory of a checkpoint, whatever the number of replicas that wrote it. Collective.

        Returns:
            Whether the checkpoint holds one; a run without MEDS leaves none.

        Raises:
            RankError: a file cannot be read.
        """
        folder = checkpoint / FOLDER
        present = self._mesh.all_gather(folder.is_dir())[0]

        def read() -> None:
            if self._meds is not None and present:
                load_memory(self._meds.memory, folder, self._mesh.replica, self._mesh.replicas)

        together(read, "the memory of mistakes was not loaded", self._mesh.all_gather)
        return present
