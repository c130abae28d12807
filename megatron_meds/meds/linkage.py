"""HDBSCAN for min_cluster_size 2 and min_samples 1, many small sets at a time. Knows numbers only.

With min_samples 1 the mutual reachability of two rows is their distance, and with min_cluster_size 2
only single rows ever leave a cluster, so that the whole algorithm is: minimum spanning tree (`trees`),
its edges sorted, a condensed tree, excess of mass. Labels equal those of scikit-learn's HDBSCAN one by
one, ties and copies included: edges are sorted by numpy's default sort as there, and the sums that
excess of mass compares are added in the same order. tests/meds/test_linkage.py holds it to that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_meds.meds.trees import Tree, grown, spanning_trees

NOISE = -1
GROWN_ROWS = 256
"""From here on a tree is kept and grown; smaller sets are quicker built anew, many side by side."""


def hdbscan_labels(sets: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Cluster labels of each set of rows, by themselves.

    Args:
        sets: arrays [n, d] fp64 of finite rows, any n; Euclidean distance.

    Returns:
        Per set [n] int32: -1 noise, else 0, 1, ... as `sklearn.cluster.HDBSCAN(min_cluster_size=2,
        min_samples=1)` numbers them. Fewer than two rows are noise.
    """
    return hdbscan_grown(sets, [None] * len(sets))[0]


def hdbscan_grown(
    sets: Sequence[np.ndarray], before: Sequence[Tree | None]
) -> tuple[list[np.ndarray], list[Tree | None]]:
    """As `hdbscan_labels`, for sets that grew since they were clustered before.

    Args:
        before: the tree of each set's first rows, as it was returned then; None: unknown.

    Returns:
        Labels, and each set's tree to go on from; None below GROWN_ROWS, and where equal
        lengths would leave a choice.
    """
    trees = [grown(rows, tree) if tree is not None else None for rows, tree in zip(sets, before, strict=True)]
    missing = [
        i for i, (rows, tree) in enumerate(zip(sets, trees, strict=True)) if tree is None and len(rows) > 1
    ]
    for index, tree in zip(missing, spanning_trees([sets[i] for i in missing]), strict=True):
        trees[index] = tree
    labels = [
        np.full(len(rows), NOISE, dtype=np.int32) if tree is None else _labels_of_tree(*tree)
        for rows, tree in zip(sets, trees, strict=True)
    ]
    kept = (
        tree is not None and len(rows) >= GROWN_ROWS and tree.is_unique
        for rows, tree in zip(sets, trees, strict=True)
    )
    return labels, [tree if keep else None for tree, keep in zip(trees, kept, strict=True)]


def _labels_of_tree(sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[n] int32 labels from the n - 1 edges of a spanning tree."""
    n = len(lengths) + 1
    left, right, heights, sizes = _single_linkage(sources, targets, lengths)
    parents, stability, children, births_in = _condense(n, left, right, heights, sizes)
    chosen = _excess_of_mass(stability, children)
    names = {cluster: name for name, cluster in enumerate(sorted(chosen))}
    home = [NOISE] * len(stability)  # per cluster: the label of its nearest chosen ancestor or itself
    for cluster, parent in enumerate(births_in):
        home[cluster] = names.get(cluster, home[parent] if cluster else NOISE)
    return np.array([home[cluster] for cluster in parents], dtype=np.int32)


def _single_linkage(
    sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray
) -> tuple[list[int], list[int], list[float], list[int]]:
    """Merge along the sorted edges: node n + i joins left[i] and right[i] at heights[i]."""
    n = len(lengths) + 1
    order = np.argsort(lengths)  # not stable, on purpose: scikit-learn's order of equal edges
    up = list(range(2 * n - 1))
    size = [1] * n
    left, right = [], []
    for node, (a, b) in enumerate(zip(sources[order].tolist(), targets[order].tolist(), strict=True), n):
        while up[a] != a:
            up[a] = up[up[a]]
            a = up[a]
        while up[b] != b:
            up[b] = up[up[b]]
            b = up[b]
        up[a] = up[b] = node
        left.append(a)
        right.append(b)
        size.append(size[a] + size[b])
    return left, right, lengths[order].tolist(), size


def _condense(
    n: int, left: list[int], right: list[int], heights: list[float], size: list[int]
) -> tuple[list[int], list[float], list[list[int]], list[int]]:
    """The condensed tree, breadth first from the root, cluster 0.

    Returns:
        Per row the cluster it leaves last; per cluster its stability sum of (lambda - birth) x rows,
        the clusters it splits into, and the cluster it was born in.
    """
    leaves_from = [0] * n
    stability, birth, children, born_in = [0.0], [0.0], [[]], [0]
    level = [(2 * n - 2, 0)]  # (node, the cluster it belongs to)
    while level:
        below: list[tuple[int, int]] = []
        for node, cluster in level:
            a, b, height = left[node - n], right[node - n], heights[node - n]
            density = 1.0 / height if height > 0.0 else np.inf
            gain = density - birth[cluster]
            if a >= n and b >= n:
                for child in (a, b):
                    stability[cluster] += gain * size[child]
                    children[cluster].append(len(stability))
                    below.append((child, len(stability)))
                    stability.append(0.0)
                    birth.append(density)
                    children.append([])
                    born_in.append(cluster)
                continue
            for child in (a, b):
                if child >= n:
                    below.append((child, cluster))
                else:
                    stability[cluster] += gain
                    leaves_from[child] = cluster
        level = below
    return leaves_from, stability, children, born_in


def _excess_of_mass(stability: list[float], children: list[list[int]]) -> set[int]:
    """Clusters that outlive the sum of what they split into; the root is never one."""
    best = list(stability)
    kept = [True] * len(stability)
    for cluster in range(len(stability) - 1, 0, -1):
        below = sum((best[child] for child in children[cluster]), 0.0)
        if below > best[cluster]:  # false for NaN (copies split at infinite density), as in scikit-learn
            best[cluster], kept[cluster] = below, False
    chosen: set[int] = set()
    waiting = list(children[0])
    while waiting:
        cluster = waiting.pop()
        if kept[cluster]:
            chosen.add(cluster)
        else:
            waiting += children[cluster]
    return chosen
