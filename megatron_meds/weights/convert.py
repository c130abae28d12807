"""A Hugging Face folder rewritten with another dtype or file size. Knows no Megatron."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from megatron_meds.actor.shape import ModelShape, read_model_config
from megatron_meds.weights.families import HEAD_NAME, check_names, entries
from megatron_meds.weights.files import GIB, Checkpoint, FolderWriter, TensorInfo, copy_companions


def convert_huggingface(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_gib: float = 5.0,
    overwrite: bool = False,
    progress: Callable[[TensorInfo], None] = lambda written: None,
) -> int:
    """Write `source` anew as `target`, one tensor in memory at a time, complete or absent.

    Args:
        dtype: of the new tensors; None: each keeps its own.
        max_shard_gib: size of a safetensors file.
        overwrite: replace a target that is there.
        progress: called after each tensor.

    Returns:
        Bytes of tensors written.

    Raises:
        FileExistsError: the target is there and may not be overwritten.
        FileNotFoundError: `source` has no config.json or no safetensors.
        ValueError: source and target are the same, the model is of no supported family, tensors are
            missing or have no place in it, or one is quantised (each named).
    """
    if target.resolve() == source.resolve():
        raise ValueError(f"source and target are the same folder, {source}; choose another target")
    shape = read_model_config(source)
    with Checkpoint(source) as checkpoint:
        check_names(checkpoint.names, shape, source)
        stored = [checkpoint.info(name) for name in _in_order(checkpoint, shape)]
        planned = [replace(info, dtype=dtype or info.dtype) for info in stored]
        with FolderWriter(target, planned, int(max_shard_gib * GIB), overwrite) as writer:
            copy_companions(source, writer.partial, dtype)
            for info in planned:
                writer.add(info.name, checkpoint.read(info.name).to(info.dtype))
                progress(info)
    return sum(info.bytes for info in planned)


def _in_order(checkpoint: Checkpoint, shape: ModelShape) -> list[str]:
    """Stored names in the order of export, without what the config derives; an extra head last."""
    names = [tensor.name for entry in entries(shape) for tensor in entry.tensors]
    return [*names, HEAD_NAME] if shape.tied and HEAD_NAME in checkpoint else names
