"""What the rows share: a random Qwen3 on disk, trajectories, the actor, Hugging Face beside it, clocks.

Knows no row. Everything runs in this process, which is a run of one rank.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from megatron_meds.actor.learning import MiniBatch
from megatron_meds.actor.mesh import Mesh, pick_device
from megatron_meds.actor.policy import Policy
from megatron_meds.actor.settings import ActorSettings, LayoutSettings, ModelSettings, OptimizerSettings
from megatron_meds.trajectory import Prompt, Trajectory

Precision = Literal["bf16", "fp32"]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
BF16_ROUNDING = 2.0**-9
"""Largest relative error of rounding a number to bf16."""


@dataclass(frozen=True)
class Size:
    """A model and the batches it is checked with."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    parity: tuple[tuple[int, int], ...]
    """(prompt, response) tokens of each sequence that is compared with Hugging Face."""
    parity_budget: int
    """Tokens of a micro-batch there: several micro-batches."""
    sequences: int
    """Sequences of a timed pass."""
    longest: int
    """Tokens of the longest of them; the shortest has a quarter."""
    budget: int
    """Tokens of a micro-batch there."""
    head_chunk: int
    matmul: int
    """Rows and columns of the matrices whose product is the card's measured rate."""


SIZES = {
    "tiny": Size(
        hidden=64,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=32,
        intermediate=96,
        vocab=151,
        parity=((3, 9), (8, 1), (1, 17), (5, 5), (12, 2), (2, 30), (4, 7)),
        parity_budget=24,
        sequences=8,
        longest=64,
        budget=128,
        head_chunk=32,
        matmul=256,
    ),
    "0.6b": Size(
        hidden=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=3072,
        vocab=151936,
        parity=((24, 300), (80, 1), (1, 170), (50, 450), (120, 20), (200, 300), (40, 70), (7, 129)),
        parity_budget=700,
        sequences=48,
        longest=4096,
        budget=8192,
        head_chunk=2048,
        matmul=8192,
    ),
}


@dataclass(frozen=True)
class Reference:
    """What Hugging Face says of the parity batch."""

    logprobs: list[np.ndarray]
    entropy: list[np.ndarray]
    gradient: dict[str, torch.Tensor]
    """fp32, under Hugging Face names."""


