"""Training questions that an evaluation set asks too: found by their letters and digits, told, left out.

Copies of one problem differ in spaces, punctuation and LaTeX delimiters, so that `prompt_id` does not see
all of them. Knows prompts, not where they come from.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_meds.data.fields import DataError
from megatron_meds.trajectory import Prompt


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
        ids.setdefault(letters_and_digits(prompt.question), set()).add(prompt.id)
    asked: dict[str, int] = {}
    shared: set[str] = set()
    for name, prompts in evaluation.items():
        found = [key for prompt in prompts if (key := letters_and_digits(prompt.question)) in ids]
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


def letters_and_digits(question: str) -> str:
    """The question's letters and digits in lower case, Unicode normalised (NFKC). A question without any
    stands for itself."""
    text = unicodedata.normalize("NFKC", question).casefold()
    return "".join(filter(str.isalnum, text)) or question
