"""The half of the shared-memory transport that runs in vLLM's workers: a weight-transfer engine.

Loads through vLLM's layerwise reload, because vLLM repacks weights after loading them: a plain
`load_weights` afterwards would write into the repacked form. Knows vLLM and the plan of the buffer,
and nothing of who fills it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_meds.weights.shm import digests
from megatron_meds.weights.shm.memory import SharedMemory
from megatron_meds.weights.shm.plan import Entry, Place, Plan, make_plan


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """What the sender announces once: the memory and the list of tensors, in the order they come."""

    path: str
    size: int
    bucket_bytes: int
    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]
    nbytes: list[int]

    def plan(self) -> Plan:
        """Where everything lies.

        Raises:
            ValueError: the lists contradict each other or the size.
        """
        rows = zip(self.names, self.shapes, self.dtypes, self.nbytes, strict=True)
        entries = [Entry(name, tuple(shape), dtype, nbytes) for name, shape, dtype, nbytes in rows]
        for entry in entries:
            expected = torch.Size(entry.shape).numel() * _dtype(entry).itemsize
            if entry.nbytes != expected:
                raise ValueError(
                    f"tensor {entry.name} {entry.shape} {entry.dtype}: announced with {entry.nbytes} bytes, "
                    f"it has {expected}"
                )
        plan = make_plan(entries, self.bucket_bytes)
        if plan.size != self.size:
            raise ValueError(f"the sender has a buffer of {self.size} bytes, the tensors need {plan.size}")
        return plan


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """Bucket number `bucket` lies in the buffer."""

    bucket: int


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads buckets from shared memory into the worker's model."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        digests.install()
        self._memory: SharedMemory | None = None
        self._plan: Plan | None = None
        self._next = 0
        self._awaited: set[str] = set()
        self._open = False

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Map the sender's memory; an earlier sender's is let go."""
        self.shutdown()
        self._plan = init_info.plan()
        self._memory = SharedMemory.attach(init_info.path, init_info.size)

    def start_weight_update(self) -> None:
        """Put the layers into the state in which they take weights of a checkpoint."""
        if self._open:
            self._roll_back()
        self._next, self._open = 0, True
        # Asked for now, while a tied output layer still shares its parameter with the embedding.
        self._awaited = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. (The base class would also wait for an accelerator, which is not here.)"""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Copy the bucket's tensors out of the buffer and load them; after the last one, see that no
        parameter of the model went without.

        Raises:
            RuntimeError: a bucket out of order, a tensor the model does not take (named), or
                parameters that nothing was sent for (named).
        """
        if self._memory is None or self._plan is None:
            raise RuntimeError("no sender has announced itself: /init_weight_transfer_engine comes first")
        if update_info.bucket != self._next:
            raise RuntimeError(f"bucket {update_info.bucket} arrived, bucket {self._next} was due")
        self._load(self._memory, self._plan.buckets[self._next])
        self._next += 1
        if self._next == len(self._plan.buckets):
            self._check_complete()

    def finish_weight_update(self) -> None:
        """Repack what was loaded for the kernels; an update that broke off is rolled back."""
        if self._plan is None or self._next < len(self._plan.buckets):
            self._roll_back()
            return
        finalize_layerwise_reload(self.model, self.model_config)
        self._open = False
        for layer in _tied_layers(self.model):
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[operator, union-attr]

    def shutdown(self) -> None:
        """Let the memory go."""
        if self._memory is not None:
            self._memory.close()
        self._memory = self._plan = None

    def _load(self, memory: SharedMemory, bucket: tuple[Place, ...]) -> None:
        current = bucket[0]

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for place in bucket:
                current = place
                yield place.name, _copy_out(memory.bytes, place)

        try:
            self._awaited -= self.model.load_weights(arriving())  # type: ignore[operator]
        except Exception as error:
            raise RuntimeError(
                f"tensor {current.name} {current.shape} {current.dtype}: the server cannot load it "
                f"({type(error).__name__}: {error})"
            ) from error

    def _roll_back(self) -> None:
        """Take the layers that are still waiting for weights back to what they were. Left alone, what
        arrived for them would be counted to the next update."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)
        self._open = False

    def _check_complete(self) -> None:
        if self.model_config.quantization is not None:
            return  # quantisation adds parameters that no checkpoint holds
        if self._awaited:
            raise RuntimeError(f"the sender has sent nothing for the server's {_some(sorted(self._awaited))}")


def _tied_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers that use the weight of another one: a tied output layer.

    No weight arrives for them, so layerwise reload leaves them as they are; but on CPU they have
    packed the weight, and would go on with the old one.
    """
    owners: dict[int, torch.nn.Module] = {}
    tied = []
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and owners.setdefault(id(weight), layer) is not layer:
            tied.append(layer)
    return tied


def _copy_out(memory: torch.Tensor, place: Place) -> torch.Tensor:
    """A copy, because layerwise reload keeps tensors until their layer is whole, and by then the
    sender may have written the next bucket over this one."""
    raw = memory[place.offset : place.offset + place.nbytes].clone()
    return raw.view(_dtype(place)).view(place.shape)


def _dtype(entry: Entry | Place) -> torch.dtype:
    dtype = torch.__dict__.get(entry.dtype)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"tensor {entry.name}: {entry.dtype!r} is no dtype of torch")
    return dtype


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
