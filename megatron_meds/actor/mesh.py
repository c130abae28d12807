"""The ranks of a run and how they talk: process groups, replicas, heads.

A *replica* is the ranks that together hold one copy of the model (tensor x context x pipeline).
Its *head* is the rank with tensor rank 0 and context rank 0 on the last pipeline stage: it talks to
the servers, verifies, and tells the others. Python objects travel over gloo, tensors over the
backend of the device. Knows nothing of models or data.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_meds.actor import cpu
from megatron_meds.actor.settings import LayoutSettings


@dataclass(frozen=True)
class Coordinates:
    """Where a rank sits in the mesh: its index along each axis."""

    tensor: int
    context: int
    replica: int
    pipeline: int


def replicas_of(layout: LayoutSettings, world_size: int) -> int:
    """How many copies of the model `world_size` ranks hold.

    Raises:
        ValueError: the ranks cannot be divided in that way; names the key and the remedy.
    """
    ranks = layout.tensor * layout.context * layout.pipeline
    product = (
        f"layout.tensor {layout.tensor} x layout.context {layout.context} x layout.pipeline {layout.pipeline}"
    )
    if world_size % ranks:
        raise ValueError(
            f"{product} = {ranks} ranks hold one copy of the model, and {world_size} ranks are no multiple "
            f"of that: start a multiple of {ranks} ranks or change the layout"
        )
    replicas = world_size // ranks
    if layout.data != "auto" and layout.data != replicas:
        raise ValueError(
            f"layout.data is {layout.data}, but {world_size} ranks / ({product}) = {replicas}: "
            f"set layout.data to {replicas} (or auto), or start {ranks * layout.data} ranks"
        )
    return replicas


def coordinates(rank: int, layout: LayoutSettings, world_size: int) -> Coordinates:
    """Position of global rank `rank`: tensor ranks are neighbours, then context, replicas, stages."""
    replicas = replicas_of(layout, world_size)
    rest, tensor = divmod(rank, layout.tensor)
    rest, context = divmod(rest, layout.context)
    pipeline, replica = divmod(rest, replicas)
    return Coordinates(tensor, context, replica, pipeline)


def pick_device(device: Literal["auto", "cpu", "cuda"] | str) -> Literal["cpu", "cuda"]:
    """`auto` is a GPU if torch sees one.

    Raises:
        ValueError: `cuda` is asked for and torch sees no GPU, or the name is another.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("actor.device is cuda, but torch sees no GPU: set actor.device=cpu")
    if device == "cpu" or device == "cuda":
        return device
    raise ValueError(f"actor.device {device!r} is not auto, cpu or cuda")


