"""A live actor's weights as a stream of whole Hugging Face tensors.

All ranks of the first replica step through one iterator: tensor ranks gather each parameter on
their first rank, which joins the shards and passes the tensors on to the *sender*, the first
tensor rank of the last pipeline stage. Where all ranks can reach the place the tensors go to,
each writes its own runs there instead, and nothing is gathered. Names, shapes, dtypes and order
follow from the family table and are known without moving data. Knows nothing of what becomes of the
tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_meds.actor.mesh import Mesh
from megatron_meds.actor.shape import ModelShape
from megatron_meds.weights.families import Cut, Entry, entries
from megatron_meds.weights.files import TensorInfo
from megatron_meds.weights.live import held_parameters
from megatron_meds.weights.reshard import join, pieces
from megatron_meds.weights.source import Run, Source

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import WeightSource


class LiveWeights:
    """The weights that the actor holds at the time they are asked for.

    Attributes:
        dtype: of every tensor of the stream.
        takes_part: whether this rank is in the stream: those of the first replica with context rank
            0 are. On the others `tensors` yields nothing.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        shape: ModelShape,
        mesh: Mesh,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Wrap the rank's model chunks (DDP around them does no harm); nothing is sent yet.

        Args:
            dtype: converts on the way out; None: as the model holds them.

        Raises:
            ValueError: the parameters contradict the family table, or differ in dtype and none is asked for.
        """
        self.mesh = mesh
        self.shape = shape
        self.takes_part = mesh.replica == 0 and mesh.context_rank == 0
        self._chunks = list(chunks)
        self.dtype = dtype or self._held_dtype()

    def manifest(self) -> list[TensorInfo]:
        """Names, shapes and dtypes in the order of the stream; the same on every rank, no communication."""
        return [
            TensorInfo(tensor.name, tensor.shape, self.dtype)
            for entry in entries(self.shape)
            for tensor in entry.tensors
        ]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield every (name, tensor) of the manifest, in its order: a fresh pass over the weights.

        A collective of the ranks that take part: each must step its iterator to the end. The tensor
        is there on the sender (on the actor's device, never a view of a parameter), None elsewhere.

        Raises:
            RuntimeError: a parameter is held by no stage or by several.
            ValueError: the parameters contradict the family table.
        """
        if not self.takes_part:
            return
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)  # the consumer may step us on streams of its own
        held = self._held()
        table = entries(self.shape)
        for entry, stage in zip(table, self._stages(table, held), strict=True):
            joined = self._join_on_stage(entry, held.get(entry))
            ready = torch.cuda.current_stream().record_event() if self.mesh.device.type == "cuda" else None
            for index, expected in enumerate(entry.tensors):
                tensor = self._to_sender(expected.shape, joined[index] if joined else None, stage)
                if tensor is not None and ready is not None:
                    _hand_over(tensor, ready)
                yield expected.name, tensor

    def runs(self) -> Iterator[Run]:
        """This rank's part of every tensor, as views of its parameters; no communication.

        Over the ranks that take part, every element of the manifest's tensors comes exactly once.

        Raises:
            ValueError: the parameters contradict the family table.
        """
        if not self.takes_part:
            return
        for held in held_parameters(self._chunks, self.shape, self.mesh.tensor_size):
            entry = held.entry
            if held.copy or (entry.cut is Cut.REPLICATED and self.mesh.tensor_rank != 0):
                continue
            offset = 0
            shard = held.parameter.detach()
            for piece in pieces(entry, self.mesh.tensor_size, self.mesh.tensor_rank, held.vocabulary_rows):
                part = shard.narrow(piece.dim, offset, len(piece))
                offset += len(piece)
                if len(piece):
                    yield Run(entry.tensors[piece.tensor].name, piece.dim, piece.start, part)

    def _held(self) -> dict[Entry, torch.nn.Parameter]:
        held = held_parameters(self._chunks, self.shape, self.mesh.tensor_size)
        return {h.entry: h.parameter for h in held if not h.copy}

    def _held_dtype(self) -> torch.dtype:
        dtypes = {parameter.dtype for parameter in self._held().values()}
        if len(dtypes) != 1:
            raise ValueError(
                f"this rank's parameters are of dtypes {sorted(map(str, dtypes))}: name one to export"
            )
        return dtypes.pop()

    def _stages(self, table: Sequence[Entry], held: dict[Entry, torch.nn.Parameter]) -> list[int]:
        """The pipeline stage of each entry, asked anew in each pass."""
        counts = torch.zeros(len(table), self.mesh.pipeline_size, dtype=torch.int64, device=self.mesh.device)
        for row, entry in enumerate(table):
            counts[row, self.mesh.pipeline_rank] = int(entry in held)
        if self.mesh.pipeline_size > 1:
            dist.all_reduce(counts, group=_pipeline_group())
        stages = counts.cpu()
        for entry, row in zip(table, stages, strict=True):
            if row.sum() != 1:
                raise RuntimeError(
                    f"{entry.name} is held by pipeline stages {row.nonzero().flatten().tolist()}"
                )
        return stages.argmax(dim=1).tolist()

    def _join_on_stage(self, entry: Entry, parameter: torch.nn.Parameter | None) -> list[torch.Tensor] | None:
        """Gather the shards on the stage's first tensor rank and join them there; None elsewhere."""
        if parameter is None:
            return None
        shard = parameter.detach().to(self.dtype).contiguous()
        if entry.cut is Cut.REPLICATED or self.mesh.tensor_size == 1:
            return join(entry, [shard]) if self.mesh.tensor_rank == 0 else None
        group = cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())
        first = self.mesh.tensor_rank == 0
        shards = [torch.empty_like(shard) for _ in range(self.mesh.tensor_size)] if first else None
        dist.gather(shard, shards, dst=dist.get_process_group_ranks(group)[0], group=group)
        return join(entry, shards) if shards is not None else None

    def _to_sender(
        self, shape: tuple[int, ...], tensor: torch.Tensor | None, stage: int
    ) -> torch.Tensor | None:
        """Pass a joined tensor from its stage's first tensor rank to the last stage's; None elsewhere."""
        last = self.mesh.pipeline_size - 1
        if self.mesh.tensor_rank != 0 or self.mesh.pipeline_rank not in (stage, last):
            return None
        if stage == last:
            return tensor
        group = _pipeline_group()
        peers = dist.get_process_group_ranks(group)
        if self.mesh.pipeline_rank == stage:
            assert tensor is not None
            dist.send(tensor, dst=peers[last], group=group)
            return None
        received = torch.empty(shape, dtype=self.dtype, device=self.mesh.device)
        dist.recv(received, src=peers[stage], group=group)
        return received


def _pipeline_group() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def _hand_over(tensor: torch.Tensor, ready: torch.Event) -> None:
    """Make a tensor safe on the consumer's present stream, which may differ from tensor to tensor
    (vLLM's packed sender alternates between two)."""
    stream = torch.cuda.current_stream()
    ready.wait(stream)
    tensor.record_stream(stream)


def vllm_source(weights: Source) -> WeightSource:
    """Weights as a vLLM `WeightSource`, for vLLM's own trainer engines (NCCL).

    To be driven on every rank that takes part, in lock-step: `TrainerInitInfo.rank` is 0 on the
    sender (`mesh.is_sender`) and any other number elsewhere, where the tensors are None.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class LiveSource(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(listed.name, listed.dtype, listed.shape) for listed in weights.manifest()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return weights.tensors()  # type: ignore[return-value]

    return LiveSource()
