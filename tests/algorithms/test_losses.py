"""The policy loss against a plain loop, finite differences and its closed forms; splits change nothing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_meds.algorithms import (
    aggregate,
    entropy,
    kl_k3,
    policy_loss,
    token_policy_loss,
    token_value_loss,
    token_weights,
    truncated_importance_weights,
    value_loss,
)

AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def _batch(seed, sequences=5, tokens=7, spread=0.5):
    """Log-probs [B, T], old ones, advantages [B, T] and a mask of ragged lengths, fp64."""
    generator = torch.Generator().manual_seed(seed)
    old = -2.0 * torch.rand(sequences, tokens, generator=generator, dtype=torch.float64)
    new = old + spread * torch.randn(sequences, tokens, generator=generator, dtype=torch.float64)
    advantages = torch.randn(sequences, tokens, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, tokens + 1, (sequences,), generator=generator)
    return new, old, advantages, torch.arange(tokens) < lengths.unsqueeze(1)


def _naive(new, old, advantages, mask, low, high, dual, aggregation):
    """The loss as one would write it on paper, a token at a time."""
    sequences = []
    for b in range(len(new)):
        losses = []
        for t in range(len(new[b])):
            if not mask[b][t]:
                continue
            ratio, a = math.exp(new[b][t] - old[b][t]), advantages[b][t]
            loss = max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + high))
            if dual is not None and a < 0:
                loss = min(loss, -a * dual)
            losses.append(loss)
        if losses:
            sequences.append(losses)
    if aggregation == "token-mean":
        return sum(map(sum, sequences)) / sum(map(len, sequences))
    per_sequence = {
        "seq-mean-token-sum": lambda x: sum(x),
        "seq-mean-token-mean": lambda x: sum(x) / len(x),
        "seq-mean-token-sum-norm": lambda x: sum(x) / len(new[0]),
    }[aggregation]
    return sum(map(per_sequence, sequences)) / len(sequences)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_policy_loss_equals_the_loss_written_out(aggregation, dual, seed):
    new, old, advantages, mask = _batch(seed)
    loss, _ = policy_loss(new, old, advantages, mask, 0.2, 0.28, dual, aggregation)
    expected = _naive(
        new.tolist(), old.tolist(), advantages.tolist(), mask.tolist(), 0.2, 0.28, dual, aggregation
    )
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_equal_finite_differences(aggregation):
    new, old, advantages, mask = _batch(11, sequences=3, tokens=4)
    new.requires_grad_()

    def loss(x):
        return policy_loss(x, old, advantages, mask, 0.2, 0.28, 1.5, aggregation)[0]

    assert torch.autograd.gradcheck(loss, new, eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("split", [[2], [1, 1]])
def test_lengths_one_and_three_with_opposite_advantages_give_one_half_for_every_split(split):
    # Token losses -1 (one token) and +1 (three): (-1 + 3) / 4. A mean per micro-batch would give 0.
    old = torch.zeros(2, 3)
    advantages = torch.tensor([1.0, -1.0])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    _, denominator = token_weights(mask.sum(dim=1), "token-mean")
    parts = [
        policy_loss(*(x[rows] for x in (old, old, advantages, mask)), denominator=denominator)[0]
        for rows in torch.arange(2).split(split)
    ]
    assert sum(parts).item() == pytest.approx(0.5)


@given(st.integers(0, 10_000), st.sampled_from(AGGREGATIONS), st.data())
@settings(max_examples=60, deadline=None)
def test_loss_and_gradient_are_the_same_for_every_split_into_micro_batches_and_replicas(
    seed, aggregation, data
):
    new, old, advantages, mask = _batch(seed)
    whole = new.clone().requires_grad_()
    loss, _ = policy_loss(
        whole, old, advantages, mask, dual_clip=3.0, aggregation=aggregation, padded_length=16
    )
    loss.backward()

    _, denominator = token_weights(mask.sum(dim=1), aggregation, padded_length=16)
    cuts = sorted(data.draw(st.sets(st.integers(1, 4))))
    parts, total = new.clone().requires_grad_(), 0.0
    for rows in torch.tensor_split(torch.randperm(5, generator=torch.Generator().manual_seed(seed)), cuts):
        longest = int(mask[rows].sum(dim=1).max())  # a micro-batch is padded to its own longest
        pieces = (x[rows][:, :longest] for x in (parts, old, advantages, mask))
        part, _ = policy_loss(
            *pieces, dual_clip=3.0, aggregation=aggregation, denominator=denominator, padded_length=16
        )
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(parts.grad, whole.grad)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_token_weights_over_packed_sequences_give_the_padded_loss(aggregation):
    new, old, advantages, mask = _batch(3)
    expected, _ = policy_loss(new, old, advantages, mask, 0.2, 0.28, 10.0, aggregation)
    lengths = mask.sum(dim=1)
    weights, denominator = token_weights(lengths, aggregation, padded_length=mask.shape[1])
    packed = token_policy_loss(new[mask], old[mask], advantages[mask], 0.2, 0.28, 10.0)
    loss = (packed.loss * weights.repeat_interleave(lengths)).sum() / denominator
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_denominators_of_parts_add_up_and_empty_sequences_count_for_nothing():
    lengths = torch.tensor([3, 0, 1, 5])
    for aggregation, expected in zip(AGGREGATIONS, [9, 3, 3, 3], strict=True):
        weights, denominator = token_weights(lengths, aggregation, padded_length=8)
        parts = sum(token_weights(part, aggregation, padded_length=8)[1] for part in lengths.split(2))
        assert denominator == expected == parts
        assert weights[1] == 0.0


def test_nothing_outside_the_mask_reaches_loss_or_gradient():
    new, old, advantages, mask = _batch(5)
    reference, _ = policy_loss(new, old, advantages, mask)
    poisoned = [x.masked_fill(~mask, math.nan) for x in (new, old, advantages)]
    poisoned[0].requires_grad_()
    loss, metrics = policy_loss(*poisoned, mask)
    loss.backward()
    assert loss.item() == reference.item()
    assert poisoned[0].grad.isfinite().all()
    assert all(math.isfinite(m) for m in metrics.values())


def test_a_batch_without_tokens_has_loss_zero_and_a_gradient_of_zeros():
    new = torch.zeros(2, 3, requires_grad=True)
    loss, _ = policy_loss(new, torch.zeros(2, 3), torch.ones(2), torch.zeros(2, 3))
    loss.backward()
    assert loss.item() == 0.0
    assert not new.grad.any()


def test_clip_dual_clip_and_kl_are_told_apart_in_the_metrics():
    ratio = torch.tensor([[1.25, 1.35, 0.7, 1.5, 20.0, 1.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, -1.0, 1.0]], dtype=torch.float64)
    #              inside clip-higher, above, below and A < 0, above but A < 0, beyond the dual clip, same
    loss, metrics = policy_loss(
        ratio.log(), torch.zeros_like(ratio), advantages, torch.ones(1, 6), 0.2, 0.28, dual_clip=10.0
    )
    assert loss.item() == pytest.approx((-1.25 - 1.28 + 0.8 + 1.5 + 10.0 - 1.0) / 6)
    assert metrics["clip_fraction"].item() == pytest.approx(2 / 6)
    assert metrics["dual_clip_fraction"].item() == pytest.approx(1 / 6)
    assert metrics["approx_kl"].item() == pytest.approx((ratio - 1 - ratio.log()).mean().item())


def test_one_advantage_per_sequence_stands_for_each_of_its_tokens():
    new, old, _, mask = _batch(8)
    per_sequence = torch.linspace(-1, 1, 5, dtype=torch.float64)
    one, _ = policy_loss(new, old, per_sequence, mask)
    each, _ = policy_loss(new, old, per_sequence.unsqueeze(1).expand_as(new), mask)
    assert one.item() == each.item()


def test_an_infinite_dual_clip_is_none_at_all():
    new, old, advantages, mask = _batch(9, spread=3.0)
    advantages[:, 0] = 0.0
    results = []
    for dual in (None, math.inf):
        x = new.clone().requires_grad_()
        loss, _ = policy_loss(x, old, advantages, mask, dual_clip=dual)
        loss.backward()
        results.append((loss.item(), x.grad))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1])


def test_extreme_ratios_stay_finite():
    loss, metrics = policy_loss(
        torch.tensor([[0.0, -500.0]]), torch.tensor([[-500.0, 0.0]]), torch.tensor([-1.0]), torch.ones(1, 2)
    )
    assert loss.isfinite()
    assert metrics["approx_kl"].isfinite()


def test_an_unknown_aggregation_and_a_missing_length_are_refused():
    with pytest.raises(ValueError, match="median"):
        token_weights(torch.tensor([1]), "median")
    with pytest.raises(ValueError, match="padded_length"):
        token_weights(torch.tensor([1]), "seq-mean-token-sum-norm")


def test_k3_is_never_negative_and_its_mean_is_the_kl_divergence():
    generator = torch.Generator().manual_seed(1)
    p, q = torch.softmax(torch.randn(2, 50, generator=generator, dtype=torch.float64), dim=-1)
    k3 = kl_k3(p.log(), q.log())
    assert (k3 >= 0).all()
    assert (p * k3).sum().item() == pytest.approx((p * (p.log() - q.log())).sum().item())
    assert not kl_k3(p.log(), p.log()).any()


def test_entropy_equals_that_of_torch_and_takes_impossible_tokens():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(2))
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy(logits), expected)
    padded = torch.cat([logits, torch.full((4, 2), -math.inf)], dim=1).requires_grad_()
    torch.testing.assert_close(entropy(padded), expected)
    assert entropy(torch.zeros(8, dtype=torch.bfloat16)).item() == pytest.approx(math.log(8))


def test_importance_weights_are_capped_and_neutral_where_the_engine_said_nothing():
    actor = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5]))
    engine = torch.log(torch.tensor([0.5, 0.1, 1.0, math.nan]))
    np.testing.assert_allclose(truncated_importance_weights(actor, engine), [1.0, 2.0, 0.5, 1.0], rtol=1e-6)


def test_aggregate_averages_any_token_value():
    values, mask = torch.tensor([[1.0, 2.0], [5.0, math.nan]]), torch.tensor([[1, 1], [1, 0]])
    assert aggregate(values, mask, "token-mean").item() == pytest.approx(8 / 3)
    assert aggregate(values, mask, "seq-mean-token-mean").item() == pytest.approx((1.5 + 5) / 2)


def test_the_value_loss_is_half_the_larger_of_both_squared_errors():
    # return 1: near the old value nothing is clipped; beyond it the nearer one counts where it is worse
    old = torch.tensor([0.0, 0.0, 0.0, 3.0])
    values = torch.tensor([0.4, 0.9, -2.0, 1.5], requires_grad=True)
    loss, clipped = token_value_loss(values, old, torch.ones(4), 0.5)
    torch.testing.assert_close(loss, torch.tensor([0.36, 0.25, 9.0, 2.25]) / 2)
    assert clipped.tolist() == [0.0, 1.0, 0.0, 1.0]
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([-0.6, 0.0, -3.0, 0.0]))
    unbounded, clipped = token_value_loss(values, old, torch.ones(4), math.inf)
    torch.testing.assert_close(unbounded, (values - 1).square() / 2)
    assert not clipped.any()


def test_parts_of_a_value_loss_add_up_and_nothing_outside_the_mask_counts():
    generator = torch.Generator().manual_seed(4)
    values, old, returns = torch.randn(3, 3, 5, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([[5], [1], [3]])
    values[~mask], returns[~mask] = torch.nan, torch.nan
    values.requires_grad_()
    whole, metrics = value_loss(values, old, returns, mask)
    expected, clipped = token_value_loss(values[mask], old[mask], returns[mask], 0.5)
    torch.testing.assert_close(whole, expected.mean())
    assert metrics["clip_fraction"] == clipped.mean()
    (gradient,) = torch.autograd.grad(whole, values, retain_graph=True)
    assert gradient.isfinite().all() and not gradient[~mask].any()
    parts = [
        value_loss(values[rows], old[rows], returns[rows], mask[rows], denominator=9.0)[0]
        for rows in (slice(0, 1), slice(1, 3))
    ]
    torch.testing.assert_close(sum(parts), whole)
