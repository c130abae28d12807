"""Minimum spanning trees of sets of rows: many at a time, and of a set that grew. Knows numbers only.

Distances come from scikit-learn, Prim's algorithm starts at row 0 and takes the first of equals, as
scikit-learn's HDBSCAN does, so that what is made of a tree does not differ from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, minimum_spanning_tree
from sklearn.metrics import DistanceMetric

_CHUNK_BYTES = 16 * 2**20
"""Distances held at once, unless a single set needs more."""
_ALONE_ROWS = 256
"""From here on a set is quicker by itself than beside others."""


class Tree(NamedTuple):
    """The n - 1 edges of a spanning tree of n rows, away from row 0."""

    sources: np.ndarray
    """[n - 1] int32: row the edge comes from, nearer to row 0."""
    targets: np.ndarray
    """[n - 1] int32: row it leads to."""
    lengths: np.ndarray
    """[n - 1] fp64."""

    @property
    def is_unique(self) -> bool:
        """Whether no two edges are equally long and none has length 0: the clusters then follow from
        the distances alone."""
        ordered = np.sort(self.lengths)
        return bool(ordered.size and ordered[0] > 0.0 and (ordered[1:] > ordered[:-1]).all())


def spanning_trees(sets: Sequence[np.ndarray]) -> list[Tree]:
    """Of each set by Prim's algorithm from row 0; the first of equally near rows goes first.

    Args:
        sets: arrays [n, d] fp64, n >= 2; Euclidean distance.
    """
    found: dict[int, Tree] = {}
    order = sorted(range(len(sets)), key=lambda i: len(sets[i]))
    while order:
        largest = len(sets[order[-1]])
        count = max(1, _CHUNK_BYTES // (8 * largest * largest)) if largest < _ALONE_ROWS else 1
        chunk, order = order[-count:], order[:-count]
        tables = [pairwise_distances(sets[i]) for i in chunk]
        if len(chunk) == 1 and np.isfinite(tables[0]).all():
            found[chunk[0]] = _prim(tables[0])
            continue
        distances = np.full((len(chunk), largest, largest), np.inf)
        for place, table in enumerate(tables):
            distances[place, : len(table), : len(table)] = table
        edges = _prim_side_by_side(distances)
        for place, index in enumerate(chunk):
            found[index] = Tree(*(part[place, : len(sets[index]) - 1] for part in edges))
    return [
        Tree(t.sources.astype(np.int32), t.targets.astype(np.int32), t.lengths)
        for t in (found[i] for i in range(len(sets)))
    ]


def grown(rows: np.ndarray, tree: Tree) -> Tree | None:
    """The tree of rows of which the first ones had `tree`: an edge between old rows that is not in it
    cannot enter, so that the new rows' distances are all there is to look at.

    Args:
        rows: [n, d] fp64, at least those of `tree`, whose lengths are unique.

    Returns:
        The tree; None where two of the lengths in question are equal, or not positive and finite:
        ask `spanning_trees`.
    """
    n, k = len(rows), len(tree.lengths) + 1
    if n == k:
        return tree
    new = pairwise_distances(rows[k:], rows)
    first, second = np.triu_indices(n - k, 1)
    lengths = np.concatenate([tree.lengths, new[:, :k].ravel(), new[first, second + k]])
    ordered = np.sort(lengths)
    if not (ordered[0] > 0.0 and np.isfinite(ordered[-1]) and (ordered[1:] > ordered[:-1]).all()):
        return None
    starts = np.concatenate([tree.sources, np.repeat(np.arange(k, n), k), first + k])
    ends = np.concatenate([tree.targets, np.tile(np.arange(k), n - k), second + k])
    edges = minimum_spanning_tree(csr_array((lengths, (starts, ends)), shape=(n, n))).tocoo()
    parents = breadth_first_order(edges, 0, directed=False)[1]
    away = parents[edges.col] == edges.row
    sources, targets = np.where(away, edges.row, edges.col), np.where(away, edges.col, edges.row)
    return Tree(sources.astype(np.int32), targets.astype(np.int32), edges.data)


def pairwise_distances(rows: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    """[n, m] Euclidean distances of [n, d] and [m, d] (None: of the rows among themselves), by the very
    loop that scikit-learn's HDBSCAN runs."""
    sides = [np.ascontiguousarray(s, dtype=np.float64) for s in (rows, others) if s is not None]
    return DistanceMetric.get_metric("euclidean").pairwise(*sides)


def _prim(distances: np.ndarray) -> Tree:
    """Of one table [n, n] of finite distances."""
    n = len(distances)
    nearest, blocked = np.full(n, np.inf), np.zeros(n)
    source = np.zeros(n, dtype=np.intp)
    closer, free = np.empty(n, dtype=bool), np.empty(n)
    sources, targets, lengths = np.empty(n - 1, np.intp), np.empty(n - 1, np.intp), np.empty(n - 1)
    here = 0
    for step in range(n - 1):
        blocked[here] = np.inf
        row = distances[here]
        np.less(row, nearest, out=closer)
        np.copyto(source, here, where=closer)
        np.minimum(row, nearest, out=nearest)
        np.maximum(nearest, blocked, out=free)
        here = int(free.argmin())
        sources[step], targets[step], lengths[step] = source[here], here, free[here]
    return Tree(sources, targets, lengths)


def _prim_side_by_side(distances: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of P tables of distances.

    Args:
        distances: [P, n, n] fp64, symmetric; a set with fewer rows is filled up with inf behind.

    Returns:
        Edges [P, n - 1] in the order in which they were found: from (int), to (int), length. Those of
        a set of m rows are the first m - 1.
    """
    P, n, _ = distances.shape
    every = np.arange(P)
    nearest = np.full((P, n), np.inf)
    source = np.zeros((P, n), dtype=np.intp)
    reached = np.zeros((P, n), dtype=bool)
    closer = np.empty((P, n), dtype=bool)
    sources, targets = np.empty((P, n - 1), dtype=np.intp), np.empty((P, n - 1), dtype=np.intp)
    lengths = np.empty((P, n - 1))
    here = np.zeros(P, dtype=np.intp)
    for step in range(n - 1):
        reached[every, here] = True
        nearest[every, here] = np.inf
        row = distances[every, here]
        np.less(row, nearest, out=closer)
        closer[reached] = False
        np.copyto(nearest, row, where=closer)
        np.copyto(source, here[:, None], where=closer)
        here = nearest.argmin(axis=1)
        sources[:, step] = source[every, here]
        targets[:, step] = here
        lengths[:, step] = nearest[every, here]
    return sources, targets, lengths
