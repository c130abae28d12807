"""Backends, worker processes, and what clustering refuses."""

import importlib.util

import numpy as np
import pytest

from megatron_meds.meds import workers as workers_module
from megatron_meds.meds.clustering import OWN_ROWS, cluster_many, cluster_rows, is_tight, normalise
from megatron_meds.meds.workers import ClusterWorkers


def blobs(count: int, seed: int = 0, features: int = 14) -> np.ndarray:
    generator = np.random.default_rng(seed)
    middles = generator.normal(size=(6, features)) * 5 - 15
    return middles[generator.integers(0, 6, count)] + generator.normal(size=(count, features)) * 0.4


def test_rows_are_scaled_to_length_one_and_zeros_stay():
    rows = normalise(np.array([[3.0, 4.0], [0.0, 0.0], [-2.0, 0.0]]))
    np.testing.assert_allclose(rows, [[0.6, 0.8], [0.0, 0.0], [-1.0, 0.0]])


def test_rows_of_one_direction_cluster_alike_whatever_their_length():
    rows = blobs(60)
    stretched = rows * np.random.default_rng(1).uniform(0.5, 3.0, size=(60, 1))
    groups = cluster_rows(rows), cluster_rows(stretched)
    assert len(set(zip(*map(list, groups), strict=True))) == len(set(groups[0])) > 2


def test_auto_gives_scikit_learns_labels_below_and_above_its_own_limit():
    sets = [blobs(n, seed=n) for n in (30, OWN_ROWS, OWN_ROWS + 1)]
    for own, library in zip(cluster_many(sets), cluster_many(sets, "sklearn"), strict=True):
        np.testing.assert_array_equal(own, library)


@pytest.mark.parametrize("backend", ["auto", "sklearn"])
def test_none_one_and_identical_rows_are_noise(backend):
    sets = [np.empty((0, 14)), np.empty((0, 0)), blobs(1), np.ones((2, 14)), np.ones((9, 14))]
    assert [set(labels.tolist()) for labels in cluster_many(sets, backend)] == [set(), set(), *[{-1}] * 3]


def test_a_row_that_is_not_finite_is_refused_by_number():
    rows = blobs(5)
    rows[3, 2] = np.inf
    with pytest.raises(ValueError, match=r"rows \[3\] of set 1"):
        cluster_many([blobs(4), rows])


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend 'gpu' is none of auto, sklearn, cuml"):
        cluster_rows(blobs(4), "gpu")


@pytest.mark.skipif(importlib.util.find_spec("cuml") is not None, reason="cuML is installed here")
def test_cuml_is_never_replaced_by_something_else():
    with pytest.raises(ModuleNotFoundError, match="cuml"):
        cluster_rows(blobs(4), "cuml")


@pytest.mark.skipif(importlib.util.find_spec("cuml") is None, reason="cuML is not installed here")
def test_cuml_gives_the_same_partition():
    from megatron_meds.meds.diagnostics import cluster_agreement

    for rows in (blobs(40), blobs(600, seed=3)):
        pair = cluster_rows(rows, "cuml"), cluster_rows(rows, "sklearn")
        assert cluster_agreement(*pair)["adjusted_rand"] == pytest.approx(1.0)


@pytest.fixture
def always_sent(monkeypatch):
    monkeypatch.setattr(workers_module, "_WORTH_SENDING", 0)


def test_worker_processes_give_the_same_labels_are_replaced_when_they_die_and_end_when_closed(always_sent):
    sets = [blobs(n, seed=n) for n in range(40, 160, 3)]
    alone, unknown = cluster_many(sets), [None] * len(sets)
    with ClusterWorkers(workers=2) as workers:
        for _ in range(2):
            for found, expected in zip(workers.cluster(sets, unknown)[0], alone, strict=True):
                np.testing.assert_array_equal(found, expected)
        (process,) = workers._others
        process.kill()
        process.wait()
        with pytest.raises(RuntimeError, match="clustering process ended"):
            workers.cluster(sets, unknown)
        for found, expected in zip(workers.cluster(sets, unknown)[0], alone, strict=True):
            np.testing.assert_array_equal(found, expected)
        (process,) = workers._others
    assert process.returncode == 0


def test_tight_means_within_a_cosine_radius_of_the_mean_direction():
    angles = np.array([0.0, 0.1, 0.2])
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert is_tight(rows, 1.0 - np.cos(0.11))
    assert not is_tight(rows, 1.0 - np.cos(0.09))
    assert not is_tight(rows[:1], 0.5)
