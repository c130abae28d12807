"""What ranks do in the tests of the actor's mesh, model and attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.model import build_model
from megatron_meds.actor.settings import ActorSettings
from megatron_meds.actor.shape import read_model_config
from megatron_meds.weights.huggingface import load_weights


def describe(mesh: Mesh) -> dict[str, object]:
    """This rank's coordinates, and what megatron-core says they are."""
    return {
        "ours": (mesh.tensor_rank, mesh.context_rank, mesh.replica, mesh.pipeline_rank),
        "megatron": (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        ),
        "sizes": (mesh.tensor_size, mesh.context_size, mesh.replicas, mesh.pipeline_size),
        "head": mesh.is_head,
        "first_head": mesh.is_first_head,
        "last": parallel_state.is_pipeline_last_stage(ignore_virtual=True),
    }


def exchange(mesh: Mesh) -> dict[str, object]:
    """Every collective for objects, each with values that tell the ranks apart."""
    name = f"rank {mesh.rank}"
    mesh.barrier()
    return {
        "replica": mesh.replica,
        "from_head": mesh.broadcast_in_replica({"sent by": name}),
        "heads": mesh.gather_heads(name) if mesh.is_head else None,
        "all": mesh.all_gather(name),
    }


def refusal_to_gather(mesh: Mesh) -> str:
    """What a rank that is no head is told when it joins the heads' collective."""
    if mesh.is_head:
        return ""
    try:
        mesh.gather_heads(mesh.rank)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("gather_heads took part")


def logits_of_transformers(mesh: Mesh, folder: Path, ids: list[int]) -> torch.Tensor:
    """What transformers says in a process whose actor runs on the CPU: [T, V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def logits(
    mesh: Mesh, folder: Path, sequences: list[list[int]], packed: bool, **actor: Any
) -> list[torch.Tensor]:
    """[T, vocab] fp32 of each sequence, through one forward call of the only stage."""
    shape = read_model_config(folder)
    settings = ActorSettings(layout=mesh.layout, device="cpu", **actor)
    chunks = build_model(shape, settings, "auto", mesh, seed=3)
    load_weights(chunks, folder, shape, mesh)
    ids, positions, borders = (
        pack(sequences, mesh.tensor_size) if packed else pad(sequences, mesh.tensor_size)
    )
    with torch.no_grad():
        shard = chunks[0](ids, positions, None, packed_seq_params=borders)
    parts = [torch.empty_like(shard) for _ in range(mesh.tensor_size)]
    dist.all_gather(parts, shard, group=parallel_state.get_tensor_model_parallel_group())
    whole = torch.cat(parts, dim=-1)[..., : shape.vocab].float()
    if not packed:
        return [row[: len(ids)] for row, ids in zip(whole, sequences, strict=True)]
    lengths = [len(ids) for ids in sequences]
    return list(whole[0][: sum(lengths)].split(lengths))


def random_weights(mesh: Mesh, folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """The matrices of this rank's untrained model, layers counted within its stage."""
    settings = ActorSettings(layout=mesh.layout, device="cpu")
    (chunk,) = build_model(read_model_config(folder), settings, "auto", mesh, seed)
    return {name: p.detach() for name, p in chunk.named_parameters() if p.ndim == 2}


def pad(sequences: list[list[int]], multiple: int) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Rows padded on the right to a common length that is a multiple."""
    width = -(-max(map(len, sequences)) // multiple) * multiple
    ids = torch.tensor([[*row, *[7] * (width - len(row))] for row in sequences])
    return ids, torch.arange(width).expand_as(ids), None


def pack(sequences: list[list[int]], multiple: int) -> tuple[torch.Tensor, torch.Tensor, PackedSeqParams]:
    """One row, the padding a sequence of its own."""
    rest = -sum(map(len, sequences)) % multiple
    rows = [*sequences, [7] * rest] if rest else sequences
    ids = torch.tensor([[token for row in rows for token in row]])
    positions = torch.tensor([[place for row in rows for place in range(len(row))]])
    borders = torch.tensor([0, *[len(row) for row in rows]]).cumsum(0).int()
    longest = max(map(len, rows))
    return (
        ids,
        positions,
        PackedSeqParams("thd", borders, borders, max_seqlen_q=longest, max_seqlen_kv=longest),
    )
