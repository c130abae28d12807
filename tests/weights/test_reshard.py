"""Cutting and joining are exact inverses, and lie as Megatron-Core expects."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_meds.weights.families import Cut, Entry, HfTensor
from megatron_meds.weights.reshard import join, padded_rows, pieces, shard_shape, split


def entry(cut: Cut, *shapes: tuple[int, ...], groups: int = 1) -> Entry:
    tensors = tuple(HfTensor(f"t{i}", shape) for i, shape in enumerate(shapes))
    return Entry(0, ("parameter",), tensors, cut, groups)


def numbered(of: Entry) -> list[torch.Tensor]:
    """Tensors in which every element is another number."""
    tensors, start = [], 0
    for tensor in of.tensors:
        n = torch.Size(tensor.shape).numel()
        tensors.append(torch.arange(start, start + n, dtype=torch.float64).reshape(tensor.shape))
        start += n
    return tensors


sizes = st.sampled_from([1, 2, 3, 4, 8])


@given(
    size=sizes, heads_per_group=st.integers(1, 4), groups=st.sampled_from([1, 2, 4, 8]), dim=st.integers(1, 4)
)
def test_qkv_is_interleaved_by_kv_group_then_cut_in_equal_runs(size, heads_per_group, groups, dim):
    head, hidden = 2 * dim, 3
    of = entry(
        Cut.QKV,
        (groups * heads_per_group * head, hidden),
        (groups * head, hidden),
        (groups * head, hidden),
        groups=groups,
    )
    q, k, v = tensors = numbered(of)
    fused = torch.cat(
        [q.view(groups, -1, hidden), k.view(groups, -1, hidden), v.view(groups, -1, hidden)], dim=1
    )
    rows = fused.reshape(-1, hidden)
    if (groups % size and size % groups) or len(rows) % size:
        with pytest.raises(ValueError, match=r"parameter: .* shared out .* tensor ranks"):
            split(of, tensors, size)
        return
    shards = split(of, tensors, size)
    assert all(torch.equal(shard, want) for shard, want in zip(shards, rows.chunk(size), strict=True))
    assert all(torch.equal(new, old) for new, old in zip(join(of, shards), tensors, strict=True))


def test_a_rank_with_whole_groups_holds_its_own_queries_keys_and_values():
    of = entry(Cut.QKV, (8, 1), (4, 1), (4, 1), groups=4)  # 4 groups of 2 query heads, head_dim 1
    q, k, v = numbered(of)
    second = split(of, [q, k, v], 2)[1].flatten()
    assert torch.equal(second, torch.stack([q[4], q[5], k[2], v[2], q[6], q[7], k[3], v[3]]).flatten())


def test_qkv_bias_is_cut_as_the_weight_is():
    weight = entry(Cut.QKV, (16, 1), (4, 1), (4, 1), groups=2)
    bias = entry(Cut.QKV, (16,), (4,), (4,), groups=2)
    tensors = numbered(weight)
    flat = [tensor.flatten() for tensor in tensors]
    for of_weight, of_bias in zip(split(weight, tensors, 2), split(bias, flat, 2), strict=True):
        assert torch.equal(of_weight.flatten(), of_bias)


@given(size=sizes, share=st.integers(1, 5))
def test_each_rank_holds_its_gate_above_its_up_projection(size, share):
    of = entry(Cut.GATE_UP, (size * share, 3), (size * share, 3))
    gate, up = numbered(of)
    shards = split(of, [gate, up], size)
    for shard, g, u in zip(shards, gate.chunk(size), up.chunk(size), strict=True):
        assert torch.equal(shard, torch.cat([g, u]))
    assert all(torch.equal(a, b) for a, b in zip(join(of, shards), (gate, up), strict=True))


@given(size=sizes, share=st.integers(1, 5))
def test_a_row_parallel_weight_is_cut_by_columns(size, share):
    of = entry(Cut.COLUMNS, (3, size * share))
    (weight,) = numbered(of)
    shards = split(of, [weight], size)
    assert torch.equal(torch.cat(shards, dim=1), weight)
    assert torch.equal(join(of, shards)[0], weight)


@given(size=sizes, vocabulary=st.integers(1, 40), extra=st.integers(0, 20))
def test_padded_vocabulary_rows_are_zero_on_load_and_gone_on_export(size, vocabulary, extra):
    of = entry(Cut.VOCABULARY, (vocabulary, 3))
    (weight,) = numbered(of)
    rows = padded_rows(vocabulary, size) + extra * size
    shards = split(of, [weight], size, vocabulary_rows=rows)
    whole = torch.cat(shards)
    assert whole.shape == (rows, 3)
    assert torch.equal(whole[:vocabulary], weight)
    assert not whole[vocabulary:].any()
    for shard in shards:
        shard[shard.sum(dim=1) == 0] = 7.0  # whatever training left in the padding
    shards[0][0] = weight[0]
    assert torch.equal(join(of, shards)[0], weight)


def test_a_replicated_parameter_needs_one_shard_to_join():
    of = entry(Cut.REPLICATED, (5,))
    (weight,) = numbered(of)
    shards = split(of, [weight], 4)
    assert len(shards) == 4
    assert torch.equal(join(of, shards[:1])[0], weight)


def test_joined_tensors_are_copies():
    of = entry(Cut.REPLICATED, (5,))
    shard = torch.ones(5)
    (joined,) = join(of, [shard])
    shard.zero_()
    assert joined.all()


@pytest.mark.parametrize("cut", [Cut.ROWS, Cut.COLUMNS, Cut.GATE_UP])
def test_what_cannot_be_shared_out_is_refused_by_name(cut):
    shapes = [(6, 6)] * (2 if cut is Cut.GATE_UP else 1)
    with pytest.raises(
        ValueError, match=r"decoder\.layers\.0\.parameter: 6 (rows|columns) .* over 4 tensor ranks"
    ):
        pieces(entry(cut, *shapes), 4, 0)


def test_a_padded_vocabulary_smaller_than_the_real_one_is_refused():
    with pytest.raises(ValueError, match="8 padded rows cannot hold a vocabulary of 9"):
        shard_shape(entry(Cut.VOCABULARY, (9, 3)), 2, vocabulary_rows=8)


def test_a_tensor_of_another_shape_is_refused_by_name():
    with pytest.raises(ValueError, match=r"t0 has shape \(4,\), not \(5,\)"):
        split(entry(Cut.REPLICATED, (5,)), [torch.ones(4)], 1)


def test_a_shard_of_another_shape_is_refused_with_its_rank():
    of = entry(Cut.ROWS, (4, 2))
    with pytest.raises(ValueError, match=r"rank 1 holds \(3, 2\), not \(2, 2\)"):
        join(of, [torch.ones(2, 2), torch.ones(3, 2)])


def test_tensors_of_different_dtypes_are_not_joined_in_silence():
    of = entry(Cut.GATE_UP, (2, 2), (2, 2))
    with pytest.raises(ValueError, match="different dtypes"):
        split(of, [torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)], 1)
