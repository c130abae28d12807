"""The memory spread over data-parallel replicas: every prompt has one owner.

The rows of a step go to their owners, the owners visit their memories, the sizes come back. How things
travel is the caller's: a function from one payload per replica to one payload from each. Everybody
sends something to everybody, if only no rows, so that no one waits in vain.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_meds.meds.diagnostics import EigenSums
from megatron_meds.meds.memory import Key, MistakeMemory, Note, Visit

Exchange = Callable[[Sequence[Any]], list[Any]]
"""outgoing[r] goes to replica r; returns what each replica sent here, by replica. A collective."""


def owner(prompt_id: str, replicas: int) -> int:
    """The replica that remembers a prompt: sha256(prompt id) mod replicas."""
    return int.from_bytes(hashlib.sha256(prompt_id.encode()).digest(), "big") % replicas


def alone(outgoing: Sequence[Any]) -> list[Any]:
    """The exchange of a single replica."""
    return list(outgoing)


@dataclass
class Rows:
    """Rows of features with what belongs to each, as columns; any mix of prompts."""

    prompt_ids: list[str]
    correct: np.ndarray
    """[n] bool"""
    samples: np.ndarray
    """[n] int: number within the group."""
    features: np.ndarray
    """[n, d] fp32"""
    layers: np.ndarray
    """[n, L] fp32; [n, 0]: not kept."""
    notes: list[Note]
    questions: list[str]

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def take(self, places: Sequence[int]) -> Rows:
        """These rows, in this order."""
        index = np.asarray(places, dtype=np.intp)
        return Rows(
            prompt_ids=[self.prompt_ids[i] for i in places],
            correct=self.correct[index],
            samples=self.samples[index],
            features=self.features[index],
            layers=self.layers[index],
            notes=[self.notes[i] for i in places],
            questions=[self.questions[i] for i in places],
        )

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """All rows, part after part.

        Raises:
            ValueError: parts disagree on the number of features or layers.
        """
        filled = [part for part in parts if len(part)] or list(parts[:1])
        for name, widths in (
            ("features", {part.features.shape[1] for part in filled}),
            ("layers", {part.layers.shape[1] for part in filled}),
        ):
            if len(widths) > 1:
                raise ValueError(f"replicas brought rows of {sorted(widths)} {name}: one model, one setting")
        return cls(
            prompt_ids=[i for part in filled for i in part.prompt_ids],
            correct=np.concatenate([part.correct for part in filled]),
            samples=np.concatenate([part.samples for part in filled]),
            features=np.concatenate([part.features for part in filled]),
            layers=np.concatenate([part.layers for part in filled]),
            notes=[n for part in filled for n in part.notes],
            questions=[q for part in filled for q in part.questions],
        )


@dataclass
class ShardReport:
    """What one owner did in a step."""

    exchange_seconds: float = 0.0
    """Both ways, waiting for others included."""
    assign_seconds: float = 0.0
    cluster_seconds: float = 0.0
    rows_arrived: int = 0
    dropped: int = 0
    """Rows that were not finite."""
    cluster_sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Of all clusters of the prompts visited, noise left out."""
    noise_rows: int = 0
    visited_rows: int = 0
    """Rows remembered of the prompts visited."""
    visited_prompts: int = 0


class ShardedMemory:
    """One replica's share of the memory, and its way to the others'."""

    def __init__(
        self, memory: MistakeMemory, replica: int = 0, replicas: int = 1, exchange: Exchange = alone
    ) -> None:
        """
        Args:
            memory: of the prompts this replica owns.
            exchange: needed with more than one replica, such as `Mesh.exchange_heads`.
        """
        if not 0 <= replica < replicas:
            raise ValueError(f"replica {replica} of {replicas}")
        self.memory = memory
        self.replica, self.replicas = replica, replicas
        self._exchange = exchange
        self.report = ShardReport()
        self._visited: list[Key] = []

    def visit(self, rows: Rows, step: int = 0) -> np.ndarray:
        """Sizes of the clusters that this replica's rows fall in. A collective of all replicas.

        The rows of one prompt are visited together, ordered by sample number and then by feature,
        wherever they came from: the sizes do not depend on the number of replicas.

        Returns:
            [n] int64, in the order of `rows`; `report` says what it took.
        """
        started = time.perf_counter()
        homes = np.array([owner(prompt, self.replicas) for prompt in rows.prompt_ids], dtype=np.intp)
        places = [np.flatnonzero(homes == replica).tolist() for replica in range(self.replicas)]
        parts = self._exchange([rows.take(part) for part in places])
        arrived = Rows.join(parts)
        travelled = time.perf_counter()
        before = self.memory.dropped
        sizes = self._visit_own(arrived, step)
        answered = time.perf_counter()
        ends = np.cumsum([len(part) for part in parts])
        answers = self._exchange(np.split(sizes, ends[:-1]))
        found = np.zeros(len(rows), dtype=np.int64)
        for part, answer in zip(places, answers, strict=True):
            found[part] = answer
        self.report = self._describe(arrived)
        self.report.exchange_seconds = travelled - started + time.perf_counter() - answered
        self.report.dropped = self.memory.dropped - before
        return found

    def eigen_sums(self) -> EigenSums:
        """Of the wrong answers remembered of the prompts of the last visit: the top-1 eigen ratio, to be
        merged over replicas."""
        wrong = [key for key in self._visited if not key[1]]
        return EigenSums.of([self.memory[key].features for key in wrong])

    def _visit_own(self, arrived: Rows, step: int) -> np.ndarray:
        """[rows that arrived] sizes, each prompt's rows in one visit."""
        members: dict[Key, list[int]] = {}
        for index, key in enumerate(zip(arrived.prompt_ids, arrived.correct.tolist(), strict=True)):
            members.setdefault(key, []).append(index)
        for places in members.values():
            places.sort(key=lambda i: (int(arrived.samples[i]), arrived.features[i].tobytes()))
        visits = [
            Visit(
                prompt_id=prompt,
                features=arrived.features[places],
                correct=correct,
                samples=arrived.samples[places],
                notes=[arrived.notes[i] for i in places],
                layers=arrived.layers[places],
                question=arrived.questions[places[0]],
            )
            for (prompt, correct), places in members.items()
        ]
        sizes = np.zeros(len(arrived), dtype=np.int64)
        for places, found in zip(members.values(), self.memory.visit_many(visits, step), strict=True):
            sizes[places] = found
        self._visited = [key for key in members if key in self.memory]
        return sizes

    def _describe(self, arrived: Rows) -> ShardReport:
        report = ShardReport(
            assign_seconds=self.memory.timing.assign,
            cluster_seconds=self.memory.timing.cluster,
            rows_arrived=len(arrived),
            visited_prompts=len(self._visited),
        )
        sizes = []
        for key in self._visited:
            counts = np.bincount(self.memory[key].labels + 1)
            report.noise_rows += int(counts[0])
            report.visited_rows += int(counts.sum())
            sizes.append(counts[1:])
        if sizes:
            report.cluster_sizes = np.concatenate(sizes)
        return report
