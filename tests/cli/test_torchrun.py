"""Ranks started on this machine: exit codes, and what is printed when one of them fails."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_run import write_run

ROOT = Path(__file__).parents[2]
START = """
import sys
from megatron_meds.cli.torchrun import run_ranks
from megatron_meds.config import load
sys.exit(run_ranks(load(sys.argv[1]), 2, entry="tests.cli.rank_that_fails"))
"""


def start(folder: Path, how: str) -> subprocess.Popen:
    inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        [sys.executable, "-c", START, str(write_run(folder / "run"))],
        cwd=ROOT,
        env={**inherited, "HOW": how},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(folder: Path, how: str) -> tuple[int, str, str]:
    process = start(folder, how)
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def test_ranks_get_the_settings_and_a_share_of_the_cores(tmp_path: Path):
    code, output, errors = outcome(tmp_path, "well")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert code == 0, errors
    assert sorted(output.splitlines()) == [f"rank {r} threads {threads} steps 3" for r in (0, 1)]
    assert errors == ""


def test_the_rank_that_failed_is_told_once_and_nothing_else(tmp_path: Path):
    code, output, errors = outcome(tmp_path, "raise")
    assert code == 1
    assert output == ""
    assert errors.startswith("rank 1 failed:\nTraceback")
    assert errors.endswith("RuntimeError: the reason why\n")
    assert errors.count("Traceback") == 1


def test_a_fault_found_by_a_rank_reads_like_one_found_before(tmp_path: Path):
    code, _, errors = outcome(tmp_path, "fault")
    assert (code, errors) == (2, "error: data.train.0: row 7 has no answer\n")


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path):
    code, _, errors = outcome(tmp_path, "die")
    assert code == 128 + signal.SIGKILL
    assert "rank 1 was ended by SIGKILL" in errors
    assert "memory" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_every_rank(tmp_path: Path, number: signal.Signals):
    process = start(tmp_path, "sleep")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert errors == f"stopped by {number.name}\n"
    assert len(ranks) == 2
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
