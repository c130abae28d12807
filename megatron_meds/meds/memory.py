"""What is remembered of the answers to a prompt: features, clusters and a little text.

One visit brings all rows of a step for a prompt: they are assigned to the clusters of earlier visits,
the sizes of these are the answer, and only then are the rows remembered and everything clustered anew.
Knows features and labels; knows neither rewards nor where the rows come from.

Letters: n new rows, m remembered rows, d features, L layers. Source: MEDS, arXiv 2604.11297.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple, get_args

import numpy as np

from megatron_meds.meds.clustering import Backend, is_tight, normalise
from megatron_meds.meds.linkage import NOISE
from megatron_meds.meds.trees import Tree
from megatron_meds.meds.workers import ClusterWorkers

Noise = Literal["cluster", "free", "single"]
Clusters = Literal["hdbscan", "single"]
Key = tuple[str, bool]
"""(prompt id, whether the answers are correct): right and wrong answers are remembered apart."""


class Note(NamedTuple):
    """What is kept of a response besides its feature, to be looked at; short by the caller's choice."""

    answer: str = ""
    response: str = ""


@dataclass
class Visit:
    """All rows of a step for one prompt, right or wrong ones."""

    prompt_id: str
    features: np.ndarray
    """[n, d]"""
    correct: bool = False
    samples: Sequence[int] | np.ndarray | None = None
    """[n] numbers within the group; None: 0 to n - 1."""
    notes: Sequence[Note] | None = None
    layers: np.ndarray | None = None
    """[n, L] layer logits the features were made of, for the heat map; None: not kept."""
    question: str = ""
    """Kept to be looked at."""

    @property
    def key(self) -> Key:
        return self.prompt_id, self.correct


