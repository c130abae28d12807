r"""Finds the answer in a response: what stands in its last box. Knows strings only.

What a box is, and where the last one stands, is `boxes`.
"""

from __future__ import annotations

from megatron_meds.boxes import find_last_box


def last_boxed(text: str) -> str | None:
    r"""The answer in the last box, without white space around it.

    `None` where there is no box, or where the last one is empty or never closed. A box inside a
    box is later than its surroundings. Runs in time linear in the text.

    >>> last_boxed(r"first \boxed{1}, then \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    span = last_boxed_span(text)
    return None if span is None else text[slice(*span)].strip()


def last_boxed_span(text: str) -> tuple[int, int] | None:
    """Where the answer in the last box stands: character offsets (start, end), end exclusive.

    With braces `start` is right after the opening one and `end` at the closing one, white space
    included; `text[start:end].strip() == last_boxed(text)`. `None` where `last_boxed` is.
    """
    span = find_last_box(text)
    return None if isinstance(span, str) else span
