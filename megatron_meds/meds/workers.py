"""Processes that cluster: a request of many sets out, their labels back. Knows nothing of prompts.

scikit-learn's HDBSCAN holds the interpreter's lock, so threads do not speed it up. Processes are
started afresh (never forked) and end when this one does, because their input closes. What a set's
labels are does not depend on which process clusters it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from megatron_meds.meds.clustering import Backend, cluster_grown
from megatron_meds.meds.trees import Tree

Found = tuple[list[np.ndarray], list[Tree | None]]
"""Labels and trees, as `cluster_grown` gives them."""
_WORTH_SENDING = 1_000_000
"""Sum of `_cost` below which this process does it all: some 50 ms of work."""
_STOP_SECONDS = 10.0


class ClusterWorkers:
    """Clusters sets in this process and `workers - 1` others. Closes itself as a context manager.

    The others are started when there first is enough to do.
    """

    def __init__(self, backend: Backend = "auto", workers: int = 1) -> None:
        if workers < 1:
            raise ValueError(f"workers = {workers}: one is this process, so 1 or more")
        self.backend: Backend = backend
        self.workers = workers
        self._others: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> ClusterWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cluster(self, sets: Sequence[np.ndarray], before: Sequence[Tree | None]) -> Found:
        """As `cluster_grown`.

        Raises:
            RuntimeError: a worker process ended; says how.
        """
        costs = [_cost(rows, tree) for rows, tree in zip(sets, before, strict=True)]
        if self.workers == 1 or sum(costs) < _WORTH_SENDING:
            return cluster_grown(sets, before, self.backend)
        try:
            return self._share_out(sets, before, costs)
        except (OSError, EOFError) as error:
            codes = [process.poll() for process in self._others]
            self._kill()
            raise RuntimeError(
                f"a clustering process ended (exit codes {codes}); its output says why"
            ) from error
        except BaseException:
            self._kill()  # none may answer a request of this call in the next one
            raise

    def _share_out(
        self, sets: Sequence[np.ndarray], before: Sequence[Tree | None], costs: Sequence[int]
    ) -> Found:
        while len(self._others) < self.workers - 1:
            self._others.append(_start())
        shares = _shares(costs, self.workers)
        requests = [([sets[i] for i in share], [before[i] for i in share]) for share in shares]
        for process, request in zip(self._others, requests[1:], strict=True):
            _send(process.stdin, (*request, self.backend))
        answers: list[Found] = [cluster_grown(*requests[0], self.backend)]
        answers += [_receive(process.stdout) for process in self._others]
        found: dict[int, tuple[np.ndarray, Tree | None]] = {}
        for share, (labels, trees) in zip(shares, answers, strict=True):
            found.update(zip(share, zip(labels, trees, strict=True), strict=True))
        return [found[i][0] for i in range(len(sets))], [found[i][1] for i in range(len(sets))]

    def close(self) -> None:
        """End the processes."""
        for process in self._others:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended before, with a request unread
                process.stdin.close()
        for process in self._others:
            process.wait(_STOP_SECONDS)
            assert process.stdout is not None
            process.stdout.close()
        self._others = []

    def _kill(self) -> None:
        for process in self._others:
            process.kill()
        self.close()


def _cost(rows: np.ndarray, tree: Tree | None) -> int:
    """Distances to look at; some more where a tree has to be grown, for its edges."""
    if tree is None:
        return len(rows) ** 2
    return 2 * len(rows) * (len(rows) - len(tree.lengths) + 16)


def _shares(costs: Sequence[int], count: int) -> list[list[int]]:
    """Deal numbers to `count` shares of about equal cost, the costliest first."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        lightest = loads.index(min(loads))
        shares[lightest].append(index)
        loads[lightest] += costs[index] + 1
    return shares


def _start() -> subprocess.Popen[bytes]:
    """A worker: the same interpreter and import path, one thread, its errors where ours go."""
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    environment = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_meds.meds.workers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # an interrupt from the terminal is ours to deal with
    )


def _send(stream: IO[bytes] | None, value: Any) -> None:
    assert stream is not None
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(struct.pack("<Q", len(data)))
    stream.write(data)
    stream.flush()


def _receive(stream: IO[bytes] | None) -> Any:
    """The next value; raises EOFError where the other side has ended."""
    assert stream is not None
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    (size,) = struct.unpack("<Q", head)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)


def _serve() -> None:
    """The worker's loop: answer requests until the input closes."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not stand among the answers
    while True:
        try:
            request = _receive(requests)
        except EOFError:
            return
        _send(answers, cluster_grown(*request))


if __name__ == "__main__":
    _serve()