@dataclass
class Remembered:
    """The rows of one prompt, the oldest first."""

    features: np.ndarray
    """[m, d] fp32."""
    labels: np.ndarray
    """[m] int32: the cluster of each row; -1 noise."""
    steps: np.ndarray
    """[m] int64: the step a row was seen in."""
    samples: np.ndarray
    """[m] int32."""
    notes: list[Note]
    layers: np.ndarray
    """[m, L] fp16; [m, 0] where they are not kept, NaN in rows of a time when they were not."""
    question: str = ""
    tree: Tree | None = None
    """Spanning tree that the labels came from, to go on from at the next visit; not saved."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def bytes(self) -> int:
        """Of the arrays and the characters of the texts."""
        arrays = (self.features, self.labels, self.steps, self.samples, self.layers, *(self.tree or ()))
        return sum(array.nbytes for array in arrays) + sum(map(len, chain.from_iterable(self.notes)))


@dataclass
class Timing:
    """Seconds the last call of `visit_many` spent."""

    assign: float = 0.0
    cluster: float = 0.0


@dataclass
class MistakeMemory:
    """Remembers rows by prompt and says how often a new row's mistake was made before."""

    noise: Noise = "cluster"
    """What the label -1 means: `cluster`: one like any other (as released); `free`: no mistake, size 0;
    `single`: as `free`, but where all rows of a prompt are noise and lie within `single_radius`, they are
    one cluster."""
    neighbours: int = 3
    """Remembered rows that vote on a new one."""
    max_per_prompt: int | None = None
    """Rows kept per prompt, the newest; None: all."""
    backend: Backend = "auto"
    """See `clustering.cluster_many`."""
    clusters: Clusters = "hdbscan"
    """`single`: all rows of a prompt are one cluster (an ablation of the paper)."""
    count_current: bool = False
    """Also count the other rows of the visit that share a new row's cluster after it."""
    single_radius: float = 0.01
    """Cosine distance from the mean direction."""
    workers: int = 1
    """Processes that cluster, this one included."""
    dropped: int = field(default=0, init=False)
    """Rows refused so far because they were not finite."""
    timing: Timing = field(default_factory=Timing, init=False, repr=False)
    rows: int = field(default=0, init=False)
    """Rows remembered, of all prompts."""
    bytes: int = field(default=0, init=False)
    """Of all prompts' arrays and texts."""
    _rows: dict[Key, Remembered] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, value, words in (("noise", self.noise, Noise), ("clusters", self.clusters, Clusters)):
            if value not in get_args(words):
                raise ValueError(f"{name} {value!r} is none of {', '.join(get_args(words))}")
        if self.neighbours < 1 or (self.max_per_prompt is not None and self.max_per_prompt < 1):
            raise ValueError("neighbours and max_per_prompt must be 1 or more")
        self._workers = ClusterWorkers(self.backend, self.workers)

    def close(self) -> None:
        """End the worker processes, if there are any."""
        self._workers.close()

    def visit(self, prompt_id: str, features: np.ndarray, step: int = 0, correct: bool = False) -> np.ndarray:
        """Sizes of the clusters that new rows fall in, counted over earlier visits; then remember them.

        Args:
            prompt_id: any string.
            features: [n, d], n may be 0 (also as an empty list); kept as fp32. A row that is not finite
                is not remembered, has size 0 and is counted in `dropped`.
            step: written beside the rows.
            correct: whether these answers are right; right and wrong ones never meet.

        Returns:
            [n] int64.

        Raises:
            ValueError: features are no matrix, or of another width than the remembered ones.
        """
        return self.visit_many([Visit(prompt_id, features, correct)], step)[0]

    def visit_many(self, visits: Sequence[Visit], step: int = 0) -> list[np.ndarray]:
        """`visit` for all prompts of a step, clustered together; the same sizes as one by one.

        Raises:
            ValueError: as `visit`, or a prompt comes twice.
        """
        keys = [visit.key for visit in visits]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"prompt {twice[0]} comes twice in one step: bring its rows in one visit")
        started = time.perf_counter()
        rows = [self._checked(visit) for visit in visits]
        sizes = [np.zeros(len(new), dtype=np.int64) for new in rows]
        brought = [np.flatnonzero(np.isfinite(new).all(axis=1)) for new in rows]
        for visit, new, size, places in zip(visits, rows, sizes, brought, strict=True):
            self.dropped += len(new) - len(places)
            if len(places):
                size[places] = self._sizes(visit.key, new[places])
                self._append(visit, new, places, step)
        assigned = time.perf_counter()
        self._cluster([key for key, places in zip(keys, brought, strict=True) if len(places)])
        if self.count_current:
            for key, size, places in zip(keys, sizes, brought, strict=True):
                size[places] += self._siblings(key, len(places))
        self.timing = Timing(assigned - started, time.perf_counter() - assigned)
        return sizes

    # --- what is remembered ------------------------------------------------------------------------

    def __len__(self) -> int:
        """Prompts, right and wrong answers counted apart."""
        return len(self._rows)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rows)

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def __getitem__(self, key: Key) -> Remembered:
        """What is remembered of (prompt id, correct); not to be changed."""
        return self._rows[key]

    def restore(self, key: Key, rows: Remembered) -> None:
        """Put back what another memory remembered, labels included."""
        self._put(key, rows)

    def _put(self, key: Key, rows: Remembered) -> None:
        old = self._rows.get(key)
        self.rows += len(rows) - (len(old) if old else 0)
        self.bytes += rows.bytes - (old.bytes if old else 0)
        self._rows[key] = rows

    # --- a visit -----------------------------------------------------------------------------------

    def _checked(self, visit: Visit) -> np.ndarray:
        """[n, d] fp32 rows of a visit; raises before anything is remembered."""
        rows, n = np.asarray(visit.features), len(visit.features)
        if rows.shape == (0,):
            rows = rows.reshape(0, 0)
        if rows.ndim != 2:
            raise ValueError(f"prompt {visit.prompt_id}: features of shape {rows.shape}, not [n, d]")
        beside = {"samples": visit.samples, "notes": visit.notes, "layers": visit.layers}
        for name, values in beside.items():
            if values is not None and len(values) != n:
                raise ValueError(f"prompt {visit.prompt_id}: {n} rows come with {len(values)} {name}")
        known = self._rows.get(visit.key)
        if n and known is not None and rows.shape[1] != known.features.shape[1]:
            raise ValueError(
                f"prompt {visit.prompt_id}: rows of {rows.shape[1]} features, the remembered ones have "
                f"{known.features.shape[1]}: meds.last, meds.difference or the model has changed"
            )
        with np.errstate(over="ignore"):  # beyond fp32 is infinite, and is dropped
            return rows.astype(np.float32)

    def _sizes(self, key: Key, rows: np.ndarray) -> np.ndarray:
        """[n] rows of earlier visits that carry the label each new row is voted into."""
        known = self._rows.get(key)
        if known is None:
            return np.zeros(len(rows), dtype=np.int64)
        labels = vote(rows, known.features, known.labels, self.neighbours)
        counts = np.bincount(known.labels + 1)
        if self.noise != "cluster":
            counts[0] = 0
        return counts[labels + 1]

    def _append(self, visit: Visit, rows: np.ndarray, places: np.ndarray, step: int) -> None:
        """Remember the finite rows, and of all the newest."""
        n = len(rows)
        samples = np.arange(n) if visit.samples is None else np.asarray(visit.samples)
        notes = [Note()] * n if visit.notes is None else visit.notes
        layers = np.empty((n, 0)) if visit.layers is None else np.asarray(visit.layers)
        with np.errstate(over="ignore"):  # these are for the eye only
            layers = layers[places].astype(np.float16)
        new = Remembered(
            features=rows[places],
            labels=np.full(len(places), NOISE, dtype=np.int32),
            steps=np.full(len(places), step, dtype=np.int64),
            samples=samples[places].astype(np.int32),
            notes=[notes[i] for i in places],
            layers=layers,
            question=visit.question,
        )
        self._put(visit.key, _newest(self._rows.get(visit.key), new, self.max_per_prompt))

    def _cluster(self, keys: Sequence[Key]) -> None:
        """Label all rows of these prompts anew."""
        remembered = [self._rows[key] for key in keys]
        if self.clusters == "single":
            for rows in remembered:
                rows.labels = np.zeros(len(rows), dtype=np.int32)
            return
        before = [rows.tree for rows in remembered]
        found, trees = self._workers.cluster([rows.features for rows in remembered], before)
        for rows, labels, tree in zip(remembered, found, trees, strict=True):
            self.bytes -= rows.bytes
            rows.tree = tree
            self.bytes += rows.bytes
            if self.noise == "single" and (labels == NOISE).all():
                labels = np.full_like(labels, 0 if is_tight(rows.features, self.single_radius) else NOISE)
            rows.labels = labels

    def _siblings(self, key: Key, count: int) -> np.ndarray:
        """[count] other rows of this visit in the cluster of each of its rows. Rows that the bound on a
        prompt's rows dropped at once have none."""
        siblings = np.zeros(count, dtype=np.int64)
        if count == 0:
            return siblings
        labels = self._rows[key].labels[-count:]
        counts = np.bincount(labels + 1) - 1
        if self.noise != "cluster":
            counts[0] = 0
        siblings[count - len(labels) :] = counts[labels + 1]
        return siblings


