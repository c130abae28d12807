"""What a row says, and how rows become a table. Needs nothing but the standard library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["pass", "FAIL", "measured", "not here"]


class NotHere(Exception):  # noqa: N818 - reads as what it says
    """A row cannot be run here: what it needs is not installed, or there are too few devices."""


@dataclass(frozen=True)
class Finding:
    """What a row found."""

    found: str
    limit: str = ""
    """What it was held to; empty: a measurement only."""
    ok: bool = True
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    check: str
    status: Status
    found: str
    limit: str
    seconds: float
    numbers: dict[str, float]


HEADINGS = ("check", "result", "found", "limit", "s")


def cells(line: Line) -> tuple[str, ...]:
    return line.check, line.status, line.found, line.limit, f"{line.seconds:.1f}"


def as_text(lines: list[Line]) -> str:
    """Columns of equal width; the last line of an error only."""
    rows = [HEADINGS, *map(cells, lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def as_markdown(lines: list[Line], heading: str) -> str:
    """A table for a document, under the machine it was made on."""
    rows = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    rows += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(line)) + " |" for line in lines]
    return f"{heading}\n\n" + "\n".join(rows) + "\n"
