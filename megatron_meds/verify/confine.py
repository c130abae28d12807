"""Takes away from a grading process what a comparison never needs. Knows nothing of answers.

A second line: an answer is parsed, never run. Should a parser or a simplifier be talked into
evaluating text all the same, the process can start nothing, write nothing, open no connection and run
no expression as code; what was tried raises inside the comparison.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

_EVENTS = frozenset(
    {
        "ctypes.dlopen",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.kill",
        "os.posix_spawn",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.system",
        "pty.spawn",
        "shutil.rmtree",
        "socket.bind",
        "socket.connect",
        "subprocess.Popen",
    }
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def limit_memory(mib: int | None) -> None:
    """Bound the address space (MiB); beyond it an allocation raises MemoryError. No core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if mib is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        size = mib << 20
        if hard != resource.RLIM_INFINITY:
            size = min(size, hard)
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def forbid() -> list[str]:
    """From now on refuse processes, connections, writes and code made of expressions, for good.

    Returns:
        The list in which every refused attempt will be noted.
    """
    attempts: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS or _writes(event, arguments) or _runs_expression(event, arguments):
            attempts.append(event)
            raise PermissionError(f"a comparison may not {event}")

    sys.dont_write_bytecode = True
    sys.addaudithook(hook)
    return attempts


def _writes(event: str, arguments: tuple[Any, ...]) -> bool:
    return event == "open" and bool(arguments[2] & _WRITING)


def _runs_expression(event: str, arguments: tuple[Any, ...]) -> bool:
    """sympy's `lambdify` prints a whole expression, names of symbols included, and runs that as
    Python. The other code that sympy makes of text (numbers, monomials) holds digits and its own words."""
    return event == "exec" and arguments[0].co_filename.startswith("<lambdify")
