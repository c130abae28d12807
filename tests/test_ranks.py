"""The pool of ranks: results by rank, and a failure that shows itself and leaves no wreck behind."""

from collections.abc import Iterator

import psutil
import pytest

from tests.ranks import RankError, RankPool

BODIES = "tests.distributed.bodies_ranks"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def test_results_come_by_rank(pool):
    assert pool.run(f"{BODIES}:add_rank", value=10) == [10, 11]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("fail_on", r"(?s)rank 1:\nTraceback.*rank 1 fails on purpose"),
        ("sleep_on", r"(?s)no result from ranks \[1\] within 1 s.*in sleep_on"),
        ("leave", r"rank 1:\nthe process ended"),
    ],
)
def test_a_rank_that_fails_hangs_or_ends_is_shown_and_new_ranks_serve_on(pool, body, message):
    pool.run(f"{BODIES}:add_rank", value=0)
    old = list(pool.pids)
    with pytest.raises(RankError, match=message):
        pool.run(f"{BODIES}:{body}", rank=1, timeout=1.0 if body == "sleep_on" else 30.0)
    assert pool.run(f"{BODIES}:add_rank", value=5) == [5, 6]
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in old if psutil.pid_exists(pid)], timeout=10)
    assert not alive
