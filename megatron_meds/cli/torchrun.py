"""Starts the ranks of a run on this machine with torchrun, and reports how they ended.

Knows how ranks are started and what they leave behind when they fail; nothing of what they do.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_meds import machine
from megatron_meds.cli.rank import ERRORS_FOLDER
from megatron_meds.config import Settings, dump


def run_ranks(
    settings: Settings, world_size: int, entry: str = "megatron_meds.cli.rank", task: Sequence[str] = ()
) -> int:
    """Run the module `entry` on `world_size` ranks; its arguments are the settings' path and `task`.

    Returns the exit code: 0, that of the rank that failed first (128 + n if signal n ended it), or
    128 + n where signal n told this process to stop. The failing rank's error is printed once.
    """
    set_threads(world_size)
    with tempfile.TemporaryDirectory(prefix="megatron-meds-") as folder:
        errors = Path(folder)
        arguments = errors / "settings.yaml"
        arguments.write_text(dump(settings))
        os.environ[ERRORS_FOLDER] = folder
        return _torchrun(world_size, [entry, str(arguments), *task], errors)


def set_threads(ranks: int) -> None:
    """Share this machine's cores among its ranks, unless OMP_NUM_THREADS says otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, machine.cores() // ranks)))


def _torchrun(world_size: int, entry: list[str], errors: Path) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    _quiet_torchrun()
    command = ["--standalone", "--nproc-per-node", str(world_size)]
    command += ["--module", *entry]
    try:
        run(parse_args(command))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        return _report(rank, failure.exitcode, errors)
    except SignalException as stopped:
        print(f"stopped by {stopped.sigval.name}", file=sys.stderr)
        return 128 + stopped.sigval
    return 0


def _quiet_torchrun() -> None:
    """torchrun's own log repeats a rank's end in many lines; `_report` says it in one place."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _report(rank: int, exit_code: int, errors: Path) -> int:
    written = sorted(errors.glob("rank_*.txt"), key=lambda file: file.stat().st_mtime_ns)
    if written:
        print(written[0].read_text(), file=sys.stderr, end="")
    elif exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = "; the kernel does this when memory runs out" if name == "SIGKILL" else ""
        print(f"rank {rank} was ended by {name}{hint}", file=sys.stderr)
    else:
        print(f"rank {rank} ended with exit code {exit_code}", file=sys.stderr)
    return 128 - exit_code if exit_code < 0 else exit_code
