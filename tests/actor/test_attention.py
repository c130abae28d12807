"""The attention core against attention written out, values and gradients, rows and packs."""

import math

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_meds.actor.attention_cpu import Pack, SdpaAttention

HEADS, GROUPS, DIM = 6, 2, 8


def _core(**options):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=options.pop("dropout", 0.0),
    )
    mask = options.pop("mask", AttnMaskType.causal)
    return SdpaAttention(config, layer_number=1, attn_mask_type=mask, attention_type="self", **options)


def _written_out(query, key, value, scale):
    """[s, n * d] from [s, n, d], [s, g, d]: every score, masked, in fp64."""
    length = len(query)
    out = []
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        scores = query[:, head].double() @ key[:, group].double().T * scale
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        out.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ value[:, group].double())
    return torch.cat(out, dim=-1)


def _tensors(*shape):
    generator = torch.Generator().manual_seed(2)
    sizes = [(*shape, HEADS, DIM), (*shape, GROUPS, DIM), (*shape, GROUPS, DIM)]
    return [torch.randn(size, generator=generator, requires_grad=True) for size in sizes]


def _same(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs.float(), atol=1e-5, rtol=0)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3))
    got = torch.autograd.grad((ours * weights).sum(), inputs)
    wanted = torch.autograd.grad((theirs * weights).sum(), inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", [None, 0.2])
def test_rows_equal_attention_written_out_with_gradients(scale):
    query, key, value = inputs = _tensors(11, 3)
    ours = _core(softmax_scale=scale)(query, key, value, None)
    rows = [_written_out(query[:, b], key[:, b], value[:, b], scale or DIM**-0.5) for b in range(3)]
    _same(ours, torch.stack(rows, dim=1), inputs)


@pytest.mark.parametrize("lengths", [[13], [1, 7, 2, 3], [1, 1, 11]], ids=str)
def test_packed_sequences_attend_only_to_themselves_with_gradients(lengths):
    query, key, value = inputs = _tensors(sum(lengths))
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams("thd", borders, borders, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    ours = _core()(query, key, value, None, packed_seq_params=packed)
    pieces = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    _same(ours, torch.cat([_written_out(*piece, DIM**-0.5) for piece in pieces]), inputs)


def test_a_gpu_gets_the_whole_pack_in_one_flash_call():
    """Shapes and arguments only: torch's fake tensors claim a GPU and compute nothing."""
    borders = torch.tensor([0, 3, 7, 9], dtype=torch.int32)
    calls = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        query, key, value = (
            torch.empty(9, n, DIM, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for n in (HEADS, GROUPS, GROUPS)
        )
        there = torch.empty(4, dtype=torch.int32, device="cuda")
    packed = Pack("thd", borders, borders, max_seqlen_q=4, max_seqlen_kv=4, on_device=there)
    with Seen():
        attended = _core()(query, key, value, None, packed_seq_params=packed)
    assert attended.shape == (9, HEADS * DIM) and attended.dtype is torch.bfloat16
    assert attended.requires_grad
    assert calls.count(torch.ops.torch_attn._varlen_attn.default) == 1


def test_padding_on_the_right_changes_nothing_before_it():
    query, key, value = _tensors(9, 1)
    whole = _core()(query, key, value, None)
    torch.testing.assert_close(_core()(query[:5], key[:5], value[:5], None), whole[:5])


def test_a_pack_whose_borders_miss_tokens_is_refused():
    query, key, value = _tensors(6)
    borders = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens ends at 4, but 6 tokens"):
        _core()(query, key, value, None, packed_seq_params=PackedSeqParams("thd", borders, borders))


def test_what_it_does_not_compute_is_refused():
    query, key, value = _tensors(4, 1)
    with pytest.raises(ValueError, match="takes no attention_mask"):
        _core()(query, key, value, torch.zeros(1, 1, 4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="attention dropout"):
        _core(dropout=0.1)
    with pytest.raises(ValueError, match="padding"):
        _core(mask=AttnMaskType.padding)
