"""The process that grades: takes items from its parent one batch at a time, answers each as it is done.

Knows no pool and keeps no clock of its own, but for one alarm that ends it should the parent be gone
while it is stuck. Talks JSON over an inherited socket: nothing it sends can run anything in the parent.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from megatron_meds.imports import load_function
from megatron_meds.verify.confine import forbid, limit_memory

Grade = Callable[[str, str, str], tuple[str, str]]
"""(kind, text, gold) -> (reason, detail)"""


def main() -> None:
    """Serve until the parent closes its end; `argv[1]` is the socket's descriptor."""
    connection = Connection(int(sys.argv[1]))
    setup = json.loads(connection.recv_bytes())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limit_memory(setup["memory_mib"])
    try:
        grade = _own_function(setup["function"]) if setup["function"] else _comparison()
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises is told to the parent
        _send(connection, {"failed": f"{type(error).__name__}: {error}"})
        return
    _send(connection, {"ready": True})
    try:
        _serve(connection, grade, setup["alarm_seconds"])
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent has what it wanted, or is gone


def _serve(connection: Connection, grade: Grade, alarm_seconds: float) -> None:
    while True:
        for kind, text, gold in json.loads(connection.recv_bytes()):
            # Disposition is the default one: the kernel ends the process, whatever Python is doing.
            signal.setitimer(signal.ITIMER_REAL, alarm_seconds)
            reason, detail = grade(kind, text, gold)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            _send(connection, {"reason": reason, "detail": detail})


def _comparison() -> Grade:
    from megatron_meds.verify import compare

    compare.warm_up()
    attempts = forbid()

    def grade(kind: str, text: str, gold: str) -> tuple[str, str]:
        attempts.clear()
        try:
            right = compare.parses(gold) if kind == "gold" else compare.equal(text, gold)
        except Exception as error:  # noqa: BLE001 - a model's text may break the parser in any way
            return "wrong", type(error).__name__
        return ("right" if right else "wrong"), ("" if not attempts else f"refused {attempts[0]}")

    return grade


def _own_function(path: str) -> Grade:
    function = load_function(path, "verify.function")

    def grade(kind: str, text: str, gold: str) -> tuple[str, str]:
        try:
            return ("right" if _boolean(function(text, gold)) else "wrong"), ""
        except Exception as error:  # noqa: BLE001 - told to the parent, which counts and logs it
            return "error", f"{type(error).__name__}: {error}"

    return grade


def _boolean(value: Any) -> bool:
    if value is True or value is False:
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise TypeError(f"returned {value!r:.80}, not a bool")


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main()
