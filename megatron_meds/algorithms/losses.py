"""The clipped policy loss, the ways to add up its tokens, and the terms that go with it.

Everything is built from two parts that do not depend on how a batch is cut: the loss of one token
(`token_policy_loss`) and the weight of a token in the whole mini-batch (`token_weights`). A trainer
that packs sequences, or spreads them over replicas, uses these two with counts of the whole
mini-batch and adds up; `policy_loss` puts them together for one padded batch.
Knows tensors only. Letters: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are held within this of 0 before the exponential, so that no loss or KL overflows."""


@dataclass(frozen=True)
class TokenLoss:
    """What `token_policy_loss` says of every token; all of one shape, fp32 (or fp64)."""

    loss: torch.Tensor
    """Token loss; gradients flow to `logprobs`."""
    clipped: torch.Tensor
    """1 where the ratio clip is what counts (no gradient there), else 0."""
    dual_clipped: torch.Tensor
    """1 where the dual clip is what counts, else 0."""
    kl: torch.Tensor
    """k3 estimate of KL(old || new), no gradient: ratio - 1 - log ratio."""


def token_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """The clipped surrogate of every token.

        ratio = exp(logprob - old_logprob)
        loss  = max(-A ratio, -A clamp(ratio, 1 - clip_low, 1 + clip_high))
        A < 0 with a dual clip c:  loss = min(loss, -A c)

    Args:
        logprobs: [...] of the sampled tokens under the policy that learns, fp32 or fp64.
        old_logprobs: [...] of the same tokens under the policy before the update; no gradient flows.
        advantages: [...]
        clip_low: lower clip range.
        clip_high: upper clip range; larger than `clip_low` is DAPO's clip-higher.
        dual_clip: bound c > 1 of the ratio where A < 0; None: none.

    Returns:
        `TokenLoss` of tensors [...].

    Sources: PPO (arXiv 1707.06347), equation 7; dual clip (arXiv 1912.09729), equation 5.
    """
    return clipped_surrogate(logprobs - old_logprobs.detach(), advantages, clip_low, clip_high, dual_clip)


def clipped_surrogate(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """`token_policy_loss` of log-ratios [...], whatever they are the ratio of; gradients flow to them."""
    log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, bounded)
    clipped = (bounded > plain).to(loss.dtype)
    dual_clipped = torch.zeros_like(clipped)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss = torch.where(beyond, bound, loss)
        dual_clipped = beyond.to(loss.dtype)
    kl = (ratio - 1.0 - log_ratio).detach()
    return TokenLoss(loss, clipped, dual_clipped, kl)


