"""One sync of the actor's weights to all servers, whatever the transport.

Every actor rank calls it; ranks that hold weights step through the stream together, the sender
alone talks to the servers, and a failure there is raised on every rank. Servers hold requests back
during a sync and drop the prefixes cached with the old weights. Knows vLLM's trainer engine for NCCL
and the control API; nothing of how weights are cut, nor of server processes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from megatron_meds.agreement import together
from megatron_meds.weights.control import ControlClient, SyncError
from megatron_meds.weights.settings import WeightsSettings
from megatron_meds.weights.shm.sender import ShmSender
from megatron_meds.weights.source import Checked, Listed, Ranks, Source

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

MIB = 2**20


class Sender(Protocol):
    """A transport: `connect` once, and after a restart of a server; `send` for each sync, or `skip` on
    the sender if the servers were not ready for it, because the other ranks have begun."""

    def connect(self) -> None: ...
    def send(self) -> None: ...
    def skip(self, failure: Exception, /) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class SyncReport:
    """What a sync took."""

    version: int
    tensors: int
    bytes: int
    """Of the stream, once; each server received as much."""
    seconds: float


class WeightSync:
    """Keeps servers at the actor's weights.

    `version` is what the servers hold: None until the first push, from the start of a push that
    fails, and after a server was started again, until the next push. Whoever samples asks for it.
    """

    def __init__(
        self,
        settings: WeightsSettings,
        urls: Sequence[str],
        source: Source,
        ranks: Ranks,
        *,
        transport: Literal["shm", "nccl"],
        address: str | None = None,
    ) -> None:
        """
        Args:
            urls: base URLs of all servers of the run, the same on every rank.
            source: the live weights of this rank.
            transport: resolved; `auto` is the caller's to decide.
            address: where servers reach this machine (nccl); None: its host name.
        """
        self.version: int | None = None
        self.settings = settings
        self._connected = False
        self._source = source
        self._ranks = ranks
        self._control = ControlClient(urls, settings.timeout_seconds) if ranks.is_sender else None
        bucket = int(settings.bucket_mib * MIB)
        self._sender: Sender
        if transport == "shm":
            self._sender = ShmSender(source, ranks, self._control, bucket)
        else:
            self._sender = NcclSender(source, ranks.is_sender, self._control, bucket, address)

    def connect(self) -> None:
        """Rendezvous with all servers: before the first push, and after any server was started again.

        A collective of all ranks.

        Raises:
            RankError: on every rank, if a server cannot be reached or refuses; names the server.
        """
        self.version, self._connected = None, False
        together(self._connect, "the servers did not accept the transfer of weights", self._ranks.all_gather)
        self._connected = True

    reconnect = connect

    def push(self, version: int) -> SyncReport:
        """Bring all servers to the actor's weights, as version `version`.

        A collective of all ranks, bounded by `weights.timeout_seconds` on the sender. Afterwards the
        servers report the version, and no prefix computed with other weights is used.

        Raises:
            RankError: on every rank, if it failed; names the server and, where one is to blame, the
                tensor. The servers are left refusing to sample (see `Client`) until a push succeeds.
        """
        if not self._connected:
            raise RuntimeError("WeightSync.connect comes before push, and again after a failed connect")
        started = time.monotonic()
        self.version = None
        together(lambda: self._push(version), f"weight sync {version} failed", self._ranks.all_gather)
        self.version = version
        manifest = list(self._source.manifest())
        size = sum(torch.Size(t.shape).numel() * t.dtype.itemsize for t in manifest)
        return SyncReport(version, len(manifest), size, time.monotonic() - started)

    def close(self) -> None:
        """Let buffers, communicators and connections go."""
        self._sender.close()
        if self._control is not None:
            self._control.close()

    def _connect(self) -> None:
        if self._control is not None:
            self._control.within()
        self._sender.connect()

    def _push(self, version: int) -> None:
        if self._control is None:
            self._sender.send()
            return
        self._control.version = version
        self._control.within()
        failure = _failure_of(self._control.begin)
        if failure is not None:
            self._sender.skip(failure)
        else:
            failure = _failure_of(self._sender.send) or _failure_of(self._control.end)
        if failure is not None:
            self._control.abandon()
            raise failure


def _failure_of(action: Callable[[], None]) -> Exception | None:
    """Run it; what it raised is returned, to be raised when servers and ranks are in order again."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - raised by the caller
        return error
    return None


class NcclSender:
    """vLLM's NCCL trainer engine, driven on the ranks that hold weights.

    The sender is rank 0 of the transfer's group, the workers of all servers follow.
    """

    def __init__(
        self,
        source: Source,
        is_sender: bool,
        control: ControlClient | None,
        bucket_bytes: int,
        address: str | None,
    ) -> None:
        self._stream = _Pass(source)
        self._is_sender = is_sender
        self._control = _AbortingControl(control, self._abort) if control is not None else None
        self._bucket_bytes = bucket_bytes
        self._address = address
        self._engine: TrainerWeightTransferEngine | None = None

    def connect(self) -> None:
        """Open the group: the servers' workers and the sender meet at a free port of this machine."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        from megatron_meds.weights.export import vllm_source

        self.close()
        world_size, port = 1, 0
        if self._control is not None:
            # A server that has met the sender before lets go of the old group first.
            self._control.shutdown_weight_transfer_engine()
            world_size += sum(self._control.world_sizes())
            port = _free_port()
        info = NCCLTrainerInitInfo(
            master_address=self._address or socket.gethostname(),
            master_port=port,
            world_size=world_size,
            packed_buffer_size_bytes=self._bucket_bytes,
            rank=0 if self._is_sender else 1,
        )
        self._engine = WeightTransferTrainerFactory.trainer_init(
            info,
            client=self._control,  # type: ignore[arg-type]
            source=vllm_source(self._stream),  # type: ignore[arg-type]
        )

    def send(self) -> None:
        """vLLM's engine starts, broadcasts, and finishes; what it leaves of the stream after a failure
        is stepped through, because other ranks are in it."""
        assert self._engine is not None  # WeightSync connects first
        try:
            self._engine.send_weights()
        finally:
            self._stream.drain()

    def skip(self, failure: Exception) -> None:
        """Step through the stream, because the other ranks are in it."""
        Checked(self._stream, is_sender=False).feed(lambda name, tensor: None)

    def close(self) -> None:
        """Leave the group."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _abort(self) -> None:
        """A server failed: without it, the broadcast that waits for it would never end."""
        if self._engine is not None:
            self._engine.shutdown()


class _AbortingControl:
    """The control client, ending the broadcast when a server fails to receive."""

    def __init__(self, control: ControlClient, abort: Callable[[], None]) -> None:
        self._control = control
        self._abort = abort
        self.init_weight_transfer_engine = control.init_weight_transfer_engine
        self.shutdown_weight_transfer_engine = control.shutdown_weight_transfer_engine
        self.start_weight_update = control.start_weight_update
        self.finish_weight_update = control.finish_weight_update
        self.world_sizes = control.world_sizes

    def update_weights(self, update_info: dict | list[dict]) -> None:
        try:
            self._control.update_weights(update_info)
        except SyncError:
            self._abort()
            raise


class _Pass:
    """A source whose current pass can be stepped to its end from outside."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._current: Iterator[tuple[str, torch.Tensor | None]] = iter(())

    def manifest(self) -> Sequence[Listed]:
        return self._source.manifest()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        self._current = self._source.tensors()
        return self._current

    def drain(self) -> None:
        """Step to the end; nothing to do after a whole pass."""
        for _ in self._current:
            pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
