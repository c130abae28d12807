"""Where the steps of a chain of thought begin. Knows text and nothing of tokens' ids, models or rewards.

Source: VSRM, arXiv 2508.10293, and its authors' released code.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

OPEN, CLOSE = "<think>", "</think>"


def _cases(word: str) -> tuple[str, str, str]:
    return word, word.capitalize(), word.upper()


def _first_letter(phrase: str) -> tuple[str, str]:
    return phrase, phrase[0].lower() + phrase[1:]


RELEASED_MARKERS = (
    *(case for word in ("wait", "but", "alternatively", "however", "hmm") for case in _cases(word)),
    *(
        case
        for phrase in (
            "Let me double-check", "But wait", "Hold on", "Looking back", "Seems solid", "Similarly",
            "That's correct, but", "That seems right", "Wait, but",
        )
        for case in _first_letter(phrase)
    ),
    "So",
)  # fmt: skip
"""What the released code looks for."""
MARKERS = (*RELEASED_MARKERS, "Therefore", "Thus", "Hence")
"""The default: also the conclusions that the paper's announcement names."""


@dataclass(frozen=True)
class StepRules:
    """How a chain of thought is cut. `StepRules.sound()` is the default, `StepRules.released()` what the
    authors' code does."""

    skip: int = 1000
    """Length at the beginning of the reasoning, which restates the problem, without a split."""
    gap: int = 400
    """Least distance between splits."""
    unit: Literal["characters", "tokens"] = "characters"
    """Of `skip` and `gap`."""
    markers: tuple[str, ...] = MARKERS
    """Words that begin a step, in the cases listed."""
    match: Literal["word", "substring"] = "word"
    """`substring`: also within a word, as "So" in "Solving"."""
    measure: Literal["split", "marker"] = "split"
    """What `skip` and `gap` hold for: the split, or the marker, which may stand later in its sentence."""
    decimal_ends: bool = False
    """Whether a `.` between digits ends a sentence."""
    open_tag: str = OPEN
    close_tag: str = CLOSE

    def __post_init__(self) -> None:
        if self.skip < 0 or self.gap < 0:
            raise ValueError(f"skip = {self.skip} and gap = {self.gap} must be 0 or more")
        if not self.markers or not all(self.markers):
            raise ValueError("markers: there must be one or more, none of them empty")
        if not self.open_tag or not self.close_tag:
            raise ValueError("open_tag and close_tag must not be empty")

    @classmethod
    def sound(cls) -> StepRules:
        """Whole words; every split is `skip` into the reasoning and `gap` after the one before."""
        return cls()

    @classmethod
    def released(cls) -> StepRules:
        """As the authors' code: markers within words, lengths by the marker, a `.` always ends a sentence."""
        return cls(markers=RELEASED_MARKERS, match="substring", measure="marker", decimal_ends=True)


@dataclass(frozen=True)
class Region:
    """The reasoning within a response: characters `start` to `end`, tags left out."""

    start: int
    end: int
    closed: bool
    """Whether the closing tag follows; else the response ends within the reasoning."""


def find_region(response: str, rules: StepRules, opened: bool = False) -> Region | None:
    """Where the reasoning stands, or None where a response has none.

    From the first opening tag to the first closing tag after it; whatever tags stand inside or later
    are text. Where the prompt ends with the opening tag, or a response closes what it did not open,
    the reasoning begins with the response (after the opening tag, where the response repeats it).

    Args:
        opened: the prompt ends with the opening tag.
    """
    opening, closing = response.find(rules.open_tag), response.find(rules.close_tag)
    if opened:
        repeated = opening >= 0 and not response[:opening].strip()
        start = opening + len(rules.open_tag) if repeated else 0
    elif opening >= 0 and not 0 <= closing < opening:
        start = opening + len(rules.open_tag)
    elif closing >= 0:
        start = 0
    else:
        return None
    end = response.find(rules.close_tag, start)
    return Region(start, len(response) if end < 0 else end, closed=end >= 0)


def split_steps(
    response: str,
    rules: StepRules | None = None,
    *,
    opened: bool = False,
    token_at: Callable[[int], int] | None = None,
) -> list[int]:
    """Offsets of the characters with which the steps of a response begin, ascending.

    What stands before the first one restates the problem and is no step. A marker moves the split to
    the start of its sentence: just after the nearest `.`, `!`, `?` or newline to its left.

    Args:
        rules: `StepRules.sound()` where left out.
        opened: the prompt ends with the opening tag, as with templates of R1-style models.
        token_at: number of the token that holds a character, for rules that count tokens.

    Returns:
        [P] offsets into `response`; [] where it has no reasoning or no marker.

    Raises:
        ValueError: the rules count tokens, and there is no `token_at`.
    """
    rules = rules or StepRules.sound()
    if rules.unit == "tokens" and token_at is None:
        raise ValueError("rules with unit = tokens need token_at, the token of each character")
    region = find_region(response, rules, opened)
    if region is None or region.start == region.end:
        return []
    place = token_at if rules.unit == "tokens" and token_at is not None else _same
    ends = sentence_ends(response, region, rules.decimal_ends)
    first, last = place(region.start), None
    splits: list[int] = []
    for marker in _marker_places(response, region, rules):
        before = bisect_left(ends, marker + 1)
        split = ends[before - 1] if before else region.start
        measured = place(marker if rules.measure == "marker" else split)
        if measured - first < rules.skip:
            continue
        if last is not None and (measured - last < rules.gap or split <= splits[-1]):
            continue
        splits.append(split)
        last = place(split)
    return splits


def sentence_ends(text: str, region: Region, decimal_ends: bool) -> list[int]:
    """Offsets just after every character of the region that ends a sentence, ascending."""
    pattern = r"[.!?\n]" if decimal_ends else r"(?<![0-9])[.!?\n]|(?<=[0-9])(?:[!?\n]|\.(?![0-9]))"
    return [m.end() for m in re.compile(pattern).finditer(text, region.start, region.end)]


def _marker_places(text: str, region: Region, rules: StepRules) -> list[int]:
    """Offsets of the markers that lie within the region, ascending, each once."""
    found = _pattern(rules.markers, rules.match).finditer(text, region.start, region.end)
    return [m.start() for m in found]


@lru_cache(maxsize=8)
def _pattern(markers: tuple[str, ...], match: str) -> re.Pattern[str]:
    """Looks ahead, so that a marker inside another one is found too."""
    words = "|".join(re.escape(m) for m in sorted(set(markers), key=len, reverse=True))
    if match == "substring":
        return re.compile(f"(?=(?:{words}))")
    return re.compile(rf"(?<!\w)(?=(?:{words})(?!\w))")


def _same(offset: int) -> int:
    return offset
