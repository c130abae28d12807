"""`megatron-meds convert`: weights from one place and form to another."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from megatron_meds.errors import UserError


class Dtype(StrEnum):
    """Precisions a checkpoint can be written in."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


TORCH_NAMES = {Dtype.BF16: "bfloat16", Dtype.FP16: "float16", Dtype.FP32: "float32"}


def convert(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder, or a checkpoint of a run.")],
    target: Annotated[Path, typer.Argument(help="Hugging Face folder to write.")],
    dtype: Annotated[
        Dtype | None, typer.Option(help="Precision of the target; left out: that of the source.")
    ] = None,
    max_shard_gib: Annotated[float, typer.Option(help="Size of a safetensors file, GiB.", min=0.001)] = 5.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a target that is there.")] = False,
) -> None:
    """Write a model's weights, config and tokenizer as a Hugging Face folder.

    The source is a Hugging Face folder (config.json, safetensors; one tensor is in memory at a time) or a
    checkpoint (RUN/checkpoints/step_000012; the model is in memory once). The target appears under its name
    only when it is whole.
    """
    is_checkpoint = (source / "policy.json").is_file()
    if not is_checkpoint and not (source / "config.json").is_file():
        raise UserError(
            f"{source} is no Hugging Face folder (no config.json) and no checkpoint (no policy.json)"
        )
    import torch

    from megatron_meds.agreement import RankError

    if is_checkpoint:
        from megatron_meds.actor.conversion import checkpoint_to_huggingface as write
    else:
        from megatron_meds.weights.convert import convert_huggingface as write

    chosen = getattr(torch, TORCH_NAMES[dtype]) if dtype else None
    try:
        written = write(source, target, dtype=chosen, max_shard_gib=max_shard_gib, overwrite=overwrite)
    except (ValueError, OSError, RankError) as error:
        raise UserError(str(error)) from error
    typer.echo(f"{target}: {written / 2**30:.3f} GiB of tensors")
