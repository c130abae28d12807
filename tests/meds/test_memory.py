"""A visit: assign, count earlier visits only, then remember and cluster anew; bounded, never broken."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import HDBSCAN
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize

from megatron_meds.meds import MistakeMemory, Visit, select_layers, workers
from megatron_meds.meds.memory import Note, vote

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("gold_meds_*.json"))


def rows(count: int, seed: int = 0, features: int = 14, modes: int = 4, spread: float = 0.3) -> np.ndarray:
    generator = np.random.default_rng(seed)
    middles = np.random.default_rng(99).normal(size=(modes, features)) * 5 - 15
    noise = generator.normal(size=(count, features)) * spread
    return (middles[generator.integers(0, modes, count)] + noise).astype(np.float32)


def plain_visits(visits: list[np.ndarray]) -> list[list[int]]:
    """The same by one neighbour query a row and a fit a visit, from the libraries."""
    known, labels, answers = np.empty((0, visits[0].shape[1])), np.empty(0, dtype=int), []
    for new in visits:
        sizes = []
        if len(known):
            index = NearestNeighbors(n_neighbors=min(3, len(known)), metric="cosine").fit(known)
            for row in new:
                votes = Counter(labels[index.kneighbors(row[None])[1][0]].tolist())
                label = min(votes, key=lambda v: (-votes[v], v))
                sizes.append(int((labels == label).sum()))
        answers.append(sizes or [0] * len(new))
        known = np.concatenate([known, new])
        labels = np.full(len(known), -1)
        if len(known) > 1:
            labels = HDBSCAN(min_cluster_size=2, min_samples=1, copy=True).fit_predict(normalize(known))
    return answers


@pytest.mark.parametrize("backend", ["auto", "sklearn"])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_the_recorded_sizes_come_out_exactly(path, backend):
    gold = json.loads(path.read_text())
    memory = MistakeMemory(backend=backend)
    for number, prompt in enumerate(gold["prompts"]):
        for step, visit in enumerate(prompt["visits"]):
            features = select_layers(
                np.array(visit["layer_logits"]), last=gold["last_layers"], difference=gold["layer_difference"]
            )
            found = memory.visit(f"prompt {number}", features, step=step)
            assert found.tolist() == visit["cluster_sizes"], (number, step)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 12), min_size=2, max_size=5))
def test_sizes_are_those_of_a_plain_loop_over_the_libraries(seed, counts):
    visits = [rows(n, seed + i) for i, n in enumerate(counts)]
    memory = MistakeMemory()
    assert [memory.visit("p", v).tolist() for v in visits] == plain_visits(visits)


def test_the_first_visit_and_siblings_of_the_same_step_count_nothing():
    memory = MistakeMemory()
    same = np.tile(rows(1), (8, 1))
    assert memory.visit("p", same).tolist() == [0] * 8
    assert memory.visit("p", same).tolist() == [8] * 8
    assert memory.visit("q", same).tolist() == [0] * 8


def test_right_and_wrong_answers_never_meet():
    memory = MistakeMemory()
    memory.visit("p", rows(8), correct=False)
    assert memory.visit("p", rows(8), correct=True).tolist() == [0] * 8
    assert set(memory) == {("p", False), ("p", True)}


@pytest.mark.parametrize("count", [2, 3, 20])
def test_one_tight_mode_comes_back_as_noise_and_the_noise_policy_decides_what_it_costs(count):
    blob = np.tile(rows(1, features=14), (count, 1))
    again = blob[:2]
    for noise, size in (("cluster", count), ("free", 0), ("single", count)):
        memory = MistakeMemory(noise=noise)
        memory.visit("p", blob)
        assert memory.visit("p", again).tolist() == [size, size], noise


def test_single_leaves_noise_free_where_the_rows_lie_apart():
    memory = MistakeMemory(noise="single")
    memory.visit("p", np.eye(3, 14))
    assert (memory["p", False].labels == -1).all()
    assert memory.visit("p", np.eye(3, 14)).tolist() == [0, 0, 0]


def test_count_current_adds_the_siblings_of_the_cluster_without_the_row_itself():
    memory = MistakeMemory(count_current=True)
    first, second = rows(1, modes=1), rows(1, seed=5, modes=9)
    visit = np.concatenate([np.tile(first, (5, 1)), np.tile(second, (3, 1))])
    jitter = np.random.default_rng(0).normal(size=visit.shape) * 1e-3
    assert memory.visit("p", visit + jitter).tolist() == [4] * 5 + [2] * 3
    assert memory.visit("p", visit[:1]).tolist() == [5]


def test_one_cluster_for_all_is_an_ablation():
    memory = MistakeMemory(clusters="single")
    assert memory.visit("p", rows(1)).tolist() == [0]
    assert memory.visit("p", rows(6, seed=1)).tolist() == [1] * 6
    assert memory.visit("p", rows(2, seed=2)).tolist() == [7] * 2


def test_votes_tie_to_the_smallest_label_and_equal_neighbours_to_the_older():
    known = np.array([[1.0, 0.0], [0.9, 0.1], [0.8, 0.2], [0.0, 1.0], [0.0, 1.0]])
    new = np.array([[1.0, 0.0]])
    assert vote(new, known, np.array([5, 3, 4, 0, 0]), 3).tolist() == [3]
    assert vote(new, known, np.array([5, 3, 5, 0, 0]), 3).tolist() == [5]
    assert vote(new, known, np.array([5, -1, 2, 0, 0]), 3).tolist() == [-1]
    assert vote(np.array([[0.0, 2.0]]), known, np.array([0, 0, 0, 7, 8]), 1).tolist() == [7]
    assert vote(new, known, np.array([5, 3, 4, 0, 0]), 99).tolist() == [0]


def test_rows_that_are_not_finite_shift_no_other_row_are_not_remembered_and_are_counted():
    clean, memory = MistakeMemory(), MistakeMemory()
    first, second = rows(10), rows(6, seed=1)
    clean.visit("p", first)
    expected = clean.visit("p", second)
    with_bad = np.insert(first.astype(np.float64), [0, 4, 10], [[np.nan], [np.inf], [1e300]], axis=0)
    memory.visit("p", with_bad)
    assert memory.dropped == 3 and memory.rows == 10
    found = memory.visit("p", np.insert(second, 2, -np.inf, axis=0))
    assert found.tolist() == np.insert(expected, 2, 0).tolist()
    np.testing.assert_array_equal(memory["p", False].labels, clean["p", False].labels)
    assert memory.visit("q", np.full((2, 14), np.nan)).tolist() == [0, 0]
    assert ("q", False) not in memory


@pytest.mark.parametrize("empty", [np.empty((0, 14)), np.empty((0, 0)), np.array([]), []])
def test_no_rows_are_a_visit_like_any_other(empty):
    memory = MistakeMemory()
    assert memory.visit("p", empty).tolist() == []
    memory.visit("p", rows(5))
    assert memory.visit("p", empty).tolist() == []
    assert memory.rows == 5


def test_the_memory_keeps_the_newest_rows_and_knows_its_size():
    memory = MistakeMemory(max_per_prompt=20)
    for step in range(5):
        memory.visit_many(
            [Visit("p", rows(8, seed=step), notes=[Note(f"{step}", "x" * 10)] * 8), Visit("q", rows(2))], step
        )
    assert len(memory["p", False]) == 20
    assert memory["p", False].steps.tolist() == [2] * 4 + [3] * 8 + [4] * 8
    assert memory["p", False].notes[-1].answer == "4"
    np.testing.assert_array_equal(memory["p", False].features[-8:], rows(8, seed=4))
    assert memory.rows == 30
    assert memory.bytes == 30 * (14 * 4 + 4 + 8 + 4) + 20 * 11
    assert memory.visit("p", rows(50)).shape == (50,)
    assert len(memory["p", False]) == 20


def test_visits_of_many_prompts_with_workers_equal_visits_one_by_one(monkeypatch):
    monkeypatch.setattr(workers, "_WORTH_SENDING", 0)
    together, single = MistakeMemory(workers=2), MistakeMemory()
    for step in range(3):
        brought = {f"p{i}": rows(3 + i, seed=100 * step + i) for i in range(40)}
        found = together.visit_many([Visit(key, value) for key, value in brought.items()], step)
        for (key, value), sizes in zip(brought.items(), found, strict=True):
            np.testing.assert_array_equal(sizes, single.visit(key, value, step))
    together.close()


def test_a_large_memory_keeps_its_tree_as_long_as_no_row_is_dropped():
    memory = MistakeMemory(max_per_prompt=400)
    for step, count in enumerate((300, 60)):
        memory.visit("p", rows(count, seed=step))
        kept = memory["p", False]
        assert kept.tree is not None and len(kept.tree.lengths) == len(kept) - 1
        assert memory.bytes == len(kept) * (14 * 4 + 4 + 8 + 4) + (len(kept) - 1) * 16
    fresh = MistakeMemory()
    fresh.visit("p", np.concatenate([rows(300, seed=0), rows(60, seed=1)]))
    np.testing.assert_array_equal(memory["p", False].labels, fresh["p", False].labels)


def test_ten_thousand_rows_of_one_prompt_are_clustered():
    memory = MistakeMemory()
    memory.visit("p", rows(10_000, modes=40))
    sizes = memory.visit("p", rows(16, seed=1, modes=40))
    assert sizes.min() > 0 and len(memory["p", False]) == 10_016


def test_a_wrong_call_changes_nothing_and_says_what_is_wrong():
    memory = MistakeMemory()
    memory.visit("p", rows(4))
    with pytest.raises(ValueError, match="comes twice"):
        memory.visit_many([Visit("q", rows(1)), Visit("q", rows(1))])
    with pytest.raises(ValueError, match=r"rows of 7 features, the remembered ones have 14: meds\.last"):
        memory.visit_many([Visit("q", rows(1)), Visit("p", rows(1, features=7))])
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        memory.visit("r", np.ones(3))
    with pytest.raises(ValueError, match="2 rows come with 1 notes"):
        memory.visit_many([Visit("r", rows(2), notes=[Note()])])
    assert list(memory) == [("p", False)] and memory.rows == 4
    with pytest.raises(ValueError, match="noise 'loud' is none of"):
        MistakeMemory(noise="loud")
