"""The sampler on real ranks: every prompt asked once, whole groups dealt once, the same for any mesh."""

from itertools import chain

import pytest

from tests.ranks import RankError

BODY = "tests.distributed.bodies_sampler"
MIXED = [2] * 24
LAYOUTS = {"1 replica": (2, {"pipeline": 2}), "2 replicas": (4, {"pipeline": 2}), "4 replicas": (4, {})}


def run(ranks, layout, **options):
    size, axes = LAYOUTS[layout]
    return ranks(size).run(f"{BODY}:step", layout=axes, **{"dynamic": False, "mini": 3, **options})


def union(results):
    """Per mini-batch the set of samples over replicas; ranks of a replica must agree."""
    by_replica = {}
    for r in results:
        assert by_replica.setdefault(r["replica"], r["batches"]) == r["batches"]
    return [sorted(chain(*parts)) for parts in zip(*by_replica.values(), strict=True)]


def test_mini_batches_hold_the_same_samples_for_any_number_of_replicas(ranks):
    found = {layout: union(run(ranks, layout, kinds=MIXED, wanted=8)) for layout in LAYOUTS}
    first = found["1 replica"]
    assert [len(batch) for batch in first] == [12, 12, 8]
    assert all(batches == first for batches in found.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_stay_whole_within_a_replica(ranks, layout):
    for result in run(ranks, layout, kinds=MIXED, wanted=8):
        for batch in result["batches"]:
            prompts = [prompt for prompt, _, _ in batch]
            assert all(prompts.count(p) == 4 for p in prompts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dynamic_sampling_refills_with_mixed_groups_and_asks_no_prompt_twice(ranks, layout):
    kinds = [0, 1, 2, 0] * 4 + [2] * 24
    results = run(ranks, layout, kinds=kinds, wanted=6, dynamic=True, rounds=8)
    samples = list(chain(*union(results)))
    groups = {}
    for prompt, _, ids in samples:
        groups.setdefault(prompt, set()).add(ids[0])
    assert len(groups) == 6 and all(first == {1, 2} for first in groups.values())
    asked = list(chain(*(r["asked"] for r in results)))
    assert len(asked) == len(set(asked)) == results[0]["metrics"]["sampling/prompts"]


def test_groups_that_are_all_wrong_are_kept_where_the_settings_say_so_and_all_right_ones_never(ranks):
    results = run(ranks, "2 replicas", kinds=[0, 1] * 12, wanted=6, dynamic=True, rounds=4, all_wrong=True)
    firsts = {ids[0] for _, _, ids in chain(*union(results))}
    assert firsts == {2}
    assert len(list(chain(*union(results)))) == 6 * 4
    assert results[0]["metrics"]["sampling/all_right"] > 0


def test_rounds_are_bounded_and_the_step_goes_on_with_what_there_is(ranks):
    results = run(ranks, "2 replicas", kinds=[0, 0, 0, 2] * 6, wanted=6, dynamic=True, rounds=2)
    metrics = results[0]["metrics"]
    kept = len(list(chain(*union(results)))) // 4
    assert metrics["sampling/rounds"] == 2
    assert 0 < kept < 6 and metrics["sampling/missing"] == 6 - kept


def test_a_step_without_a_single_mixed_group_says_what_was_seen(ranks):
    with pytest.raises(
        RankError, match=r"8 prompts no group had both right\s+and wrong answers \(8 all right"
    ):
        run(ranks, "2 replicas", kinds=[0], wanted=4, dynamic=True, rounds=2)


def test_fewer_prompts_than_replicas_are_all_asked(ranks):
    results = run(ranks, "4 replicas", kinds=MIXED, wanted=3)
    assert len(list(chain(*union(results)))) == 12


def test_a_dead_server_is_mended_by_all_ranks_and_nothing_is_asked_twice(ranks):
    whole = union(run(ranks, "2 replicas", kinds=MIXED, wanted=8))
    results = run(ranks, "2 replicas", kinds=MIXED, wanted=8, dies_after=2)
    assert union(results) == whole
    assert {r["resyncs"] for r in results} == {1}
    asked = list(chain(*(r["asked"] for r in results)))
    assert len(asked) == len(set(asked)) == 8


@pytest.mark.parametrize("count", [1, 5])
def test_an_evaluation_answers_every_prompt_on_every_head_in_order(ranks, count):
    results = ranks(4).run(f"{BODY}:evaluation", layout={"pipeline": 2}, kinds=[2] * count, samples=3)
    expected = [(f"p{i}", k) for i in range(count) for k in range(3)]
    assert [r for r in results if r] == [expected, expected]
