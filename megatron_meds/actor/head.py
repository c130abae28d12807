"""The language-model head in chunks: log-probability and entropy of each token, without full logits.

Forward keeps one normaliser per token; backward computes each chunk's logits again. At most
[chunk, V / tensor] logits exist at once. Knows the vocabulary's cut over tensor ranks; not what
the log-probabilities are for. Letters: N tokens, H hidden, V this rank's vocabulary rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_HIDDEN = -1e30
"""Logit of a padded vocabulary row: finite, so that 0 * logit is 0 and not NaN."""


def token_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float,
    chunk: int,
    vocabulary: int,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of its distribution at the given temperature.

    Args:
        hidden_NH: the same on every rank of `group`. Its gradient is this rank's part only: the
            caller sums it over the group (megatron's `copy_to_tensor_model_parallel_region`, or a
            gather whose backward is a reduce-scatter).
        weight_VH: this rank's rows of the head; rank r holds rows [r * V, (r + 1) * V).
        targets_N: int64, numbers in the whole vocabulary.
        vocabulary: real vocabulary size; rows from there on are padding and never enter the softmax.
        group: tensor-parallel group; None for one rank.

    Returns:
        log-probabilities [N] and entropies [N] in nats, fp32, equal on every rank, both with gradients.
    """
    return _ChunkedHead.apply(hidden_NH, weight_VH, targets_N, temperature, chunk, vocabulary, group)


class _Shard:
    """What a rank needs to know of the cut of the vocabulary."""

    def __init__(self, weight_VH: torch.Tensor, vocabulary: int, group: dist.ProcessGroup | None) -> None:
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.rows = weight_VH.shape[0]
        self.start = self.rows * (dist.get_rank(self.group) if self.group is not None else 0)
        self.real = min(max(vocabulary - self.start, 0), self.rows)

    def logits(self, hidden: torch.Tensor, weight_VH: torch.Tensor, temperature: float) -> torch.Tensor:
        """fp32 [chunk, V], divided by the temperature, padding out of reach."""
        logits = torch.matmul(hidden, weight_VH.t()).float()
        if temperature != 1.0:
            logits.div_(temperature)
        if self.real < self.rows:
            logits[:, self.real :] = _HIDDEN
        return logits

    def local(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row numbers clamped into this shard, and which targets really lie in it."""
        rows = targets - self.start
        inside = (rows >= 0) & (rows < self.rows)
        return rows.clamp(0, self.rows - 1), inside

    def reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, targets_N, temperature, chunk, vocabulary, group):
        shard = _Shard(weight_VH, vocabulary, group)
        count = hidden_NH.shape[0]
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden_NH.device)
        entropy = torch.empty_like(logprobs)
        normaliser = torch.empty_like(logprobs)
        for start in range(0, count, chunk):
            part = slice(start, min(start + chunk, count))
            logits = shard.logits(hidden_NH[part], weight_VH, temperature)
            rows, inside = shard.local(targets_N[part])
            top = shard.reduce(logits.max(dim=-1).values, dist.ReduceOp.MAX)
            target = logits.gather(-1, rows[:, None])[:, 0].masked_fill(~inside, 0.0)
            weights = logits.sub(top[:, None]).exp_()
            sums = torch.stack([weights.sum(-1), torch.einsum("nv,nv->n", weights, logits), target])
            total, weighted, target = shard.reduce(sums, dist.ReduceOp.SUM)
            normaliser[part] = top + total.log()
            logprobs[part] = target - normaliser[part]
            entropy[part] = normaliser[part] - weighted / total
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, normaliser, entropy)
        ctx.shard, ctx.temperature, ctx.chunk = shard, temperature, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[override]
        hidden_NH, weight_VH, targets_N, normaliser, entropy = ctx.saved_tensors
        shard, temperature, chunk = ctx.shard, ctx.temperature, ctx.chunk
        grad_hidden = torch.empty_like(hidden_NH)
        grad_weight = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        with_entropy = bool(grad_entropy.any())
        for start in range(0, hidden_NH.shape[0], chunk):
            part = slice(start, min(start + chunk, hidden_NH.shape[0]))
            logits = shard.logits(hidden_NH[part], weight_VH, temperature)
            rows, inside = shard.local(targets_N[part])
            logp = logits.sub_(normaliser[part, None])
            prob = logp.exp()
            grad = prob * -grad_logprobs[part, None]
            if with_entropy:  # dH/dlogit = -p (log p + H)
                grad -= grad_entropy[part, None] * prob * (logp + entropy[part, None])
            grad.scatter_add_(-1, rows[:, None], (grad_logprobs[part] * inside)[:, None])
            grad.div_(temperature)
            grad = grad.to(weight_VH.dtype)  # tensor cores take bf16; chunks are added up in fp32
            grad_hidden[part] = torch.matmul(grad, weight_VH)
            if weight_VH.dtype is torch.float32:
                grad_weight.addmm_(grad.t(), hidden_NH[part])
            else:
                grad_weight += torch.matmul(grad.t(), hidden_NH[part])
        return grad_hidden, grad_weight.to(weight_VH.dtype), None, None, None, None, None
