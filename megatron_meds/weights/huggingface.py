"""Hugging Face checkpoints into and out of a live actor, for any layout.

Every rank reads only the runs that make up its own shards. Saving streams one whole tensor at a
time to the sender, which writes it. Knows nothing of optimizers: load before one is made, or let
it copy its master weights from the model again (`reload_model_params`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.shape import ModelShape, read_model_config
from megatron_meds.weights.export import LiveWeights
from megatron_meds.weights.families import (
    EMBEDDING_NAME,
    HEAD_NAME,
    VALUE_NAME,
    Entry,
    HfTensor,
    check_names,
)
from megatron_meds.weights.files import GIB, Checkpoint, FolderWriter, copy_companions
from megatron_meds.weights.live import held_parameters
from megatron_meds.weights.reshard import Piece, assemble


def load_weights(chunks: Sequence[torch.nn.Module], folder: Path, shape: ModelShape, mesh: Mesh) -> int:
    """Fill this rank's model chunks from the safetensors of `folder`; no communication.

    Values are converted to the parameters' dtype. Rows that pad the vocabulary become zeros. The
    copy of a tied embedding on the last pipeline stage is filled too. A tied model may store its
    output layer if it equals the embedding. A critic's value head stays as it is.

    Returns:
        Bytes read from disk by this rank.

    Raises:
        FileNotFoundError: no safetensors in `folder`.
        ValueError: tensors are missing, unexpected, of another shape or quantised (each named), a
            tied model stores another output layer, or the model contradicts the family table.
    """
    held = held_parameters(chunks, shape, mesh.tensor_size)
    with Checkpoint(folder) as checkpoint, torch.no_grad():
        check_names(checkpoint.names, shape, folder)
        for h in held:
            if h.entry.tensors[0].name == VALUE_NAME:
                continue
            shard = _read_shard(checkpoint, h.entry, mesh, h.vocabulary_rows)
            if shape.tied and h.entry.tensors[0].name == EMBEDDING_NAME and HEAD_NAME in checkpoint:
                _check_stored_head(checkpoint, h.entry, shard, mesh, h.vocabulary_rows)
            h.parameter.copy_(shard)
        return checkpoint.bytes_read


def save_huggingface(
    chunks: Sequence[torch.nn.Module],
    source: Path,
    target: Path,
    shape: ModelShape,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    max_shard_gib: float = 5.0,
    overwrite: bool = False,
) -> None:
    """Write the live weights as a Hugging Face folder; called by all ranks, returns when it is whole.

    `target` holds config.json of `source` with the dtype adapted, its tokenizer and generation
    files, and safetensors (with an index where there is more than one file). It appears only when
    it is complete. The ranks of the first replica join the tensors one at a time; the sender writes.

    Args:
        source: the folder the model was built from.
        dtype: of the stored tensors; None: as the model holds them.
        max_shard_gib: size of a safetensors file.
        overwrite: replace a target that is there.

    Raises:
        OSError: on every rank, saying why the target was not written (it exists, the disk is full).
        ValueError: `source` describes another model.
    """
    if read_model_config(source) != shape:
        raise ValueError(f"{source / 'config.json'} does not describe the model that is to be saved")
    live = LiveWeights(chunks, shape, mesh, dtype)
    problem = None
    if mesh.is_sender:
        problem = _write(live, source, target, int(max_shard_gib * GIB), overwrite)
    else:
        _drain(live)
    problems = [p for p in mesh.all_gather(problem) if p]
    if problems:
        raise OSError(f"{target} was not written: {problems[0]}")


def _read_shard(
    checkpoint: Checkpoint, entry: Entry, mesh: Mesh, vocabulary_rows: int | None
) -> torch.Tensor:
    for tensor in entry.tensors:
        stored = checkpoint.info(tensor.name).shape
        if stored != tensor.shape:
            raise ValueError(
                f"{checkpoint.folder}: {tensor.name} has shape {stored}; "
                f"its config.json asks for {tensor.shape}"
            )

    def read(piece: Piece) -> torch.Tensor:
        return checkpoint.read(entry.tensors[piece.tensor].name, piece.dim, piece.start, piece.stop)

    return assemble(entry, mesh.tensor_size, mesh.tensor_rank, read, vocabulary_rows)


def _check_stored_head(
    checkpoint: Checkpoint, entry: Entry, embedding: torch.Tensor, mesh: Mesh, vocabulary_rows: int | None
) -> None:
    """A tied model's stored output layer must be its embedding, or one of the two would be dropped."""
    stored = replace(entry, tensors=(HfTensor(HEAD_NAME, entry.tensors[0].shape),))
    head = _read_shard(checkpoint, stored, mesh, vocabulary_rows)
    if not torch.equal(head, embedding):
        raise ValueError(
            f"{checkpoint.folder} stores a {HEAD_NAME} that differs from {EMBEDDING_NAME}, though its "
            f'config.json says that they are tied. Set "tie_word_embeddings": false there, or '
            f"remove {HEAD_NAME}."
        )


def _write(live: LiveWeights, source: Path, target: Path, max_bytes: int, overwrite: bool) -> str | None:
    """Write the stream; what the file system refused, if it did.

    The stream is followed to its end even then: the other ranks wait in its collectives.
    """
    stream = live.tensors()
    try:
        with FolderWriter(target, live.manifest(), max_bytes, overwrite) as writer:
            copy_companions(source, writer.partial, live.dtype)
            for name, tensor in stream:
                assert tensor is not None
                writer.add(name, tensor)
    except OSError as error:
        for _ in stream:
            pass
        return str(error)
    return None


def _drain(live: LiveWeights) -> None:
    for _ in live.tensors():
        pass
