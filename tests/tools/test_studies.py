"""The study of MEDS: how well clusters find planted kinds, on memories made up by hand."""

import numpy as np
import pytest

from megatron_meds.meds import MistakeMemory, Note, Visit
from tools.studies.meds_tiny import ABLATIONS, VARIANTS, agreement, agreement_of, numbers


def remembered(kinds, apart):
    """One prompt's memory: two kinds of mistakes whose layer logits lie `apart`."""
    random = np.random.default_rng(0)
    middles = {"a": np.arange(8.0), "b": np.arange(8.0) + apart * np.array([0, 0, 0, 0, 5, -5, 5, -5])}
    layers = np.stack([middles[kind] + random.normal(size=8) * 0.01 for kind in kinds])
    memory = MistakeMemory()
    memory.visit_many([Visit("p", layers[:, 4:], notes=[Note(k, "") for k in kinds], layers=layers)])
    return memory["p", False], kinds


def test_clusters_of_kinds_that_lie_apart_agree_with_them_and_one_cluster_agrees_by_chance():
    memory = [remembered(list("aaaabbbb"), apart=1.0)]
    for name in ("8", "meds", "8 differences", "4 differences"):
        assert agreement_of(VARIANTS[name], memory)["purity"] == pytest.approx(1.0)
    single = agreement_of(VARIANTS["single"], memory)
    assert single["rand"] == pytest.approx(2 * 6 / 28) and single["purity"] == 0.5
    assert agreement_of(VARIANTS["meds"], [remembered(list("abababab"), apart=0.0)])["adjusted_rand"] < 0.5
    assert set(ABLATIONS) == {"single", "8", "meds", "8 differences", "4 differences"}


def test_prompts_weigh_by_their_answers_and_one_answer_says_nothing():
    pairs = [
        (np.array([0, 0]), ["x", "y"]),
        (np.array([0, 1, 1, 1]), ["x", "y", "y", "y"]),
        (np.array([5]), ["x"]),
    ]
    found = agreement(pairs)
    assert found["purity"] == pytest.approx((2 * 0.5 + 4 * 1.0) / 6)
    assert (found["answers"], found["prompts"]) == (6, 2)
    assert agreement([]) == {}
    assert numbers(["b", "a", "b"]).tolist() == [1, 0, 1]
