"""What the memory holds, to be looked at: prompts by their largest cluster, the clusters of one prompt.

Plain data from what is remembered; `page` makes HTML of it. Knows no files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_meds.meds.linkage import NOISE
from megatron_meds.meds.memory import Key, Remembered


@dataclass(frozen=True)
class Cluster:
    """Remembered rows of one label."""

    label: int
    rows: np.ndarray
    """Numbers of its rows, the newest first."""
    answers: list[tuple[str, int]]
    """Different answers and how often each was given, the commonest first."""
    first_step: int
    last_step: int

    @property
    def name(self) -> str:
        return "noise" if self.label == NOISE else f"cluster {self.label}"

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class PromptView:
    """One prompt's remembered answers, right or wrong."""

    key: Key
    remembered: Remembered
    clusters: list[Cluster]
    """The largest first, noise last."""

    @property
    def prompt_id(self) -> str:
        return self.key[0]

    @property
    def largest(self) -> int:
        """Rows of the largest cluster, noise left out."""
        return max((len(c) for c in self.clusters if c.label != NOISE), default=0)

    @property
    def noise(self) -> int:
        """Rows in no cluster."""
        return sum(len(c) for c in self.clusters if c.label == NOISE)


def view(key: Key, remembered: Remembered) -> PromptView:
    """The clusters of one prompt."""
    clusters = []
    for label in np.unique(remembered.labels).tolist():
        rows = np.flatnonzero(remembered.labels == label)[::-1]
        answers = Counter(remembered.notes[i].answer for i in rows.tolist())
        steps = remembered.steps[rows]
        clusters.append(Cluster(label, rows, answers.most_common(), int(steps.min()), int(steps.max())))
    clusters.sort(key=lambda c: (c.label == NOISE, -len(c), c.label))
    return PromptView(key, remembered, clusters)


def views(rows: Iterable[tuple[Key, Remembered]], correct: bool = False) -> list[PromptView]:
    """All prompts whose right or wrong answers are remembered, those with the largest clusters first."""
    found = [view(key, one) for key, one in rows if key[1] == correct and len(one)]
    return sorted(found, key=lambda v: (-v.largest, -len(v.remembered), v.prompt_id))


def layers_of(prompt: PromptView) -> tuple[np.ndarray, str]:
    """[m, L] what the heat map shows, and its name: layer logits where they were kept, else features."""
    layers = prompt.remembered.layers.astype(np.float32)
    if layers.shape[1] and not np.isnan(layers).all():
        return layers, "layer logits"
    return prompt.remembered.features, "features"
