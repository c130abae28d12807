"""A few grading processes and the clock over them. Knows how to start, feed, time and kill them.

Knows nothing of answers. Processes are started afresh (never forked), in sessions of their own; the
parent keeps the wall clock of the item each one is at, and needs neither signals nor threads for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from megatron_meds.errors import UserError

Item = tuple[str, str, str]
"""(kind, text, gold), see `worker`."""

_START_SECONDS = 300.0
_LARGEST_BATCH = 32


class WorkerError(UserError):
    """A grading process that cannot start; says why."""


@dataclass(frozen=True)
class Result:
    """What became of one item."""

    reason: str
    """The worker's word, or `timeout`, or `crash` where its process died over the item."""
    detail: str = ""


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    since: float
    """When it was started, or began with the first item of `items` (monotonic seconds)."""
    ready: bool = False
    items: deque[int] = field(default_factory=deque)
    """Numbers of the items it was sent and has not answered, in its order."""


class WorkerPool:
    """Runs items in `workers` processes, at most `timeout` seconds of wall clock each.

    May be shared by threads: calls of `run` take turns.
    """

    def __init__(self, workers: int, timeout: float, function: str | None, memory_mib: int | None) -> None:
        self._timeout = timeout
        self._setup = {
            "function": function,
            "memory_mib": memory_mib,
            "alarm_seconds": 2.0 * timeout + 10.0,
        }
        self._size = workers
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._open = False

    def start(self) -> None:
        """Start the processes and wait until each can grade.

        Raises:
            WorkerError: one cannot, such as a user's module that does not import.
        """
        with self._lock:
            self._open = True
            try:
                self._fill()
                while not all(w.ready for w in self._workers):
                    self._turn([], deque(), [])
            except BaseException:
                self._drop_all()
                self._open = False
                raise

    def close(self) -> None:
        """End the processes, at once."""
        with self._lock:
            self._open = False
            self._drop_all()

    def run(self, items: Sequence[Item]) -> list[Result]:
        """Grade the items, in their order.

        Raises:
            RuntimeError: the pool is not started.
            WorkerError: a process that had to be replaced cannot start again.
        """
        with self._lock:
            if not self._open:
                raise RuntimeError("the grader is not running: use it as a context manager")
            results: list[Result | None] = [None] * len(items)
            pending = deque(range(len(items)))
            try:
                while any(r is None for r in results):
                    self._fill()
                    self._turn(items, pending, results)
            except BaseException:
                self._drop_all()  # none may answer for an item of this call in the next one
                raise
            return [r for r in results if r is not None]

    def _fill(self) -> None:
        while len(self._workers) < self._size:
            self._workers.append(_spawn(self._setup))

    def _turn(self, items: Sequence[Item], pending: deque[int], results: list[Result | None]) -> None:
        """Hand out work, wait for the next answer or the next deadline, and deal with either."""
        for worker in self._workers:
            if worker.ready and not worker.items and pending:
                self._feed(worker, items, pending)
        busy = [w for w in self._workers if w.items or not w.ready]
        next_deadline = min((self._deadline(w) for w in busy), default=time.monotonic())
        speaking = wait([w.connection for w in busy], max(0.0, next_deadline - time.monotonic()))
        for worker in busy:
            if worker.connection in speaking:
                self._listen(worker, pending, results)
            # The clock is read after the socket: a slow parent is not held against the worker.
            elif worker.ready and time.monotonic() >= self._deadline(worker):
                results[worker.items.popleft()] = Result("timeout")
                self._drop(worker, pending)
            elif not worker.ready and time.monotonic() >= self._deadline(worker):
                raise WorkerError(f"a grading process was not ready within {_START_SECONDS:.0f} s")

    def _deadline(self, worker: _Worker) -> float:
        return worker.since + (self._timeout if worker.ready else _START_SECONDS)

    def _feed(self, worker: _Worker, items: Sequence[Item], pending: deque[int]) -> None:
        share = -(-len(pending) // (4 * self._size))
        batch = [pending.popleft() for _ in range(min(_LARGEST_BATCH, share))]
        worker.items.extend(batch)
        worker.since = time.monotonic()
        try:
            worker.connection.send_bytes(json.dumps([items[i] for i in batch]).encode())
        except (BrokenPipeError, ConnectionResetError):  # it died idle: no item is to blame
            self._drop(worker, pending)

    def _listen(self, worker: _Worker, pending: deque[int], results: list[Result | None]) -> None:
        try:
            message = json.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            if not worker.ready:
                status = worker.process.wait()
                raise WorkerError(
                    f"a grading process ended while starting, status {status}; its standard error says why "
                    "(or verify.memory_mib is too little)"
                ) from None
            results[worker.items.popleft()] = Result("crash")
            self._drop(worker, pending)
            return
        if "failed" in message:
            raise WorkerError(message["failed"])
        worker.since = time.monotonic()
        if not worker.ready:
            worker.ready = True
            return
        results[worker.items.popleft()] = Result(message["reason"], message["detail"])

    def _drop(self, worker: _Worker, pending: deque[int]) -> None:
        """Kill a process; what it had not come to goes back to the front of the queue."""
        pending.extendleft(reversed(worker.items))
        self._workers.remove(worker)
        _kill(worker)

    def _drop_all(self) -> None:
        while self._workers:
            _kill(self._workers.pop())


def _spawn(setup: dict[str, object]) -> _Worker:
    ours, theirs = Pipe()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_meds.verify.worker", str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what a user's function prints goes to the log
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    theirs.close()
    ours.send_bytes(json.dumps(setup).encode())
    return _Worker(process, ours, time.monotonic())


def _kill(worker: _Worker) -> None:
    """End the process and all that it started."""
    worker.connection.close()
    with contextlib.suppress(ProcessLookupError):  # gone already
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
