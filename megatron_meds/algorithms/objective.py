"""What an update minimises, as a sum over response tokens that adds up over any split.

The normalisation of the whole mini-batch is in the tokens' weights (`weigh`), so that a part's loss
is just a sum. Metrics come out as sums over tokens, beside their count. Letter: N tokens of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from megatron_meds.algorithms.algorithm import Algorithm
from megatron_meds.algorithms.losses import Aggregation, token_policy_loss, token_weights

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
    """The clipped policy loss of an algorithm, less its entropy bonus.

    The returned function takes log-probabilities [N] and entropies [N] with gradients, and arrays
    `old_logprobs`, `advantages`, `weights` [N].
    """

    def objective(logprobs: torch.Tensor, entropy: torch.Tensor, tokens: Tokens) -> Result:
        weights = tokens["weights"]
        counted = (weights > 0).float()
        parts = token_policy_loss(
            logprobs,
            tokens["old_logprobs"],
            tokens["advantages"],
            algorithm.clip_low,
            algorithm.clip_high,
            algorithm.dual_clip,
        )
        loss = (weights * parts.loss).sum()
        metrics = {
            "loss": loss.detach(),
            "tokens": counted.sum(),
            "clip_fraction": (counted * parts.clipped).sum(),
            "dual_clip_fraction": (counted * parts.dual_clipped).sum(),
            "kl_old": (counted * parts.kl).sum(),
        }
        if algorithm.entropy_bonus:
            loss = loss - algorithm.entropy_bonus * (weights * entropy).sum()
        return loss, metrics

    return objective


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


def spread(values: Sequence[float], lengths: Sequence[int]) -> list[np.ndarray]:
    """One fp32 array [T] per sequence, filled with its value."""
    return [np.full(n, v, dtype=np.float32) for v, n in zip(values, lengths, strict=True)]