@dataclass
class Bench:
    """One device, one model, one process group of one rank."""

    device: torch.device
    size: Size
    folder: Path
    """Hugging Face folder of the model, bf16."""
    work: Path
    """For what a row writes."""
    mesh: Mesh
    seed: int
    trajectories: list[Trajectory] = field(default_factory=list)
    """The parity batch."""
    arrays: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Arbitrary weights on its log-probabilities and entropies."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def precision(self) -> Precision:
        """The one a run has here by default."""
        return "bf16" if self.on_gpu else "fp32"

    @functools.cached_property
    def exact(self) -> Reference:
        """Hugging Face in fp32, attention written out."""
        return _hugging_face(self, torch.float32)

    @functools.cached_property
    def rounded(self) -> Reference:
        """Hugging Face in bf16: how far that rounding takes another implementation."""
        return _hugging_face(self, torch.bfloat16)

    def hugging_face(self, dtype: torch.dtype) -> Qwen3ForCausalLM:
        """The model by transformers, on the device, its attention written out.

        Built and filled here, because `from_pretrained` leaves the rotary frequencies unset in a process
        in which `actor.cpu` answers for CUDA. Buffers stay fp32, as there.
        """
        config = Qwen3Config.from_pretrained(self.folder, attn_implementation="eager")
        with torch.device(self.device):
            model = Qwen3ForCausalLM(config).eval()
        tensors = load_file(self.folder / "model.safetensors")
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.data = tensors[name].to(self.device, dtype)
        model.tie_weights()
        return model

    def sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    @contextmanager
    def policy(
        self,
        precision: Precision,
        *,
        attention: str = "auto",
        batching: Literal["packed", "padded"] = "packed",
        timed: bool = False,
        lr: float = 1e-3,
    ) -> Iterator[Policy]:
        """An actor from the model's folder; its memory is let go afterwards.

        Args:
            timed: with the batch sizes of the timed passes, else with those of the parity batch.
        """
        budget = self.size.budget if timed else self.size.parity_budget
        policy = Policy(
            ModelSettings(path=self.folder, attention=attention),  # type: ignore[arg-type]
            ActorSettings(
                device=self.device.type,  # type: ignore[arg-type]
                precision=precision,
                batching=batching,
                tokens_per_micro_batch=budget,
                head_chunk=self.size.head_chunk,
            ),
            OptimizerSettings(lr=lr, warmup_steps=0, weight_decay=0.1, clip_grad=1.0),
            self.mesh,
            steps=100,
            seed=self.seed,
        )
        try:
            yield policy
        finally:
            policy.__dict__.clear()
            self.clear()

    def clear(self) -> None:
        """Give freed memory back."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def batch(self) -> MiniBatch:
        return MiniBatch(self.trajectories, self.arrays)

    def timed_trajectories(self) -> list[Trajectory]:
        """Sequences from a quarter of the longest to the longest, an eighth of each the prompt."""
        random = np.random.default_rng(self.seed + 1)
        lengths = np.linspace(self.size.longest // 4, self.size.longest, self.size.sequences).astype(int)
        pairs = [(max(1, n // 8), n - max(1, n // 8)) for n in lengths]
        return make_trajectories(pairs, self.size.vocab, random)

    def seconds(self, action: Callable[[], object], *, warm_up: int, times: int) -> float:
        """Median seconds of `action`, after `warm_up` calls that are not counted."""
        for _ in range(warm_up):
            action()
        taken = []
        for _ in range(times):
            self.sync()
            started = time.perf_counter()
            action()
            self.sync()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)


@contextmanager
def open_bench(device: str, size: str, work: Path, seed: int) -> Iterator[Bench]:
    """Make the model and join a process group of this process alone."""
    kind = pick_device(device)
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    if kind == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = Mesh.create(LayoutSettings(), device=kind)
    shape = SIZES[size]
    bench = Bench(mesh.device, shape, make_model(work / "model", shape, seed, mesh.device), work, mesh, seed)
    random = np.random.default_rng(seed)
    bench.trajectories = make_trajectories(shape.parity, shape.vocab, random)
    for name in ("on_logprobs", "on_entropy"):
        bench.arrays[name] = [random.normal(size=len(t)).astype(np.float32) for t in bench.trajectories]
    try:
        yield bench
    finally:
        mesh.close(destroy=True)


def make_model(folder: Path, size: Size, seed: int, device: torch.device) -> Path:
    """Write a random Qwen3 in bf16, norms random too, so that a missing one shows."""
    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.1)
            else:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    disable_progress_bar()
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_trajectories(
    pairs: tuple[tuple[int, int], ...] | list[tuple[int, int]], vocab: int, random: np.random.Generator
) -> list[Trajectory]:
    """Random tokens of these (prompt, response) lengths."""
    made = []
    for index, (prompt, response) in enumerate(pairs):
        ids = [int(i) for i in random.integers(0, vocab, prompt + response)]
        asked = Prompt(id=f"p{index}", question="?", token_ids=tuple(ids[:prompt]), answer="1")
        made.append(Trajectory(asked, 0, ids[prompt:], "", [0.0] * response, "stop", 0))
    return made


def weighted(logprobs, entropy, arrays):
    """The objective of the parity batch: any weights on log-probabilities and entropies."""
    loss = (arrays["on_logprobs"] * logprobs + arrays["on_entropy"] * entropy).sum()
    return loss, {"loss": loss.detach()}


def reference_backward(bench: Bench, model: Qwen3ForCausalLM) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Add the parity batch's gradient to the model's; returns log-probabilities and entropies."""
    logprobs, entropies = [], []
    for index, trajectory in enumerate(bench.trajectories):
        prompt = list(trajectory.prompt.token_ids)
        ids = torch.tensor([prompt + trajectory.response_ids], device=bench.device)
        logp = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        targets = torch.tensor(trajectory.response_ids, device=bench.device)
        picked = logp.gather(-1, targets[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        on_logprobs, on_entropy = (
            torch.from_numpy(bench.arrays[name][index]).to(bench.device)
            for name in ("on_logprobs", "on_entropy")
        )
        ((on_logprobs * picked).sum() + (on_entropy * entropy).sum()).backward()
        logprobs.append(picked.detach().cpu().numpy())
        entropies.append(entropy.detach().cpu().numpy())
    return logprobs, entropies


def _hugging_face(bench: Bench, dtype: torch.dtype) -> Reference:
    model = bench.hugging_face(dtype)
    logprobs, entropy = reference_backward(bench, model)
    gradient = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return Reference(logprobs, entropy, gradient)