class Mesh:
    """This rank's place among all ranks, and the collectives for Python objects.

    Made by `Mesh.create`; `close` it before another layout is made in the same processes.
    """

    rank: int
    world_size: int
    local_rank: int
    """Rank on this machine."""
    local_size: int
    """Ranks on this machine."""
    device: torch.device
    replica: int
    """Index of this rank's copy of the model: its data-parallel rank."""
    replicas: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    virtual: int
    """Model chunks on each pipeline stage."""
    context_rank: int
    context_size: int
    layout: LayoutSettings

    def __init__(self, layout: LayoutSettings, device: torch.device, timeout: timedelta) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world_size)))
        self.device = device
        self.layout = layout
        here = coordinates(self.rank, layout, self.world_size)
        self.replica, self.replicas = here.replica, replicas_of(layout, self.world_size)
        self.tensor_rank, self.tensor_size = here.tensor, layout.tensor
        self.pipeline_rank, self.pipeline_size = here.pipeline, layout.pipeline
        self.context_rank, self.context_size = here.context, layout.context
        self.virtual = layout.virtual
        self._make_groups(timeout)

    @classmethod
    def create(cls, layout: LayoutSettings, device: str = "auto", timeout_minutes: float = 30.0) -> Mesh:
        """Join the process group, if this process has not, and build Megatron-Core's groups.

        Every rank calls it with the same arguments; the environment is torchrun's (RANK, WORLD_SIZE,
        LOCAL_RANK, MASTER_ADDR, MASTER_PORT). On the CPU it applies `cpu.enable`.

        Raises:
            ValueError: the ranks do not fit the layout, or the device is not there.
        """
        kind = pick_device(device)
        timeout = timedelta(minutes=timeout_minutes)
        if kind == "cpu":
            cpu.enable()
            where = torch.device("cpu")
        else:
            where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(where)
        if not dist.is_initialized():
            dist.init_process_group("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl", timeout=timeout)
        replicas_of(layout, dist.get_world_size())
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
            context_parallel_size=layout.context,
            distributed_timeout_minutes=timeout_minutes,  # type: ignore[arg-type]
            order="tp-cp-ep-dp-pp",
        )
        return cls(layout, where, timeout)

    def _make_groups(self, timeout: timedelta) -> None:
        """The gloo groups of objects: all ranks, each replica, the heads."""
        places = [coordinates(rank, self.layout, self.world_size) for rank in range(self.world_size)]
        last = self.pipeline_size - 1
        heads = [r for r, c in enumerate(places) if (c.tensor, c.context, c.pipeline) == (0, 0, last)]
        self._head_rank = heads[self.replica]
        self._all: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._heads: Any = dist.new_group(heads, backend="gloo", timeout=timeout)
        self._replica: Any = None
        for index in range(self.replicas):
            members = [rank for rank, place in enumerate(places) if place.replica == index]
            group = dist.new_group(members, backend="gloo", timeout=timeout)
            if index == self.replica:
                self._replica = group

    @property
    def is_head(self) -> bool:
        """The rank that speaks for its replica."""
        return self.rank == self._head_rank

    @property
    def is_first_head(self) -> bool:
        """The head of replica 0: the one that writes files."""
        return self.is_head and self.replica == 0

    @property
    def is_sender(self) -> bool:
        """The one rank that sends weights to the servers."""
        return self.is_first_head

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    def broadcast_in_replica(self, value: Any = None) -> Any:
        """The head's `value` on every rank of its replica. A collective of the replica."""
        box = [value if self.is_head else None]
        dist.broadcast_object_list(box, src=self._head_rank, group=self._replica)
        return box[0]

    def gather_heads(self, value: Any) -> list[Any]:
        """The values of all heads, by replica. A collective of the heads: no other rank may call it."""
        if not self.is_head:
            raise RuntimeError(
                f"rank {self.rank} is not the head of replica {self.replica}: gather_heads is for heads"
            )
        values: list[Any] = [None] * self.replicas
        dist.all_gather_object(values, value, group=self._heads)
        return values

    def exchange_heads(self, outgoing: Sequence[Any]) -> list[Any]:
        """Send `outgoing[r]` to the head of replica r; returns what each head sent here, by replica.

        A collective of the heads. Every head sends something, if only an empty list.
        """
        sent = [pickle.dumps(value) for value in outgoing]
        table = self.gather_heads([len(part) for part in sent])
        sizes = [row[self.replica] for row in table]
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.all_to_all_single(
            received,
            torch.frombuffer(bytearray(b"".join(sent)), dtype=torch.uint8),
            sizes,
            [len(part) for part in sent],
            group=self._heads,
        )
        return [pickle.loads(part.numpy().tobytes()) for part in received.split(sizes)]

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank. A collective of all ranks."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._all)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self._all)

    def close(self, destroy: bool = False) -> None:
        """Leave this layout: destroy its groups so that another can follow in the same processes.

        With `destroy` the process group itself goes too (the end of a run).
        """
        groups = [group for group in parallel_state._global_process_group_list or [] if group is not None]
        parallel_state.destroy_model_parallel()
        known = dist.distributed_c10d._world.pg_map
        for group in [*groups, self._all, self._heads, self._replica]:
            if group in known:
                dist.destroy_process_group(group)
        if destroy:
            dist.destroy_process_group()