def vote(rows: np.ndarray, known: np.ndarray, labels: np.ndarray, neighbours: int) -> np.ndarray:
    """Label of each new row by the majority of its nearest remembered rows, ties to the smallest label.

    Nearness is the cosine. Of equally near rows the older counts as nearer. The products are added
    feature by feature, so that a cosine depends on its two rows alone and copies tie exactly.

    Args:
        rows: [n, d], known: [m, d] with m >= 1, finite; labels: [m] integers.
        neighbours: how many vote, at most m.

    Returns:
        [n], of the dtype of `labels`.
    """
    new, old = normalise(rows), np.ascontiguousarray(normalise(known).T)
    cosine = np.zeros((len(new), len(known)))
    for feature in range(new.shape[1]):
        cosine += new[:, feature, None] * old[feature]
    every = np.arange(len(new))
    votes = np.empty((len(new), min(neighbours, len(known))), dtype=labels.dtype)
    for place in range(votes.shape[1]):
        nearest = cosine.argmax(axis=1)
        votes[:, place] = labels[nearest]
        cosine[every, nearest] = -np.inf
    votes.sort(axis=1)
    agreeing = (votes[:, :, None] == votes[:, None, :]).sum(axis=2)
    return votes[every, agreeing.argmax(axis=1)]


def _newest(old: Remembered | None, new: Remembered, limit: int | None) -> Remembered:
    """Both, the old ones first, cut down to the last `limit`."""
    start = 0 if limit is None else -limit

    def join(before: np.ndarray, after: np.ndarray) -> np.ndarray:
        return np.concatenate([before, after])[start:].copy()

    if old is None:
        old = Remembered(new.features[:0], new.labels[:0], new.steps[:0], new.samples[:0], [], new.layers[:0])
    width = max(old.layers.shape[1], new.layers.shape[1])
    return Remembered(
        features=join(old.features, new.features),
        labels=join(old.labels, new.labels),
        steps=join(old.steps, new.steps),
        samples=join(old.samples, new.samples),
        notes=[*old.notes, *new.notes][start:],
        layers=join(_widen(old.layers, width), _widen(new.layers, width)),
        question=new.question or old.question,
        tree=old.tree if limit is None or len(old) + len(new) <= limit else None,
    )


def _widen(layers: np.ndarray, width: int) -> np.ndarray:
    """[m, width]: what there is, and NaN where layer logits were not kept."""
    if layers.shape[1] == width:
        return layers
    if layers.shape[1]:
        raise ValueError(f"layer logits of {layers.shape[1]} layers beside some of {width}: another model")
    return np.full((len(layers), width), np.nan, dtype=layers.dtype)
