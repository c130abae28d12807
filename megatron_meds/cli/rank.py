"""One rank of a run: what torchrun starts, `python -m megatron_meds.cli.rank SETTINGS.yaml [TASK ...]`.

A task is `train` (the default) or `check-sync`; words after it are the task's options.

An uncaught error is written to the folder ERRORS_FOLDER names and not printed: the launcher prints the
one that came first, because the others only say that a peer is gone.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from megatron_meds.errors import UserError

if TYPE_CHECKING:
    from megatron_meds.config import Settings

ERRORS_FOLDER = "MEGATRON_MEDS_ERRORS"


def _write_down(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An excepthook: the traceback goes to a file of this rank."""
    if issubclass(kind, KeyboardInterrupt):
        return
    if isinstance(error, UserError):
        text = "".join(f"error: {fault}\n" for fault in error.faults)
    else:
        rank = os.environ["RANK"]
        text = f"rank {rank} failed:\n" + "".join(traceback.format_exception(kind, error, trace))
    (Path(os.environ[ERRORS_FOLDER]) / f"rank_{os.environ['RANK']}.txt").write_text(text)


def main() -> None:
    """Do the task, by the settings in the file that the first argument names."""
    faulthandler.enable()
    if ERRORS_FOLDER in os.environ:
        sys.excepthook = _write_down
    # From here on an interrupt or an error while the large imports run is handled like any other.
    from megatron_meds.config import load

    settings, (task, *options) = Path(sys.argv[1]), sys.argv[2:] or ["train"]
    try:
        perform(load(settings), task, options)
    except UserError as error:
        if ERRORS_FOLDER not in os.environ:
            raise
        _write_down(type(error), error, None)
        sys.exit(2)


def perform(settings: Settings, task: str, options: Sequence[str] = ()) -> None:
    """What this rank is there for."""
    if task == "check-sync":
        from megatron_meds.sync_check import check_sync

        check_sync(settings, rejoin="rejoin" in options, outputs="no-outputs" not in options)
    else:
        from megatron_meds.train import train

        train(settings)


if __name__ == "__main__":
    main()
