"""Rows for what need not be installed: transformer-engine, vLLM with each transport, cuML."""

from __future__ import annotations

import importlib.util
import time
from typing import Literal, get_args

import numpy as np
import torch

from megatron_meds.actor.policy import Policy
from megatron_meds.trajectory import Prompt, Trajectory

from .bench import BF16_ROUNDING, Bench, weighted
from .findings import Finding, NotHere
from .numerics import OF_ROUNDING, against_rounding, mean, packed_against_padded
from .speed import train_with

ANSWERS, TOKENS = 4, 32
"""Responses of each prompt, and tokens of each, in the vLLM rows."""
POINTS = 600
"""Rows of the cuML row."""


def te_parity(bench: Bench) -> Finding:
    """bf16 on transformer-engine's layers against Hugging Face in fp32."""
    _need_te(bench)
    return against_rounding(bench, "te")


def te_packed(bench: Bench) -> Finding:
    """transformer-engine's THD kernels against its rows."""
    _need_te(bench)
    limit = OF_ROUNDING * mean(bench.rounded.logprobs, bench.exact.logprobs) + BF16_ROUNDING
    return packed_against_padded(bench, "bf16", "te", limit)


def te_train(bench: Bench) -> Finding:
    """Tokens a second of an update on transformer-engine's layers."""
    _need_te(bench)
    return train_with(bench, "te")


def vllm_ipc(bench: Bench) -> Finding:
    """A server on the same GPU, weights by CUDA IPC."""
    _need_vllm(bench, 1)
    from megatron_meds.weights.settings import WeightsSettings

    if "ipc" not in get_args(WeightsSettings.model_fields["transport"].annotation):
        raise NotHere("weights.transport has no ipc")
    return sample_and_score(bench, "ipc")


def vllm_nccl(bench: Bench) -> Finding:
    """A server on a second GPU, weights by NCCL."""
    _need_vllm(bench, 2)
    return sample_and_score(bench, "nccl")


def vllm_shm(bench: Bench) -> Finding:
    """A server beside a CPU actor, weights by shared memory."""
    if bench.on_gpu:
        raise NotHere("of CPU servers")
    _need("vllm")
    return sample_and_score(bench, "shm")


def sample_and_score(bench: Bench, transport: Literal["shm", "nccl", "ipc"]) -> Finding:
    """A server started from the model's folder gets the weights of an actor that has moved away from
    it, twice; each time what it samples is scored by the actor. In bf16 the limit is what its rounding
    does to a log-probability."""
    from megatron_meds.rollout.server import Servers
    from megatron_meds.rollout.settings import ServerSettings
    from megatron_meds.weights.settings import WeightsSettings
    from megatron_meds.weights.sync import WeightSync

    server = ServerSettings(kv_cache_gib=0.125, max_num_seqs=32, gpu_memory_utilization=0.25)
    gaps, seconds = [], []
    with (
        bench.policy(bench.precision, lr=1e-2) as policy,
        Servers.start(
            server,
            bench.folder,
            run_dir=bench.work,
            max_model_len=256,
            dtype="bfloat16" if policy.is_bf16 else "float32",
            device="cuda" if bench.on_gpu else "cpu",
            transport=transport,  # type: ignore[arg-type]
            seed=bench.seed,
            first_device=0 if transport == "ipc" else 1,
        ) as servers,
    ):
        sync = WeightSync(
            WeightsSettings(),
            servers.urls,
            policy.live_weights(),
            bench.mesh,
            transport=transport,  # type: ignore[arg-type]
        )
        try:
            sync.connect()
            for version in (1, 2):
                policy.begin_step()
                policy.update(bench.batch(), weighted)
                started = time.perf_counter()
                sync.push(version)
                seconds.append(time.perf_counter() - started)
                gaps.append(_gap(policy, _sample(bench, policy, servers.urls, version)))
        finally:
            sync.close()
    limit = 1e-3
    if bench.on_gpu:
        limit = OF_ROUNDING * mean(bench.rounded.logprobs, bench.exact.logprobs) + BF16_ROUNDING
    return Finding(
        f"actor and server differ by {max(gaps):.1e} in mean log-prob; sync {min(seconds):.2f} s",
        f"{limit:.1e}",
        max(gaps) < limit,
        {"logprob": max(gaps), "sync_seconds": min(seconds)},
    )


def cuml(bench: Bench) -> Finding:
    """cuML's HDBSCAN gives scikit-learn's partition."""
    if not bench.on_gpu:
        raise NotHere("needs a GPU")
    _need("cuml")
    _need("sklearn")
    from cuml.cluster import HDBSCAN as OnGpu  # type: ignore[import-not-found]  # noqa: N811
    from sklearn.cluster import HDBSCAN as OnCpu  # noqa: N811

    random = np.random.default_rng(bench.seed)
    centres = random.normal(size=(12, 14))
    points = centres[random.integers(0, 12, POINTS)] + 0.1 * random.normal(size=(POINTS, 14))
    points = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
    options = {"min_cluster_size": 2, "min_samples": 1, "metric": "euclidean"}
    started = time.perf_counter()
    on_cpu = OnCpu(**options, copy=True).fit_predict(points)
    between = time.perf_counter()
    on_gpu = np.asarray(OnGpu(**options).fit_predict(points))
    ended = time.perf_counter()
    share = float((together(on_cpu) == together(on_gpu)).mean())
    return Finding(
        f"{share:.2%} of pairs alike at n = {POINTS}; "
        f"CPU {between - started:.3f} s, GPU {ended - between:.3f} s",
        "99.9%",
        share >= 0.999,
        {"pairs": share},
    )


def together(labels: np.ndarray) -> np.ndarray:
    """[n, n]: whether two points share a cluster; noise (-1) is with nobody."""
    return (labels[:, None] == labels[None]) & (labels[:, None] >= 0)


def _sample(bench: Bench, policy: Policy, urls: list[str], version: int) -> list[Trajectory]:
    from megatron_meds.rollout.client import Client, Request
    from megatron_meds.rollout.settings import RolloutSettings

    client = Client(
        urls, RolloutSettings(max_tokens=TOKENS), vocabulary=policy.shape.vocab, stop_token_ids=[1]
    )
    client.version = version
    prompts = [t.prompt.token_ids for t in bench.trajectories if len(t.prompt.token_ids) < 200]
    answers = client.sample([Request(list(ids), ANSWERS, seed=7 * version) for ids in prompts])
    return [
        Trajectory(
            Prompt(id=f"p{place}", question="?", token_ids=ids, answer="1"),
            number,
            sample.token_ids,
            "",
            sample.logprobs,
            sample.finish_reason,
            sample.weight_version,
        )
        for place, (ids, group) in enumerate(zip(prompts, answers, strict=True))
        for number, sample in enumerate(group)
    ]


def _gap(policy: Policy, trajectories: list[Trajectory]) -> float:
    """Mean difference of the actor's and the server's log-probabilities."""
    return mean(policy.score(trajectories).logprobs, [np.asarray(t.rollout_logprobs) for t in trajectories])


def _need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise NotHere("not installed")


def _need_te(bench: Bench) -> None:
    if not bench.on_gpu:
        raise NotHere("needs a GPU")
    _need("transformer_engine")


def _need_vllm(bench: Bench, gpus: int) -> None:
    if not bench.on_gpu:
        raise NotHere("needs a GPU")
    _need("vllm")
    if torch.cuda.device_count() < gpus:
        raise NotHere(f"needs {gpus} GPUs")
