"""What ranks do in the tests of the rank pool itself. Imports no torch: such ranks start quickly."""

import os
import time


def add_rank(value: int) -> int:
    return value + int(os.environ["RANK"])


def fail_on(rank: int) -> None:
    """One rank raises; the others would wait for long."""
    if int(os.environ["RANK"]) == rank:
        raise ValueError(f"rank {rank} fails on purpose")
    time.sleep(60)


def sleep_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        time.sleep(60)


def leave(rank: int) -> None:
    """One rank's process ends."""
    if int(os.environ["RANK"]) == rank:
        os._exit(3)
