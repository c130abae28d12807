"""A local action on every rank that fails on all of them if it fails on one.

Without this, the rank that failed leaves and the others wait for it in their next collective.
Knows nothing of what is done, nor of how ranks exchange values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_meds.errors import UserError

Gather = Callable[[Any], list[Any]]
"""A collective: every rank's value on every rank, by rank (`Mesh.all_gather`)."""


class RankError(RuntimeError):
    """An action failed on some rank; the message says on which, and how."""


class RankUserError(RankError, UserError):
    """A RankError whose every failure is the user's to mend."""


def alone(value: Any) -> list[Any]:
    """The Gather of a single process."""
    return [value]


def together[T](action: Callable[[], T], what: str, all_gather: Gather = alone) -> T:
    """Run `action` on this rank, and return its value once it has succeeded on all ranks.

    A collective, and a barrier. The action itself must not wait for other ranks, unless it fails
    on all of them when it fails on one.

    Args:
        what: what could not be done, to begin the message with.

    Raises:
        RankError: the action raised on some rank; on that one, with what it raised as the cause.
    """
    failure: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        failure = error
    told = all_gather(None if failure is None else _told(failure))
    failed = {rank: one for rank, one in enumerate(told) if one is not None}
    if failed:
        kind = RankUserError if all(refused for refused, _ in failed.values()) else RankError
        raise kind(f"{what}: {_summary({rank: text for rank, (_, text) in failed.items()})}") from failure
    return result  # type: ignore[return-value]


def _told(failure: Exception) -> tuple[bool, str]:
    """Whether it is the user's to mend, and its message."""
    if isinstance(failure, UserError):
        return True, str(failure)
    return False, f"{type(failure).__name__}: {failure}"


def _summary(failed: dict[int, str]) -> str:
    """Each different failure once, with the ranks it happened on."""
    ranks: dict[str, list[int]] = {}
    for rank, text in failed.items():
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{_ranks(numbers)}: {text}" for text, numbers in ranks.items())


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"
