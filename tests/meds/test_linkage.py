"""The quick way to cluster small sets gives the labels of scikit-learn's HDBSCAN, one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.cluster import HDBSCAN

from megatron_meds.meds import linkage
from megatron_meds.meds.linkage import hdbscan_grown, hdbscan_labels
from megatron_meds.meds.trees import grown, spanning_trees


def reference(rows: np.ndarray) -> np.ndarray:
    if len(rows) < 2:
        return np.full(len(rows), -1)
    return HDBSCAN(min_cluster_size=2, min_samples=1, copy=True).fit_predict(rows)


@settings(deadline=None, max_examples=60)
@given(arrays(np.float64, st.tuples(st.integers(0, 40), st.integers(1, 4)), elements=st.integers(-2, 2)))
def test_labels_equal_scikit_learns_on_lattices_full_of_ties_and_copies(rows):
    np.testing.assert_array_equal(hdbscan_labels([rows])[0], reference(rows))


KINDS = {
    "scattered": lambda g, n, d: g.normal(size=(n, d)),
    "clusters": lambda g, n, d: g.normal(size=(5, d))[g.integers(0, 5, n)] + 0.05 * g.normal(size=(n, d)),
    "few different rows": lambda g, n, d: g.normal(size=(4, d))[g.integers(0, 4, n)],
    "all rows twice": lambda g, n, d: np.repeat(g.normal(size=(-(-n // 2), d)), 2, axis=0),
    "rounded": lambda g, n, d: np.round(g.normal(size=(n, d)), 1),
    "a regular grid": lambda g, n, d: np.argwhere(np.ones((n // 8 + 1, 8)))[g.permutation(8)].astype(float),
    "equal rows": lambda g, n, d: np.ones((n, d)),
    "a line of equal steps": lambda g, n, d: np.arange(n, dtype=float)[:, None] * np.ones(d),
    "tiny and huge": lambda g, n, d: g.normal(size=(n, d)) * 10.0 ** g.integers(-150, 150, size=(n, 1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_labels_equal_scikit_learns_and_do_not_depend_on_the_other_sets_of_the_batch(kind):
    generator = np.random.default_rng(7)
    shapes = [(n, d) for n in (0, 1, 2, 3, 5, 16, 17, 63, 180, 300) for d in (1, 3, 14)]
    sets = [np.asarray(KINDS[kind](generator, n, d), dtype=np.float64) for n, d in shapes]
    for rows, together in zip(sets, hdbscan_labels(sets), strict=True):
        np.testing.assert_array_equal(together, reference(rows))


def test_a_spanning_tree_has_the_weight_of_scipys():
    from scipy.sparse.csgraph import minimum_spanning_tree
    from scipy.spatial.distance import cdist

    rows = np.random.default_rng(0).normal(size=(50, 3))
    distances = cdist(rows, rows)
    (tree,) = spanning_trees([rows])
    assert tree.lengths.sum() == pytest.approx(minimum_spanning_tree(distances).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_that_grew_has_the_labels_it_would_have_had_at_once(kind, monkeypatch):
    monkeypatch.setattr(linkage, "GROWN_ROWS", 2)
    generator = np.random.default_rng(11)
    rows = np.asarray(KINDS[kind](generator, 400, 14), dtype=np.float64)
    trees = [None]
    for count in (1, 2, 3, 19, 40, 300, 301, 330, 330, 400):
        (labels,), trees = hdbscan_grown([rows[:count]], trees)
        np.testing.assert_array_equal(labels, reference(rows[:count]))


@settings(deadline=None, max_examples=60)
@given(
    arrays(np.float64, st.tuples(st.integers(3, 30), st.integers(1, 3)), elements=st.integers(-3, 3)),
    st.integers(2, 29),
)
def test_a_tree_that_grew_has_the_clusters_of_a_fresh_one_on_lattices_too(rows, cut):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linkage, "GROWN_ROWS", 2)
        _, trees = hdbscan_grown([rows[:cut]], [None])
        (labels,), _ = hdbscan_grown([rows], trees)
    fresh = reference(rows)
    assert len(set(zip(labels.tolist(), fresh.tolist(), strict=True))) == len(set(fresh.tolist()))


def test_a_tree_is_grown_from_the_new_distances_alone_and_not_where_lengths_are_equal():
    rows = np.random.default_rng(3).normal(size=(60, 5))
    (old,) = spanning_trees([rows[:50]])
    (fresh,) = spanning_trees([rows])
    found = grown(rows, old)
    assert found is not None
    edges = [
        {*zip(t.sources.tolist(), t.targets.tolist(), t.lengths.tolist(), strict=True)}
        for t in (found, fresh)
    ]
    assert edges[0] == edges[1]
    twin = np.concatenate([rows[:50], rows[3:4]])
    assert grown(twin, old) is None
    assert not spanning_trees([twin])[0].is_unique
