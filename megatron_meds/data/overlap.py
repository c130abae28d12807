"""Training questions that an evaluation set asks too: found by letters, digits and signs, told, left out.

Copies of one problem differ in spaces, punctuation and LaTeX delimiters, so that `prompt_id` does not see
all of them. Knows prompts, not where they come from.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_meds.data.fields import DataError
from megatron_meds.trajectory import Prompt

_SIGNS = frozenset("-*/^!%")
"""Signs of arithmetic that Unicode does not count among the mathematical symbols."""
_HYPHEN = re.compile(r"(?<=[^\W\d_])-(?=[^\W\d_])|^\s*-(?=\s)", re.MULTILINE)


@dataclass(frozen=True)
class Overlap:
    """What training and evaluation have in common."""

    asked: dict[str, int]
    """Of each evaluation set that shares any: how many of its problems training asks too."""
    training: frozenset[str]
    """`Prompt.id` of the training questions concerned."""

    def __str__(self) -> str:
        return ", ".join(f"{count} of {name}" for name, count in self.asked.items())


def find_overlap(training: Sequence[Prompt], evaluation: Mapping[str, Sequence[Prompt]]) -> Overlap:
    """The problems that are on both sides."""
    ids: dict[str, set[str]] = {}
    for prompt in training:
        ids.setdefault(core(prompt.question), set()).add(prompt.id)
    asked: dict[str, int] = {}
    shared: set[str] = set()
    for name, prompts in evaluation.items():
        found = [key for prompt in prompts if (key := core(prompt.question)) in ids]
        shared.update(*(ids[key] for key in found))
        if found:
            asked[name] = len(found)
    return Overlap(asked, frozenset(shared))


def without_overlap(training: Sequence[Prompt], overlap: Overlap) -> list[Prompt]:
    """The training prompts that no evaluation set asks.

    Raises:
        DataError: none is left.
    """
    kept = [prompt for prompt in training if prompt.id not in overlap.training]
    if not kept:
        raise DataError(f"data.overlap = drop: every training question is asked in evaluation ({overlap})")
    return kept


def core(question: str) -> str:
    """What makes the problem: letters and digits in lower case and the signs of arithmetic, Unicode
    normalised (NFKC). A question without any stands for itself.

    A minus between letters is a hyphen, one that opens a line a bullet; both are left out.
    """
    text = _HYPHEN.sub("", unicodedata.normalize("NFKC", question).casefold().replace("\N{MINUS SIGN}", "-"))
    return (
        "".join(c for c in text if c.isalnum() or c in _SIGNS or unicodedata.category(c) == "Sm") or question
    )
