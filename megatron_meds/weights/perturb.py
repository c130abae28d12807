"""Seeded noise on a live actor's weights, the same whatever the layout.

Used where weights have to differ from those of any file, such as in a check of the way to the
servers. Knows the family table; nothing of optimizers (whose master weights stay as they are).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.shape import ModelShape
from megatron_meds.weights.live import held_parameters
from megatron_meds.weights.reshard import Piece, assemble

STRENGTH = 0.1
"""Noise on a matrix: this over the root of its columns, about a tenth of what a fresh layer has."""
VECTOR_STRENGTH = 0.02
"""Noise on a norm or a bias."""


def perturb(chunks: Sequence[torch.nn.Module], shape: ModelShape, mesh: Mesh, seed: int) -> None:
    """Add normal noise to every parameter of this rank's model chunks, in place; no communication.

    A tensor's noise follows from `seed` and its Hugging Face name alone: shards of one tensor fit
    together, and its copies (replicas, tensor ranks of a norm, a tied embedding's second stage) stay
    equal. Rows that pad the vocabulary stay zero. One whole tensor's noise is in CPU memory at a time.
    """
    for held in held_parameters(chunks, shape, mesh.tensor_size):
        noise = [_noise(tensor.name, tensor.shape, seed) for tensor in held.entry.tensors]

        def read(piece: Piece, noise: list[torch.Tensor] = noise) -> torch.Tensor:
            return noise[piece.tensor].narrow(piece.dim, piece.start, len(piece))

        shard = assemble(held.entry, mesh.tensor_size, mesh.tensor_rank, read, held.vocabulary_rows)
        with torch.no_grad():
            held.parameter.add_(shard.to(held.parameter.device))


def _noise(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    strength = STRENGTH / shape[-1] ** 0.5 if len(shape) > 1 else VECTOR_STRENGTH
    return torch.randn(shape, generator=generator) * strength
