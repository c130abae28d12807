"""The chunked head against torch's own log_softmax."""

import pytest
import torch

from megatron_meds.actor.head import token_logprobs


def _reference(hidden, weight, targets, temperature, vocabulary):
    logits = (hidden @ weight[:vocabulary].t()).double() / temperature
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_values_and_gradients_equal_a_full_softmax_for_any_chunk(temperature, chunk):
    torch.manual_seed(0)
    rows, hidden_size, vocabulary, padded = 13, 8, 29, 32
    hidden = torch.randn(rows, hidden_size, requires_grad=True)
    weight = torch.randn(padded, hidden_size, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,))
    down_logp, down_entropy = torch.randn(rows), torch.randn(rows)

    logp, entropy = token_logprobs(
        hidden, weight, targets, temperature=temperature, chunk=chunk, vocabulary=vocabulary, group=None
    )
    grads = torch.autograd.grad((logp * down_logp + entropy * down_entropy).sum(), [hidden, weight])
    expected_logp, expected_entropy = _reference(hidden, weight, targets, temperature, vocabulary)
    expected = torch.autograd.grad(
        (expected_logp * down_logp + expected_entropy * down_entropy).sum(), [hidden, weight]
    )

    torch.testing.assert_close(logp.double(), expected_logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=0)
    for found, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


def test_bf16_gradients_are_those_of_fp32_within_its_rounding():
    torch.manual_seed(0)
    hidden = torch.randn(40, 16).bfloat16().requires_grad_()
    weight = torch.randn(32, 16).bfloat16().requires_grad_()
    targets, down = torch.randint(0, 29, (40,)), torch.randn(40)
    exact = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    for tensors in ((hidden, weight), exact):
        logp, entropy = token_logprobs(
            *tensors, targets, temperature=1.0, chunk=16, vocabulary=29, group=None
        )
        ((logp + entropy) * down).sum().backward()
    for found, wanted in zip((hidden, weight), exact, strict=True):
        assert found.grad is not None and wanted.grad is not None
        error = (found.grad.float() - wanted.grad).norm() / wanted.grad.norm()
        assert error < 3 * 2**-8


def test_padded_vocabulary_rows_never_enter_the_softmax_nor_get_a_gradient():
    torch.manual_seed(0)
    hidden = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(8, 4)
    weight[5:] = 1e4  # would win every softmax
    weight.requires_grad_()
    logp, entropy = token_logprobs(
        hidden, weight, torch.tensor([0, 1, 4]), temperature=1.0, chunk=2, vocabulary=5, group=None
    )
    (logp.sum() + entropy.sum()).backward()
    assert torch.isfinite(logp).all() and torch.isfinite(entropy).all()
    assert weight.grad is not None and weight.grad[5:].abs().max() == 0


def test_no_tokens_give_no_values_and_zero_gradients():
    hidden = torch.randn(0, 4, requires_grad=True)
    weight = torch.randn(8, 4, requires_grad=True)
    logp, _ = token_logprobs(
        hidden, weight, torch.zeros(0, dtype=torch.long), temperature=1.0, chunk=2, vocabulary=8, group=None
    )
    logp.sum().backward()
    assert logp.shape == (0,)
    assert weight.grad is not None and weight.grad.abs().max() == 0
