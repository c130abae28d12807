"""The half of the shared-memory transport that runs in the actor.

Fills buckets and tells the servers; while they load one bucket the next is filled. Knows the plan
of the buffer and the control API, and nothing of where tensors come from or of vLLM's code.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_meds.weights.control import ControlClient
from megatron_meds.weights.shm.memory import SharedMemory
from megatron_meds.weights.shm.plan import Entry, make_plan
from megatron_meds.weights.source import Checked, Source


class ShmSender:
    """Sends a source's weights to servers on the same machine."""

    def __init__(
        self, source: Source, is_sender: bool, control: ControlClient | None, bucket_bytes: int
    ) -> None:
        """
        Args:
            control: on the sender; None elsewhere.
            bucket_bytes: size of a bucket; a larger tensor gets one of its own.
        """
        self._source = Checked(source, is_sender)
        self._control = control
        self._bucket_bytes = bucket_bytes
        self._memory: SharedMemory | None = None
        self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bucket")

    def connect(self) -> None:
        """Make the buffer and show it to the servers. Only the sender has anything to do.

        Raises:
            SyncError: a server cannot map it; names the server.
        """
        if self._control is None:
            return
        self._close_memory()
        listed = list(self._source.source.manifest())
        entries = [
            Entry(t.name, tuple(t.shape), str(t.dtype).removeprefix("torch."), _nbytes(t.shape, t.dtype))
            for t in listed
        ]
        self._plan = make_plan(entries, self._bucket_bytes)
        self._memory = SharedMemory.create(self._plan.size)
        self._control.init_weight_transfer_engine(
            {
                "path": self._memory.path,
                "size": self._plan.size,
                "bucket_bytes": self._bucket_bytes,
                "names": [e.name for e in entries],
                "shapes": [list(e.shape) for e in entries],
                "dtypes": [e.dtype for e in entries],
                "nbytes": [e.nbytes for e in entries],
            }
        )

    def send(self) -> None:
        """One pass of the weights to all servers: start, buckets, finish. Every rank that holds
        weights steps along.

        Raises:
            SyncError: a server failed; names the server and the tensor.
            ManifestError: the source contradicts its manifest.
        """
        if self._control is None:
            self._source.feed(lambda name, tensor: None)
            return
        assert self._memory is not None  # WeightSync connects first
        buckets = _Buckets(self._control, self._memory, self._plan.buckets, self._plan.slots, self._waiter)
        self._source.feed(buckets.put)
        buckets.wait()
        self._control.finish_weight_update()

    def close(self) -> None:
        """Let the buffer go; the servers keep their mapping until they hear of another."""
        self._waiter.shutdown(wait=False, cancel_futures=True)
        self._close_memory()

    def _close_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class _Buckets:
    """One pass: where the next tensor goes, and which buckets the servers still work on."""

    def __init__(self, control, memory, buckets, slots, waiter) -> None:
        self._control: ControlClient = control
        self._memory: SharedMemory = memory
        self._plan = buckets
        self._slots: int = slots
        self._waiter: ThreadPoolExecutor = waiter
        self._loading: list[Future[None]] = []
        self._place = 0
        self._started = False

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor to its place; a full bucket is announced to the servers."""
        if not self._started:
            self._control.start_weight_update()
            self._started = True
        number = len(self._loading)
        if self._place == 0 and number >= self._slots:
            self._loading[number - self._slots].result()  # the slot's last bucket has been copied out
        place = self._plan[number][self._place]
        target = self._memory.bytes[place.offset : place.offset + place.nbytes]
        target.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
        self._place += 1
        if self._place == len(self._plan[number]):
            self._loading.append(self._waiter.submit(self._control.update_weights, {"bucket": number}))
            self._place = 0

    def wait(self) -> None:
        """Until the servers have loaded every bucket."""
        for loading in self._loading:
            loading.result()


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
