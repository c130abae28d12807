"""Clusters of a prompt's remembered rows: L2-normalised, HDBSCAN, one of several backends.

min_cluster_size 2, min_samples 1, Euclidean, excess of mass (MEDS, arXiv 2604.11297, as released).
Knows rows and labels; knows neither prompts nor rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, get_args

import numpy as np
from sklearn.cluster import HDBSCAN

from megatron_meds.meds.linkage import NOISE, hdbscan_grown
from megatron_meds.meds.trees import Tree

Backend = Literal["auto", "sklearn", "cuml"]

OWN_ROWS = 2048
"""Up to here `auto` takes `linkage`, which gives scikit-learn's labels in less time."""
GPU_ROWS = 4096
"""From here on `auto` takes cuML, where it is installed."""


def normalise(rows: np.ndarray) -> np.ndarray:
    """[n, d] fp64 rows of length 1; a row of zeros stays one."""
    wide = np.asarray(rows, dtype=np.float64)
    norms = np.sqrt(np.einsum("nd,nd->n", wide, wide))
    return wide / np.where(norms == 0.0, 1.0, norms)[:, None]


def cluster_rows(rows: np.ndarray, backend: Backend = "auto") -> np.ndarray:
    """Labels of one set of rows; see `cluster_many`."""
    return cluster_many([rows], backend)[0]


def cluster_many(sets: Sequence[np.ndarray], backend: Backend = "auto") -> list[np.ndarray]:
    """Cluster labels of each set of rows, by themselves.

    Args:
        sets: arrays [n, d] of finite numbers, any n.
        backend: `sklearn`, `cuml` (needs a GPU), or `auto`: the labels of scikit-learn, got by
            `linkage` for sets of up to OWN_ROWS rows, and cuML from GPU_ROWS rows on where it is
            installed.

    Returns:
        Per set [n] int32, -1 for noise. Fewer than two rows are noise. Labels mean nothing from one
        call to the next.

    Raises:
        ValueError: a row that is not finite, or an unknown backend.
        ModuleNotFoundError: `cuml` is asked for and not installed.
    """
    return cluster_grown(sets, [None] * len(sets), backend)[0]


def cluster_grown(
    sets: Sequence[np.ndarray], before: Sequence[Tree | None], backend: Backend = "auto"
) -> tuple[list[np.ndarray], list[Tree | None]]:
    """`cluster_many` for sets that grew at their end since they were clustered before.

    Args:
        before: per set the tree that it had then, or None.

    Returns:
        Labels, and per set the tree to bring the next time; None where there is none to go on from.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend {backend!r} is none of {', '.join(get_args(Backend))}")
    unit = []
    for number, rows in enumerate(sets):
        if not np.isfinite(rows).all():
            bad = np.flatnonzero(~np.isfinite(rows).all(axis=1)).tolist()
            raise ValueError(f"rows {bad} of set {number} are not finite: drop them before")
        unit.append(normalise(rows))
    has_cuml = backend == "cuml" or (backend == "auto" and find_spec("cuml") is not None)
    labels: list[np.ndarray] = [np.full(len(rows), NOISE, dtype=np.int32) for rows in unit]
    trees: list[Tree | None] = [None] * len(unit)
    own = []
    for index, rows in enumerate(unit):
        if len(rows) < 2:
            continue
        if backend == "auto" and len(rows) <= OWN_ROWS:
            own.append(index)
        elif backend == "cuml" or (has_cuml and len(rows) >= GPU_ROWS):
            labels[index] = _cuml(rows)
        else:
            labels[index] = _sklearn(rows)
    found, grew = hdbscan_grown([unit[i] for i in own], [before[i] for i in own])
    for index, label, tree in zip(own, found, grew, strict=True):
        labels[index], trees[index] = label, tree
    return labels, trees


def is_tight(rows: np.ndarray, radius: float) -> bool:
    """Whether at least two rows all lie within a cosine distance of `radius` from their mean direction."""
    if len(rows) < 2:
        return False
    unit = normalise(rows)
    middle = normalise(unit.sum(axis=0, keepdims=True))[0]
    return bool((unit @ middle).min() >= 1.0 - radius)


def _sklearn(unit: np.ndarray) -> np.ndarray:
    found = HDBSCAN(
        min_cluster_size=2,
        min_samples=1,
        metric="euclidean",
        cluster_selection_method="eom",
        allow_single_cluster=False,
        copy=True,  # type: ignore[arg-type]  # its default is a word that warns
    ).fit_predict(unit)
    return found.astype(np.int32)


def _cuml(unit: np.ndarray) -> np.ndarray:
    from cuml import cluster

    found = cluster.HDBSCAN(
        min_cluster_size=2,
        min_samples=1,
        metric="euclidean",
        cluster_selection_method="eom",
        allow_single_cluster=False,
        output_type="numpy",
    ).fit_predict(unit.astype(np.float32))
    return np.asarray(found, dtype=np.int32)
