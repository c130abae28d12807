"""A run's checkpoint as a Hugging Face folder, made by one process on the CPU.

Knows the format of a policy's state; knows no optimizer, no run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.model import build_model
from megatron_meds.actor.settings import ActorSettings, LayoutSettings
from megatron_meds.actor.shape import read_model_config
from megatron_meds.actor.state import (
    HUGGINGFACE,
    PRECISIONS,
    StateError,
    load_weights_only,
    read_description,
)
from megatron_meds.checkpoint import problem_of
from megatron_meds.weights.export import LiveWeights
from megatron_meds.weights.huggingface import save_huggingface


def checkpoint_to_huggingface(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_gib: float = 5.0,
    overwrite: bool = False,
) -> int:
    """Write the policy of a checkpoint as a Hugging Face folder that transformers and vLLM load.

    The weights are in host memory once, in the checkpoint's precision. Not for use inside a run: it
    makes this process run Megatron-Core on the CPU.

    Args:
        source: a checkpoint (RUN/checkpoints/step_000012).
        target: appears only when it is whole.
        dtype: of the written tensors; None: the checkpoint's.
        max_shard_gib: size of a safetensors file.
        overwrite: replace a target that is there.

    Returns:
        Bytes of tensors written.

    Raises:
        StateError: `source` is no checkpoint, or not a whole one.
        OSError: the target was not written, and why.
        RankError: the tensors are damaged.
    """
    if problem := problem_of(source):
        raise StateError(f"{source} is not a whole checkpoint: {problem}")
    precision = PRECISIONS[read_description(source).dtype]
    companions = source / HUGGINGFACE
    shape = read_model_config(companions)
    with _single_process() as mesh:
        settings = ActorSettings(device="cpu", precision=precision)
        chunks = build_model(shape, settings, "sdpa", mesh, seed=0)
        load_weights_only(chunks, source, shape, mesh)
        save_huggingface(
            chunks,
            companions,
            target,
            shape,
            mesh,
            dtype=dtype,
            max_shard_gib=max_shard_gib,
            overwrite=overwrite,
        )
        return sum(info.bytes for info in LiveWeights(chunks, shape, mesh, dtype).manifest())


@contextmanager
def _single_process() -> Iterator[Mesh]:
    """A mesh of this process alone, which needs no torchrun."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = Mesh.create(LayoutSettings(), device="cpu")
    try:
        yield mesh
    finally:
        mesh.close(destroy=True)
