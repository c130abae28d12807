"""The half of the shared-memory transport that runs in the actor.

Fills buckets and tells the servers; while they load one bucket the next is filled. Where all ranks
that hold weights are on the sender's machine, each writes its own part of every tensor into the
bucket; else the sender writes the tensors that it gathers. Knows the plan of the buffer and the
control API, and nothing of where tensors come from or of vLLM's code.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_meds.weights.control import ControlClient, SyncError
from megatron_meds.weights.shm.memory import SharedMemory
from megatron_meds.weights.shm.plan import Entry, Place, Plan, make_plan
from megatron_meds.weights.source import Checked, ManifestError, Ranks, Run, Scattered, Source

_TOKEN_BYTES = 32


class ShmSender:
    """Sends a source's weights to servers on the same machine.

    Attributes:
        written_together: whether each rank writes its own part; known after `connect`.
    """

    def __init__(
        self, source: Source, ranks: Ranks, control: ControlClient | None, bucket_bytes: int
    ) -> None:
        """
        Args:
            control: on the sender; None elsewhere.
            bucket_bytes: size of a bucket; a larger tensor gets one of its own.
        """
        self.written_together = False
        self._source = source
        self._ranks = ranks
        self._control = control
        self._bucket_bytes = bucket_bytes
        self._memory: SharedMemory | None = None
        self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bucket")

    def connect(self) -> None:
        """Make the buffer and show it to the ranks and the servers. Collective.

        Raises:
            SyncError: a server cannot map it; names the server.
            OSError: there is no memory for it.
        """
        self._close_memory()
        self._entries = [
            Entry(t.name, tuple(t.shape), str(t.dtype).removeprefix("torch."), _nbytes(t.shape, t.dtype))
            for t in self._source.manifest()
        ]
        self._plan = make_plan(self._entries, self._bucket_bytes)
        failure: OSError | None = None
        if self._control is not None:
            try:
                self._memory = SharedMemory.create(self._plan.size)
            except OSError as error:
                failure = error  # raised when the ranks have been told
        if isinstance(self._source, Scattered):
            self._share(self._source)
        if failure is not None:
            raise failure
        if self._control is not None:
            self._announce(self._control)

    def send(self) -> None:
        """One pass of the weights to all servers: start, buckets, finish. Collective.

        Raises:
            SyncError: a server failed; names the server and the tensor.
            ManifestError: the source contradicts its manifest.
        """
        if self.written_together:
            assert isinstance(self._source, Scattered)
            self._send_runs(self._source)
        elif self._control is None:
            Checked(self._source, is_sender=False).feed(lambda name, tensor: None)
        else:
            assert self._memory is not None  # WeightSync connects first
            buckets = _Buckets(self._control, self._memory, self._plan, self._waiter)
            Checked(self._source, is_sender=True).feed(buckets.put)
            buckets.finish()

    def skip(self, failure: Exception) -> None:
        """On the sender, in place of `send`: the other ranks have begun theirs and are led out."""
        if self.written_together:
            self._ranks.all_gather(str(failure))
        else:
            Checked(self._source, is_sender=False).feed(lambda name, tensor: None)

    def close(self) -> None:
        """Let the buffer go; the servers keep their mapping until they hear of another."""
        self._waiter.shutdown(wait=False, cancel_futures=True)
        self._close_memory()

    def _close_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _announce(self, control: ControlClient) -> None:
        assert self._memory is not None
        control.init_weight_transfer_engine(
            {
                "path": self._memory.path,
                "size": self._plan.size,
                "bucket_bytes": self._bucket_bytes,
                "names": [e.name for e in self._entries],
                "shapes": [list(e.shape) for e in self._entries],
                "dtypes": [e.dtype for e in self._entries],
                "nbytes": [e.nbytes for e in self._entries],
            }
        )

    def _share(self, source: Scattered) -> None:
        """Let the other ranks map the buffer; they write together if all that hold weights could.

        A rank on another machine cannot. A token in the memory tells it from one that only looks alike.
        """
        offer = None
        if self._memory is not None:
            token = torch.frombuffer(bytearray(os.urandom(_TOKEN_BYTES)), dtype=torch.uint8)
            self._memory.bytes[:_TOKEN_BYTES] = token
            offer = (self._memory.path, token)
        offers = [one for one in self._ranks.all_gather(offer) if one is not None]
        reached = bool(offers) and (self._memory is not None or not source.takes_part)
        if offers and not reached:
            reached = self._attach(*offers[0])
        self.written_together = all(self._ranks.all_gather(reached))

    def _attach(self, path: str, token: torch.Tensor) -> bool:
        try:
            memory = SharedMemory.attach(path, self._plan.size)
        except (OSError, ValueError):
            return False
        if not torch.equal(memory.bytes[:_TOKEN_BYTES], token):
            memory.close()
            return False
        self._memory = memory
        return True

    def _send_runs(self, source: Scattered) -> None:
        """Every rank writes its runs, bucket by bucket; the sender tells the servers of each."""
        runs: dict[str, list[Run]] = defaultdict(list)
        written: dict[str, int] = {}

        def gather_runs() -> None:
            for run in source.runs():
                runs[run.name].append(run)

        calls = _Calls(self._control, self._waiter)
        if not self._agreed(gather_runs):
            return
        for number, bucket in enumerate(self._plan.buckets):
            slot_taken = number - self._plan.slots
            if slot_taken >= 0 and not self._agreed(lambda last=slot_taken: calls.wait_for(last)):
                return
            if not self._agreed(lambda places=bucket: self._write(places, runs, written)):
                return
            calls.announce(number)
        counts = self._ranks.all_gather(written)
        if self._control is not None:
            self._check_written(counts)
            calls.finish()

    def _agreed(self, action: Callable[[], None]) -> bool:
        """Do it, and learn whether all ranks could. The rank that could not raises why; so does the
        sender, which has servers to lead out; the others only stop."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:  # noqa: BLE001 - raised below, once the ranks have been told
            failure = error
        told = self._ranks.all_gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        failed = {rank: text for rank, text in enumerate(told) if text is not None}
        if failed and self._control is not None:
            raise SyncError("; ".join(f"rank {rank}: {text}" for rank, text in failed.items()))
        return not failed

    def _write(self, bucket: Sequence[Place], runs: dict[str, list[Run]], written: dict[str, int]) -> None:
        for place in bucket:
            for run in runs.get(place.name, ()):
                assert self._memory is not None  # a rank that has runs has mapped it
                target = place_in(self._memory.bytes, place).narrow(
                    run.dim, run.start, run.tensor.shape[run.dim]
                )
                target.copy_(run.tensor)
                written[place.name] = written.get(place.name, 0) + target.nbytes

    def _check_written(self, counts: Sequence[dict[str, int]]) -> None:
        for entry in self._entries:
            found = sum(count.get(entry.name, 0) for count in counts)
            if found != entry.nbytes:
                raise ManifestError(
                    f"tensor {entry.name}: the ranks wrote {found} bytes of it, it has {entry.nbytes}"
                )


