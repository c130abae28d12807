"""Replicas as threads of one process, with an exchange among them that waits like a collective."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Replicas:
    """`run` calls a function as each of `count` replicas at once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._table: list[Sequence[Any]] = [()] * count
        self._barrier = threading.Barrier(count, timeout=60)

    def exchange(self, replica: int) -> Callable[[Sequence[Any]], list[Any]]:
        def send(outgoing: Sequence[Any]) -> list[Any]:
            assert len(outgoing) == self.count
            self._table[replica] = list(outgoing)
            self._barrier.wait()
            received = [row[replica] for row in self._table]
            self._barrier.wait()
            return received

        return send

    def run(self, action: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(action, range(self.count)))
