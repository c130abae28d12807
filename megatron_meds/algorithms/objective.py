"""What an update minimises, as a sum over response tokens that adds up over any split.

The normalisation of the whole mini-batch is in the tokens' weights (`weigh`), so that a part's loss
is just a sum. Metrics come out as sums over tokens, beside their count. Letter: N tokens of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from megatron_meds.algorithms.algorithm import Algorithm, known, spread
from megatron_meds.algorithms.losses import (
    Aggregation,
    clipped_surrogate,
    entropy_advantages,
    kl_k3,
    sequence_means,
    token_value_loss,
    token_weights,
)
from megatron_meds.algorithms.mismatch import importance_weights
from megatron_meds.trajectory import Trajectory

Tokens = Mapping[str, torch.Tensor]
"""Arrays [N] by name, fp32."""
Result = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""(scalar to minimise, metrics as sums)."""


def weigh(
    lengths: Sequence[int],
    aggregation: Aggregation,
    padded_length: int,
    whole: Callable[[float], float],
) -> list[float]:
    """The weight of one token of each sequence, normalised over the whole mini-batch.

    Args:
        lengths: tokens that count of each sequence of this part; 0 leaves a sequence out.
        padded_length: the longest response allowed (`seq-mean-token-sum-norm`).
        whole: adds a part's denominator up over all parts (an all-reduce over replicas).
    """
    counts = torch.tensor(list(lengths), dtype=torch.int64)
    weights, denominator = token_weights(counts, aggregation, padded_length)
    total = max(whole(float(denominator)), 1.0)
    return (weights / total).tolist()


def policy_objective(algorithm: Algorithm) -> Callable[[torch.Tensor, torch.Tensor, Tokens], Result]:
    """What an algorithm minimises: clipped policy loss, KL to the reference, less the entropy bonus.

        sum over tokens of weight * (importance * surrogate + kl_loss * k3 - entropy_bonus * H)

    The returned function takes log-probabilities [N] and entropies [N] with gradients, and the
    arrays [N] that `token_arrays` makes. All terms have the weights of the aggregation; importance
    weights are on the policy loss alone.
    """

    def objective(logprobs: torch.Tensor, entropy: torch.Tensor, tokens: Tokens) -> Result:
        weights, advantages = tokens["weights"], tokens["advantages"]
        counted = (weights > 0).float()
        log_ratio = logprobs - tokens["old_logprobs"]
        if algorithm.ratio == "sequence":
            log_ratio = sequence_means(log_ratio, tokens["sequence"])
        if bonus := algorithm.entropy_advantage:
            advantages = advantages + entropy_advantages(
                advantages, entropy, bonus.coefficient, bonus.divisor
            )
        parts = clipped_surrogate(
            log_ratio, advantages, algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip
        )
        surrogate = parts.loss
        if algorithm.importance_cap is not None:
            surrogate = surrogate * tokens["importance"]
        loss = (weights * surrogate).sum()
        old_kl = kl_k3(tokens["old_logprobs"], logprobs.detach())
        metrics = {
            "tokens": counted.sum(),
            "clip_fraction": (counted * parts.clipped).sum(),
            "dual_clip_fraction": (counted * parts.dual_clipped).sum(),
            "kl_old": (counted * old_kl).sum(),
        }
        if algorithm.kl_loss:
            kl = kl_k3(logprobs, tokens["reference_logprobs"])
            loss = loss + algorithm.kl_loss * (weights * kl).sum()
            metrics["kl_reference"] = (counted * kl.detach()).sum()
        if algorithm.entropy_bonus:
            loss = loss - algorithm.entropy_bonus * (weights * entropy).sum()
        return loss, metrics | {"loss": loss.detach()}

    return objective


def token_arrays(
    algorithm: Algorithm,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[np.ndarray],
    weights: Sequence[float],
) -> dict[str, list[np.ndarray]]:
    """The arrays [T] of scored trajectories that an algorithm's objective reads, by name.

    Args:
        advantages: [T] of each trajectory.
        weights: of one token of each, from `weigh`.
    """
    lengths = [len(t) for t in trajectories]
    arrays = {
        "old_logprobs": [known(t.logprobs, "logprobs", t) for t in trajectories],
        "advantages": list(advantages),
        "weights": spread(weights, lengths),
    }
    if algorithm.ratio == "sequence":
        arrays["sequence"] = spread(range(len(lengths)), lengths)
    if algorithm.importance_cap is not None:
        arrays["importance"] = [importance_weights(t, algorithm.importance_cap) for t in trajectories]
    if algorithm.kl_loss:
        arrays["reference_logprobs"] = [
            known(t.reference_logprobs, "reference_logprobs", t) for t in trajectories
        ]
    return arrays


def value_objective(clip: float) -> Callable[[torch.Tensor, Tokens], Result]:
    """What a critic minimises: the clipped value loss.

        sum over tokens of weight * token_value_loss

    The returned function takes values [N] with gradients, and the arrays [N] that `value_arrays` makes.
    """

    def objective(values: torch.Tensor, tokens: Tokens) -> Result:
        weights = tokens["value_weights"]
        counted = (weights > 0).float()
        loss, clipped = token_value_loss(values, tokens["values"], tokens["returns"], clip)
        total = (weights * loss).sum()
        metrics = {
            "tokens": counted.sum(),
            "clip_fraction": (counted * clipped).sum(),
            "loss": total.detach(),
        }
        return total, metrics

    return objective


def value_arrays(
    trajectories: Sequence[Trajectory], returns: Sequence[np.ndarray | None], weights: Sequence[float]
) -> dict[str, list[np.ndarray]]:
    """The arrays [T] of scored trajectories that `value_objective` reads, by name.

    Args:
        returns: what an algorithm's `returns` gave; None where there is nothing to learn.
        weights: of one token of each, from `weigh`; 0 where there are no returns.
    """
    lengths = [len(t) for t in trajectories]
    return {
        "values": [known(t.values, "values", t) for t in trajectories],
        "returns": [
            np.zeros(n, dtype=np.float32) if targets is None else targets
            for targets, n in zip(returns, lengths, strict=True)
        ],
        "value_weights": spread(weights, lengths),
    }


def supervised_objective(logprobs: torch.Tensor, entropy: torch.Tensor, tokens: Tokens) -> Result:
    """Cross-entropy of given responses: minus the weighted sum of log-probabilities [N]."""
    weights = tokens["weights"]
    loss = -(weights * logprobs).sum()
    metrics = {
        "loss": loss.detach(),
        "tokens": (weights > 0).float().sum(),
        "nll": -(logprobs.detach() * (weights > 0)).sum(),
        "entropy": (entropy.detach() * (weights > 0)).sum(),
    }
    return loss, metrics