class _Calls:
    """What one pass asks of the servers, one after the other, while buckets are filled. Silent on
    ranks that are not the sender."""

    def __init__(self, control: ControlClient | None, waiter: ThreadPoolExecutor) -> None:
        self._control = control
        self._waiter = waiter
        self._started: Future[None] | None = None
        self._loading: list[Future[None]] = []
        if control is not None:
            self._started = waiter.submit(control.start_weight_update)

    def announce(self, bucket: int) -> None:
        """The bucket is full: the servers load it."""
        if self._control is not None:
            self._loading.append(self._waiter.submit(self._load, self._control, bucket))

    def wait_for(self, bucket: int) -> None:
        """Until the servers have copied the bucket out; raises what it, or the start, failed with."""
        if self._started is not None:
            self._started.result()
        if self._loading:
            self._loading[bucket].result()

    def finish(self) -> None:
        """Until the servers have loaded every bucket and taken the weights into use."""
        for bucket in range(len(self._loading)):
            self.wait_for(bucket)
        if self._control is not None:
            self._control.finish_weight_update()

    def _load(self, control: ControlClient, bucket: int) -> None:
        if bucket:
            self.wait_for(bucket - 1)  # after a failure nothing more is sent
        elif self._started is not None:
            self._started.result()
        control.update_weights({"bucket": bucket})


class _Buckets:
    """One pass of whole tensors: where the next one goes."""

    def __init__(
        self, control: ControlClient, memory: SharedMemory, plan: Plan, waiter: ThreadPoolExecutor
    ) -> None:
        self._memory = memory
        self._plan = plan
        self._calls = _Calls(control, waiter)
        self._number = 0
        self._place = 0

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor to its place; a full bucket is announced to the servers."""
        if self._place == 0 and self._number >= self._plan.slots:
            self._calls.wait_for(self._number - self._plan.slots)  # the slot's last bucket is copied out
        bucket = self._plan.buckets[self._number]
        place_in(self._memory.bytes, bucket[self._place]).copy_(tensor.detach())
        self._place += 1
        if self._place == len(bucket):
            self._calls.announce(self._number)
            self._number, self._place = self._number + 1, 0

    def finish(self) -> None:
        """Until the servers have taken everything into use."""
        self._calls.finish()


def place_in(memory: torch.Tensor, place: Place) -> torch.Tensor:
    """The tensor at its place in the buffer [size] uint8, as a view."""
    raw = memory[place.offset : place.offset + place.nbytes]
    return raw.view(torch.__dict__[place.dtype]).view(place.shape)


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
