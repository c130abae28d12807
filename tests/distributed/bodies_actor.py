"""What ranks do in the tests of the actor's mesh, model and attention."""

from __future__ import annotations

import time

from megatron_meds.actor.mesh import Mesh


def describe(mesh: Mesh) -> dict[str, object]:
    """This rank's coordinates, and what megatron-core says they are."""
    from megatron.core import parallel_state

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


def gather_heads_everywhere(mesh: Mesh) -> list[object]:
    return mesh.gather_heads(mesh.rank)


def without_mesh(value: int) -> int:
    return value + 1


def fail_on(mesh: Mesh, rank: int) -> None:
    """One rank raises while the others wait for it."""
    if mesh.rank == rank:
        raise ValueError(f"rank {rank} fails on purpose")
    mesh.barrier()


def sleep_on(mesh: Mesh, rank: int, seconds: float) -> None:
    if mesh.rank == rank:
        time.sleep(seconds)
    mesh.barrier()
