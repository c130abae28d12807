"""What ranks do in the tests of the actor's mesh, model and attention."""

from __future__ import annotations

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


def refusal_to_gather(mesh: Mesh) -> str:
    """What a rank that is no head is told when it joins the heads' collective."""
    if mesh.is_head:
        return ""
    try:
        mesh.gather_heads(mesh.rank)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("gather_heads took part")
