"""Rows that compare the actor's numbers with Hugging Face's and torch's, and layouts with each other."""

from __future__ import annotations

import numpy as np
import torch
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file

from megatron_meds.actor.policy import Policy

from .bench import BF16_ROUNDING, Bench, Precision, Reference, reference_backward, weighted
from .findings import Finding

FP32_LOGPROB = 1e-3
"""Largest difference of a log-probability between two fp32 implementations that add in another order."""
FP32_GRADIENT = 1e-3
"""Largest relative difference (L2 norm) of a tensor's gradient there."""
OF_ROUNDING = 2.0
"""The actor in bf16 may be this many times as far from fp32 as Hugging Face in bf16 is."""


def parity_fp32(bench: Bench) -> Finding:
    """Log-probabilities, entropies and every tensor's gradient, fp32 against Hugging Face in fp32."""
    with bench.policy("fp32") as policy:
        found = actor_numbers(bench, policy)
    logprob = largest(found.logprobs, bench.exact.logprobs)
    entropy = largest(found.entropy, bench.exact.entropy)
    name, gradient = worst_gradient(found.gradient, bench.exact.gradient)
    return Finding(
        f"log-prob {logprob:.1e}, entropy {entropy:.1e}, gradient {gradient:.1e} ({name})",
        f"{FP32_LOGPROB:.0e}, {FP32_LOGPROB:.0e}, {FP32_GRADIENT:.0e}",
        logprob < FP32_LOGPROB and entropy < FP32_LOGPROB and gradient < FP32_GRADIENT,
        {"logprob": logprob, "entropy": entropy, "gradient": gradient},
    )


def parity_bf16(bench: Bench) -> Finding:
    """The same in bf16 on the local layers, held to what rounding to bf16 does to Hugging Face."""
    return against_rounding(bench, "sdpa")


def against_rounding(bench: Bench, attention: str) -> Finding:
    """The actor in bf16 with one kind of attention, against Hugging Face in fp32. The limit is the
    error of Hugging Face's own bf16 pass, times OF_ROUNDING, plus one rounding."""
    with bench.policy("bf16", attention=attention) as policy:
        found = actor_numbers(bench, policy)
    exact, rounded = bench.exact, bench.rounded
    logprob, entropy = mean(found.logprobs, exact.logprobs), mean(found.entropy, exact.entropy)
    gradient = overall_gradient(found.gradient, exact.gradient)
    limits = [
        OF_ROUNDING * error + BF16_ROUNDING
        for error in (
            mean(rounded.logprobs, exact.logprobs),
            mean(rounded.entropy, exact.entropy),
            overall_gradient(rounded.gradient, exact.gradient),
        )
    ]
    errors = [logprob, entropy, gradient]
    return Finding(
        f"mean log-prob {logprob:.1e}, entropy {entropy:.1e}, gradient {gradient:.1e}",
        ", ".join(f"{limit:.1e}" for limit in limits) + f" ({OF_ROUNDING:g} x Hugging Face's bf16)",
        all(error < limit for error, limit in zip(errors, limits, strict=True)),
        {"logprob": logprob, "entropy": entropy, "gradient": gradient, "limit_logprob": limits[0]},
    )


def packed_fp32(bench: Bench) -> Finding:
    """Packed sequences score as padded rows do, fp32."""
    return packed_against_padded(bench, "fp32", "sdpa", FP32_LOGPROB)


def packed_bf16(bench: Bench) -> Finding:
    """The same in bf16, within what its rounding does to a log-probability."""
    limit = OF_ROUNDING * mean(bench.rounded.logprobs, bench.exact.logprobs) + BF16_ROUNDING
    return packed_against_padded(bench, "bf16", "sdpa", limit)


def packed_against_padded(bench: Bench, precision: Precision, attention: str, limit: float) -> Finding:
    """Mean difference of the log-probabilities of the parity batch, packed and padded."""
    scores = []
    for batching in ("packed", "padded"):
        with bench.policy(precision, attention=attention, batching=batching) as policy:
            scores.append(policy.score(bench.trajectories).logprobs)
    gap = mean(*scores)
    return Finding(f"mean log-prob {gap:.1e}", f"{limit:.1e}", gap < limit, {"logprob": gap})


def update(bench: Bench) -> Finding:
    """Two updates in fp32 are those of torch's AdamW on the Hugging Face model, clipped alike."""
    with bench.policy("fp32") as policy:
        for _ in range(2):
            policy.begin_step()
            policy.update(bench.batch(), weighted)
        ours = {name: t.clone() for name, t in policy.live_weights().tensors() if t is not None}
    model = bench.hugging_face(torch.float32)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == decayed], "weight_decay": decay}
        for decayed, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        reference_backward(bench, model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    gaps = {}
    for name, parameter in model.named_parameters():
        moved = (parameter.detach() - start[name]).abs().mean()
        gaps[name] = float((ours[name] - parameter.detach()).abs().mean() / moved)
    name, gap = max(gaps.items(), key=lambda item: item[1])
    return Finding(
        f"weights differ by {gap:.1e} of their way ({name})", "1e-02", gap < 1e-2, {"weights": gap}
    )


def round_trip(bench: Bench) -> Finding:
    """The weights that come out of the live actor are those that went in, bit by bit."""
    written = load_file(bench.folder / "model.safetensors")
    with bench.policy("bf16") as policy:
        seen = {name: t.cpu() for name, t in policy.live_weights().tensors() if t is not None}
    different = [name for name in seen if not torch.equal(seen[name], written[name])]
    absent = sorted(set(written) - set(seen) - {"lm_head.weight"})
    return Finding(
        f"{len(seen)} tensors, {len(different)} differ, {len(absent)} absent",
        "equal",
        not different and not absent,
        {"tensors": len(seen), "different": len(different)},
    )


def actor_numbers(bench: Bench, policy: Policy) -> Reference:
    """The parity batch through the actor. Afterwards its parameters hold the gradient."""
    scores = policy.score(bench.trajectories)
    policy.backward(bench.batch(), weighted)
    for chunk in policy.chunks:
        for parameter in unwrap_model(chunk).parameters():
            parameter.data.copy_(parameter.main_grad)
    gradient = {name: t.float() for name, t in policy.live_weights().tensors() if t is not None}
    return Reference(scores.logprobs, scores.entropy, gradient)


def largest(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))


def mean(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(found) - np.concatenate(wanted)).mean())


def worst_gradient(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[str, float]:
    """The tensor whose gradient is furthest off, and by how much of its L2 norm."""
    errors = {name: float((found[name] - w).norm() / w.norm()) for name, w in wanted.items()}
    return max(errors.items(), key=lambda item: item[1])


def overall_gradient(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Difference of two gradients over all tensors, as a part of the second's L2 norm."""
    gap = sum(float((found[name] - w).square().sum()) for name, w in wanted.items())
    return (gap / sum(float(w.square().sum()) for w in wanted.values())) ** 0.5
