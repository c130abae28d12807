"""Persistent torchrun ranks for tests: started once, then handed one body after the other.

`RankPool(2).run("tests.distributed.bodies_x:function", layout={"tensor": 2}, key=value)` calls
`function(mesh, key=value)` on both ranks and returns their results by rank. Without a layout the
body gets no mesh. Results and arguments must be picklable.

A body that raises, a rank that dies or a hang fails the test with every traceback there is, and
the next `run` starts new ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
START_TIMEOUT = 240.0
"""Seconds for torchrun and the interpreters to start."""
GRACE = 5.0
"""Seconds the other ranks get to report after one has failed."""


class RankError(AssertionError):
    """A body failed on one or more ranks; the message holds their tracebacks."""


class RankPool:
    """`world_size` processes under one torchrun, on gloo, one thread each."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[Connection] = []
        self._pids: list[int] = []
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; none before the first `run`."""
        return list(self._pids)

    def run(
        self, body: str, layout: dict[str, Any] | None = None, timeout: float = 300.0, **kwargs: Any
    ) -> list[Any]:
        """Call `body` (`module:function`) on every rank; the results by rank.

        Raises:
            RankError: a rank raised, died, or did not return within `timeout` seconds.
        """
        if self._torchrun is None:
            self._start()
        job = pickle.dumps((body, layout, kwargs))
        for rank in self._ranks:
            rank.send_bytes(job)
        return self._collect(body, timeout)

    def _collect(self, body: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        waiting = {connection: rank for rank, connection in enumerate(self._ranks)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), timeout=left):
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    ok, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    ok, value = False, "the process ended"
                (results if ok else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        if not failures and not waiting:
            return [results[rank] for rank in range(self.world_size)]
        message = self._report(body, timeout, failures, sorted(waiting.values()))
        self.close()
        raise RankError(message)

    def _report(self, body: str, timeout: float, failures: dict[int, str], silent: list[int]) -> str:
        """What every failed rank said; where the silent ones stand, when none failed."""
        lines = [f"{body} on {self.world_size} ranks"]
        lines += [f"--- rank {rank}:\n{text}" for rank, text in sorted(failures.items())]
        if silent:
            lines.append(
                f"--- no result from ranks {silent}" + ("" if failures else f" within {timeout:g} s")
            )
            for rank in silent:
                os.kill(self._pids[rank], signal.SIGUSR1)  # faulthandler writes the stacks to the log
            time.sleep(1.0)
        lines.append("--- end of the ranks' output:\n" + self._log_tail())
        return "\n".join(lines)

    def _log_tail(self) -> str:
        assert self._folder is not None
        return (Path(self._folder.name) / "log").read_text(errors="replace")[-8000:]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        address = str(Path(self._folder.name) / "socket")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "RANKS_ADDRESS": address,
            "RANKS_OWNER": str(os.getpid()),
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={self.world_size}", "-m", "tests.ranks"]
        with Listener(address, "AF_UNIX") as listener, (Path(self._folder.name) / "log").open("wb") as log:
            self._torchrun = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            self._accept(listener)

    def _accept(self, listener: Listener) -> None:
        """Take the call of every rank; each says its rank and process id first."""
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        called: dict[int, tuple[Connection, int]] = {}
        deadline = time.monotonic() + START_TIMEOUT
        while len(called) < self.world_size:
            assert self._torchrun is not None
            if self._torchrun.poll() is not None or time.monotonic() > deadline:
                tail = self._log_tail()
                self.close()
                raise RankError(f"{self.world_size} ranks did not start:\n{tail}")
            try:
                connection = listener.accept()
            except TimeoutError:
                continue
            rank, pid = pickle.loads(connection.recv_bytes())
            called[rank] = (connection, pid)
        self._ranks = [called[rank][0] for rank in range(self.world_size)]
        self._pids = [called[rank][1] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the ranks, whatever they do. The next `run` starts new ones."""
        for connection in self._ranks:
            connection.close()
        if self._torchrun is not None:
            for pid in [self._torchrun.pid, *self._pids]:
                _kill(pid)
            self._torchrun.wait()
        if self._folder is not None:
            self._folder.cleanup()
        self._ranks, self._pids, self._torchrun, self._folder = [], [], None, None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def serve() -> None:
    """A rank's life: wait for a body, run it, send back what it returned or how it failed."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_leave_with, args=(int(os.environ["RANKS_OWNER"]),), daemon=True).start()
    connection = Client(os.environ["RANKS_ADDRESS"], "AF_UNIX")
    connection.send_bytes(pickle.dumps((int(os.environ["RANK"]), os.getpid())))
    while True:
        try:
            body, layout, kwargs = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(_answer(body, layout, kwargs))


def _leave_with(owner: int) -> None:
    """End this process when the test session that started it is gone, whatever it is doing."""
    while Path(f"/proc/{owner}").exists():
        time.sleep(1.0)
    os._exit(1)


def _answer(body: str, layout: dict[str, Any] | None, kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((True, _call(body, layout, kwargs)))
    except Exception:  # noqa: BLE001 - whatever a body raises is the test's to show
        return pickle.dumps((False, traceback.format_exc()))


_open: list[tuple[dict[str, Any], Any]] = []
"""The mesh of the last body and its layout: half a second to make, so that it serves the next body too if
that asks for the same layout."""


def _call(body: str, layout: dict[str, Any] | None, kwargs: dict[str, Any]) -> Any:
    module, _, name = body.partition(":")
    function = getattr(importlib.import_module(module), name)
    if _open and _open[0][0] != layout:
        _open.pop()[1].close()
    if layout is None:
        return function(**kwargs)
    from megatron_meds.actor.mesh import Mesh
    from megatron_meds.actor.settings import LayoutSettings

    if not _open:
        _open.append((layout, Mesh.create(LayoutSettings(**layout), device="cpu", timeout_minutes=5.0)))
    return function(_open[0][1], **kwargs)


if __name__ == "__main__":
    serve()
