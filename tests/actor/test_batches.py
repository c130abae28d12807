"""Micro-batches: every token once, budgets kept, counts that schedules take."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_meds.actor.batches import (
    count_for,
    filler,
    input_length,
    make_micro_batches,
    plan_packed,
    plan_padded,
)
from megatron_meds.trajectory import Prompt, Trajectory

lengths = st.lists(st.integers(1, 60), max_size=40)
batchings = st.sampled_from(["packed", "padded"])


def trajectory(prompt_length: int, response_length: int, seed: int = 0) -> Trajectory:
    random = np.random.default_rng(seed)
    prompt = Prompt(
        id="p", question="?", token_ids=tuple(map(int, random.integers(3, 99, prompt_length))), answer="1"
    )
    ids = [int(i) for i in random.integers(3, 99, response_length)]
    return Trajectory(prompt, 0, ids, "", [float("nan")] * response_length, "stop", 0)


@given(lengths, st.integers(1, 100))
def test_packed_plans_hold_every_sequence_once_within_the_budget(sizes, budget):
    plan = plan_packed(sizes, budget)
    assert sorted(i for rows in plan for i in rows) == list(range(len(sizes)))
    assert all(len(rows) == 1 or sum(sizes[i] for i in rows) <= budget for rows in plan)


@given(lengths, st.integers(1, 100))
def test_padded_plans_hold_every_sequence_once_within_the_budget(sizes, budget):
    plan = plan_padded(sizes, budget)
    assert sorted(i for rows in plan for i in rows) == list(range(len(sizes)))
    assert all(len(rows) == 1 or len(rows) * max(sizes[i] for i in rows) <= budget for rows in plan)


@pytest.mark.parametrize(
    ("count", "budget", "median"), [(256, 16384, 1500), (256, 2048, 75), (64, 16384, 900)]
)
def test_little_of_a_micro_batch_is_padding(count, budget, median):
    """Real are more than 0.98 of packed tokens, even where all rows get one length, and 0.9 of padded."""
    random = np.random.default_rng(count)
    sizes = np.clip(random.lognormal(np.log(median), 0.8, count), 20, budget // 2).astype(int).tolist()
    packed = plan_packed(sizes, budget)
    assert len(packed) <= -(-sum(sizes) // budget) + 1
    longest = max(sum(sizes[i] for i in rows) for rows in packed)
    assert sum(sizes) / (len(packed) * longest) > 0.98
    padded = plan_padded(sizes, budget)
    assert sum(sizes) / sum(len(rows) * max(sizes[i] for i in rows) for rows in padded) > 0.9


@given(st.integers(0, 50), st.integers(1, 8), st.booleans())
def test_counts_are_at_least_one_and_a_multiple_of_interleaved_stages(count, stages, interleaved):
    total = count_for(count, stages, interleaved)
    assert total >= max(count, 1)
    assert total - max(count, 1) < stages
    if interleaved:
        assert total % stages == 0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=12),
    batchings,
    st.integers(1, 64),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_each_response_token_is_predicted_once_from_the_token_before_it(
    shapes, batching, budget, multiple, uniform
):
    uniform = uniform and batching == "packed"
    trajectories = [trajectory(p, r, seed=i) for i, (p, r) in enumerate(shapes)]
    batches = make_micro_batches(
        trajectories, budget=budget, batching=batching, multiple=multiple, uniform=uniform
    )
    seen: dict[int, np.ndarray] = {}
    for batch in batches:
        rows, width = batch.shape
        assert width % multiple == 0
        hidden_order = batch.tokens_bs.t().flatten()  # [s * b], as hidden states lie
        before = hidden_order[batch.select_N]
        places = batch.positions_bs.t().flatten()[batch.select_N]
        seen |= batch.scatter(torch.stack([batch.targets_N, before, places]))
        if batch.cu_seqlens is not None:
            assert int(batch.cu_seqlens[-1]) == width and rows == 1
            assert int(batch.cu_seqlens.diff().max()) == batch.max_seqlen
    assert sorted(seen) == list(range(len(trajectories)))
    for index, t in enumerate(trajectories):
        targets, before, places = seen[index].astype(int)
        assert targets.tolist() == t.response_ids
        assert before.tolist() == [t.prompt.token_ids[-1], *t.response_ids[:-1]]
        assert places.tolist() == list(range(len(t.prompt.token_ids) - 1, input_length(t)))
    if uniform:
        assert len({batch.shape for batch in batches}) == 1


@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_a_filler_predicts_nothing(batching):
    empty = filler((1, 4), batching)
    assert empty.shape == (1, 4)
    assert empty.gather([]).numel() == 0 and empty.scatter(torch.zeros(0)) == {}


def test_gather_and_scatter_are_inverse():
    trajectories = [trajectory(2, n, seed=n) for n in (3, 1, 5)]
    values = [np.arange(n, dtype=np.float32) + n for n in (3, 1, 5)]
    (batch,) = make_micro_batches(trajectories, budget=100, batching="packed")
    back = batch.scatter(batch.gather(values))
    for index, wanted in enumerate(values):
        np.testing.assert_array_equal(back[index], wanted)


def test_padded_rows_keep_shapes_of_their_own():
    with pytest.raises(ValueError, match="uniform is for packed"):
        make_micro_batches([trajectory(2, 3)], budget=10, batching="padded", uniform=True)


def test_an_empty_response_is_refused_by_name():
    with pytest.raises(ValueError, match="sample p/0"):
        make_micro_batches([trajectory(2, 0)], budget=10, batching="packed")