def sequence_means(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """At each token the mean of its sequence, gradients included (GSPO's log-ratio).

    Args:
        values: [N] of whole sequences, laid end to end.
        sequences: [N] a number at each token; tokens of one sequence lie together and share it,
            neighbouring sequences differ.

    Source: GSPO (arXiv 2507.18071), equation 7.
    """
    _, places, counts = torch.unique_consecutive(sequences, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add(0, places, values)
    return (sums / counts)[places]


def entropy_advantages(
    advantages: torch.Tensor, entropies: torch.Tensor, coefficient: float = 0.4, divisor: float = 2.0
) -> torch.Tensor:
    """What is added to advantages [...] for the entropy of a token's distribution (nats), no gradient.

        min(coefficient * H, |A| / divisor)

    Source: arXiv 2506.14758.
    """
    return torch.minimum(coefficient * entropies.detach(), advantages.detach().abs() / divisor)


def token_weights(
    lengths: torch.Tensor, aggregation: Aggregation, padded_length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What one token of each sequence weighs, and what the weighted sum is divided by.

        loss = sum over sequences i and tokens t of weight_i * loss_it / denominator

    | aggregation             | weight            | denominator |
    |-------------------------|-------------------|-------------|
    | token-mean              | 1                 | tokens      |
    | seq-mean-token-sum      | 1                 | sequences   |
    | seq-mean-token-mean     | 1 / length        | sequences   |
    | seq-mean-token-sum-norm | 1 / padded_length | sequences   |

    Denominators of parts of a mini-batch add up to that of the whole. Dividing every part by the
    whole's makes the sum of the parts' losses, and of their gradients, the same for every split.

    Args:
        lengths: [B] integers, tokens of each sequence that count; a sequence of 0 counts for nothing,
            not even as a sequence.
        aggregation: how token losses become one number.
        padded_length: of `seq-mean-token-sum-norm`: one constant for the whole run, such as the
            longest response allowed.

    Returns:
        weights [B] fp64 and the denominator, a scalar fp64, on the device of `lengths`.

    Raises:
        ValueError: an unknown aggregation, or a missing `padded_length`.
    """
    n = lengths.double()
    counted = (n > 0).double()
    if aggregation == "token-mean":
        return counted, n.sum()
    if aggregation == "seq-mean-token-sum":
        return counted, counted.sum()
    if aggregation == "seq-mean-token-mean":
        return counted / n.clamp(min=1.0), counted.sum()
    if aggregation == "seq-mean-token-sum-norm":
        if padded_length is None:
            raise ValueError("aggregation seq-mean-token-sum-norm needs padded_length")
        return counted / padded_length, counted.sum()
    raise ValueError(f"unknown aggregation {aggregation!r}")


def aggregate(
    token_values: torch.Tensor,
    mask: torch.Tensor,
    aggregation: Aggregation,
    denominator: float | torch.Tensor | None = None,
    padded_length: int | None = None,
) -> torch.Tensor:
    """One number from the values of a padded batch's tokens, by the weights of `token_weights`.

    Args:
        token_values: [B, T]; what stands outside the mask, NaN included, has no effect.
        mask: [B, T] bool or 0 / 1.
        aggregation: see `token_weights`.
        denominator: the whole mini-batch's, where this batch is a part of it; None: this batch's own.
        padded_length: of `seq-mean-token-sum-norm`; None: T.

    Returns:
        A scalar of the dtype of `token_values`; 0 where no token counts.
    """
    inside = mask.bool()
    weights, own = token_weights(inside.sum(dim=1), aggregation, padded_length or mask.shape[1])
    values = torch.where(inside, token_values, 0.0) * weights.unsqueeze(1).to(token_values.dtype)
    divisor = own.clamp(min=1.0) if denominator is None else denominator
    return (values.sum() / divisor).to(token_values.dtype)


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: float | torch.Tensor | None = None,
    padded_length: int | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped policy loss of a padded batch.

    Args:
        logprobs: [B, T] of the sampled tokens under the policy that learns.
        old_logprobs: [B, T] of the same tokens under the policy before the update.
        advantages: [B, T], or [B] for one advantage per sequence.
        mask: [B, T] bool or 0 / 1; what stands outside, NaN included, has no effect.
        clip_low, clip_high, dual_clip: see `token_policy_loss`.
        aggregation: see `token_weights`.
        denominator: where the batch is a part (a micro-batch, a replica's share): that of the whole,
            from `token_weights` of all lengths. The parts' losses then add up to the whole's.
        padded_length: of `seq-mean-token-sum-norm`; None: T. Give it where the batch is a part.

    Returns:
        The loss, a scalar, and metrics as scalars without gradient, means over this batch's tokens:
        `clip_fraction`, `dual_clip_fraction`, `approx_kl` (k3 of KL(old || new)).
    """
    inside = mask.bool()
    per_token = advantages.unsqueeze(1).expand_as(logprobs) if advantages.dim() == 1 else advantages
    # Outside the mask everything is made 0 before any arithmetic: 0 * NaN is NaN in a gradient too.
    tokens = token_policy_loss(
        logprobs.masked_fill(~inside, 0.0),
        old_logprobs.masked_fill(~inside, 0.0),
        per_token.masked_fill(~inside, 0.0),
        clip_low,
        clip_high,
        dual_clip,
    )
    loss = aggregate(tokens.loss, inside, aggregation, denominator, padded_length)
    count = inside.sum().clamp(min=1)
    metrics = {
        "clip_fraction": tokens.clipped.sum() / count,
        "dual_clip_fraction": tokens.dual_clipped.sum() / count,
        "approx_kl": tokens.kl.sum() / count,
    }
    return loss, metrics


def token_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped squared error of every value.

        bounded = old + clamp(value - old, -clip, clip)
        loss    = max((value - return)^2, (bounded - return)^2) / 2

    Args:
        values: [...] of the critic that learns, fp32 or fp64.
        old_values: [...] of the critic before the update; no gradient flows.
        returns: [...] what the values are to be.
        clip: clip range; infinity is no clip.

    Returns:
        losses [...], gradients flow to `values`, and 1 [...] where the clip is what counts (no gradient
        there), else 0.

    Source: PPO's public code (github.com/openai/baselines, ppo2).
    """
    moved = values - old_values.detach()
    plain = (values - returns).square()
    bounded = (old_values.detach() + moved.clamp(-clip, clip) - returns).square()
    clipped = (bounded > plain) & (moved.abs() > clip)  # within the range they differ by rounding
    return 0.5 * torch.maximum(plain, bounded), clipped.to(values.dtype)


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    clip: float = 0.5,
    aggregation: Aggregation = "token-mean",
    denominator: float | torch.Tensor | None = None,
    padded_length: int | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped value loss of a padded batch.

    Args:
        values, old_values, returns, clip: [B, T], see `token_value_loss`.
        mask: [B, T] bool or 0 / 1; what stands outside, NaN included, has no effect.
        aggregation, denominator, padded_length: see `policy_loss`.

    Returns:
        The loss, a scalar, and `clip_fraction`, a scalar without gradient, over this batch's tokens.
    """
    inside = mask.bool()
    losses, clipped = token_value_loss(
        values.masked_fill(~inside, 0.0),
        old_values.masked_fill(~inside, 0.0),
        returns.masked_fill(~inside, 0.0),
        clip,
    )
    loss = aggregate(losses, inside, aggregation, denominator, padded_length)
    return loss, {"clip_fraction": clipped.sum() / inside.sum().clamp(min=1)}


def kl_k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(policy || reference) at each token sampled from the policy.

        k3 = exp(d) - 1 - d          d = reference_logprob - logprob

    Never negative, unbiased, 0 where the two agree.

    Args:
        logprobs: [...] of the sampled tokens under the policy; gradients flow.
        reference_logprobs: [...] of the same tokens under the reference; no gradient flows.

    Returns:
        [...], nats.

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    d = (reference_logprobs.detach() - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(d) - d


def kl_k1(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """The k1 estimate of KL(policy || reference): logprob - reference_logprob, bounded as `kl_k3`.

    Unbiased, of either sign. For rewards: as a loss its gradient is 0 on average.
    """
    return (logprobs - reference_logprobs.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of softmax distributions, nats.

    Args:
        logits: [..., V], any floating dtype; -inf is a probability of 0.

    Returns:
        [...] fp32 (fp64 for fp64 logits).
    """
    x = logits if logits.dtype == torch.float64 else logits.float()
    log_p = torch.log_softmax(x, dim=-1)
    p = log_p.exp()
    return -torch.where(p > 0, p * log_p, 0.0).sum(dim=-1)


def truncated_importance_weights(
    actor_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, cap: float = 2.0
) -> torch.Tensor:
    """Weights that make samples of the serving engine count as samples of the actor.

        w = min(exp(actor_logprob - rollout_logprob), cap)

    Args:
        actor_logprobs: [...] of the sampled tokens under the actor that sampled them (before the update).
        rollout_logprobs: [...] as the engine reported them; NaN or infinite (not reported) is neutral,
            weight 1.
        cap: largest weight.

    Returns:
        [...], no gradient; multiply token losses with it.
    """
    gap = (actor_logprobs - rollout_logprobs).detach()
    gap = torch.where(torch.isfinite(rollout_logprobs), gap, 0.0)
    return gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(max=cap)
