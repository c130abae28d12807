"""Is an answer right? Finds it, and compares it with the reference in processes that can be killed.

Knows neither prompts nor rewards. Names are imported when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_meds.verify.boxed import last_boxed, last_boxed_span
    from megatron_meds.verify.grader import GoldError, Grader, Verdict

_HOME = {
    "GoldError": "grader",
    "Grader": "grader",
    "Verdict": "grader",
    "last_boxed": "boxed",
    "last_boxed_span": "boxed",
}

__all__ = ["GoldError", "Grader", "Verdict", "last_boxed", "last_boxed_span"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
