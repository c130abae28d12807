"""A small process between the trainer and one server, so that no server outlives its trainer.

    python -m megatron_meds.rollout.supervisor PARENT GRACE COMMAND [ARGUMENT ...]

It starts the command as the leader of a session of its own, and ends the whole process group, in
order (SIGTERM, GRACE seconds, SIGKILL), when it is told to (SIGTERM), when process PARENT is no
longer its parent (which holds after `kill -9` too), or when the command ends by itself. It leaves
with the command's exit status. Knows nothing of what the command is. Standard library only.
Should it be killed itself, the kernel kills the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Group:
    """A command and all it starts, as one process group."""

    def __init__(self, command: list[str]) -> None:
        def die_with_us() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        self._leader = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_us)
        self.exit_status: int | None = None
        """Of the command, as a shell would give it; None while it runs."""

    def running(self) -> bool:
        """Whether the command runs; takes the exit statuses of everything that has ended, orphans too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == self._leader.pid:
                code = os.waitstatus_to_exitcode(status)
                self._leader.returncode = code
                self.exit_status = code if code >= 0 else 128 - code
        return self.exit_status is None

    def end(self, grace_seconds: float) -> None:
        """SIGTERM to the group, SIGKILL to what is left of it after `grace_seconds`."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + grace_seconds
            self._signal(number)
            while self._signal(0):
                if time.monotonic() > until:
                    break
                time.sleep(0.05)

    def _signal(self, number: int) -> bool:
        """Whether there was still anyone in the group to send it to."""
        self.running()
        try:
            os.killpg(self._leader.pid, number)
        except ProcessLookupError:
            return False
        return True


def main(parent: int, grace_seconds: float, command: list[str]) -> int:
    """Run the command until it ends, we are told to end it, or the parent is gone."""
    told = False

    def end(signum: int, frame: object) -> None:
        nonlocal told
        told = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then tells us
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what the command leaves behind becomes our child
    group = Group(command)
    while group.running() and not told and os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    group.end(grace_seconds)
    return group.exit_status if group.exit_status is not None else 1


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
