"""Rows that time the actor and watch its memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np
import torch

from megatron_meds.actor.learning import MiniBatch
from megatron_meds.actor.policy import Policy
from megatron_meds.algorithms import resolve
from megatron_meds.algorithms.objective import policy_objective
from megatron_meds.algorithms.settings import AlgorithmSettings
from megatron_meds.trajectory import Trajectory

from .bench import DTYPES, Bench, Precision, Size
from .findings import Finding

CYCLES = 6
"""Score passes and updates of the memory row."""
WARM_UP = 2
"""Of these, the ones after which memory need not be level yet."""
GPU_SLACK = 64 * 2**10
"""Bytes that a GPU's allocated memory may differ by from cycle to cycle."""


def matmul(bench: Bench) -> Finding:
    """The rate of a large matrix product, which the throughput rows are measured against."""
    rates = {name: matmul_rate(bench, name) for name in ("bf16", "fp32")}
    text = ", ".join(f"{name} {rate:.4g}" for name, rate in rates.items())
    return Finding(f"{text} TFLOP/s at {bench.size.matmul}", numbers=rates)


def matmul_rate(bench: Bench, precision: Precision) -> float:
    """TFLOP/s of a square product."""
    side = bench.size.matmul
    a, b = (torch.randn(side, side, device=bench.device, dtype=DTYPES[precision]) for _ in range(2))
    seconds = bench.seconds(lambda: a @ b, warm_up=3, times=7)
    return 2 * side**3 / seconds / 1e12


def score(bench: Bench) -> Finding:
    """Tokens a second of the score pass."""
    trajectories = bench.timed_trajectories()
    with bench.policy(bench.precision, timed=True) as policy:
        seconds = bench.seconds(lambda: policy.score(trajectories), warm_up=2, times=3)
    return _throughput(bench, trajectories, seconds, forward_flops(bench.size, trajectories))


def train(bench: Bench) -> Finding:
    """Tokens a second of an update with the policy loss."""
    return train_with(bench, "auto")


def train_with(bench: Bench, attention: str) -> Finding:
    """Tokens a second of an update with one kind of attention."""
    trajectories = bench.timed_trajectories()
    objective = policy_objective(resolve(AlgorithmSettings()))
    with bench.policy(bench.precision, attention=attention, timed=True, lr=1e-6) as policy:
        batch = _learnable(policy, trajectories)

        def one() -> None:
            policy.begin_step()
            policy.update(batch, objective)

        seconds = bench.seconds(one, warm_up=2, times=3)
    return _throughput(bench, trajectories, seconds, 3 * forward_flops(bench.size, trajectories))


def memory(bench: Bench) -> Finding:
    """Bytes allocated after each of some score passes and updates: level once warm."""
    trajectories = bench.timed_trajectories()
    objective = policy_objective(resolve(AlgorithmSettings()))
    seen = []
    with bench.policy(bench.precision, timed=True, lr=1e-6) as policy:
        for _ in range(CYCLES):
            policy.begin_step()
            policy.update(_learnable(policy, trajectories), objective)
            seen.append(allocated(bench))
    level = seen[WARM_UP:]
    spread = max(level) - min(level)
    limit = GPU_SLACK if bench.on_gpu else 0
    text = f"{level[-1] / 2**20:.1f} MiB, {spread} bytes apart"
    if bench.on_gpu:
        text += f", peak {torch.cuda.max_memory_allocated(bench.device) / 2**30:.1f} GiB"
    return Finding(
        text, f"{limit} bytes", spread <= limit, {"allocated": float(level[-1]), "spread": float(spread)}
    )


def allocated(bench: Bench) -> int:
    """Bytes that tensors hold: of the GPU's allocator, or of all live tensors of the CPU."""
    gc.collect()
    if bench.on_gpu:
        return torch.cuda.memory_allocated(bench.device)
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if type(x) in (torch.Tensor, torch.nn.Parameter)
    }
    return sum(storages.values())


def forward_flops(size: Size, trajectories: Sequence[Trajectory]) -> float:
    """FLOPs of one forward pass without what is computed again: matrix products of all tokens, causal
    attention (half of the square), the head at response tokens only."""
    lengths = [len(t.prompt.token_ids) + len(t.response_ids) - 1 for t in trajectories]
    attention = size.heads * size.head_dim
    layer = size.hidden * size.head_dim * (size.heads + 2 * size.kv_heads)
    layer += attention * size.hidden + 3 * size.hidden * size.intermediate
    pairs = sum(s * (s + 1) / 2 for s in lengths)
    head = size.hidden * size.vocab * sum(len(t) for t in trajectories)
    return 2.0 * (size.layers * (layer * sum(lengths) + 2 * attention * pairs) + head)


def _learnable(policy: Policy, trajectories: list[Trajectory]) -> MiniBatch:
    """A mini-batch of the policy loss: scored, advantages of both signs, token-mean weights."""
    known = policy.score(trajectories).logprobs
    tokens = sum(len(t) for t in trajectories)
    signs = [1.0 if index % 2 else -1.0 for index in range(len(trajectories))]
    return MiniBatch(
        trajectories,
        {
            "old_logprobs": known,
            "advantages": [
                np.full(len(t), sign, np.float32) for t, sign in zip(trajectories, signs, strict=True)
            ],
            "weights": [np.full(len(t), 1.0 / tokens, np.float32) for t in trajectories],
        },
    )


def _throughput(bench: Bench, trajectories: Sequence[Trajectory], seconds: float, flops: float) -> Finding:
    tokens = sum(len(t.prompt.token_ids) + len(t.response_ids) - 1 for t in trajectories)
    rate, reachable = flops / seconds / 1e12, matmul_rate(bench, bench.precision)
    return Finding(
        f"{tokens / seconds:,.0f} tokens/s, {rate:.4g} TFLOP/s, MFU {rate / reachable:.0%} of a "
        f"{bench.precision} matmul",
        numbers={"tokens_per_second": tokens / seconds, "tflops": rate, "mfu": rate / reachable},
    )
