r"""Where the last box of a response stands, or why there is none. Knows strings only.

A box is `\boxed{...}`, `\fbox{...}`, or one without braces, as in `\boxed 42`. Only the last box of
a text counts: where it is empty or never closed there is no answer, whatever stood in an earlier one.
"""

from __future__ import annotations

import re
from typing import Literal

NoBox = Literal["no box", "cut box", "open box", "empty box"]
"""Why a text has no answer in a box: there is none; the text ends right where the answer would begin;
it ends before the brace that closes the box; nothing but white space is in it."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE_END = re.compile(r"[\s$]|\\[)\]]")
_BARE_TAIL = ".,;:"


def find_last_box(text: str) -> tuple[int, int] | NoBox:
    """Where the answer in the last box stands: character offsets (start, end), end exclusive.

    With braces `start` is right after the opening one and `end` at the closing one, white space
    included. Where there is no answer, the reason. A box inside a box is later than its surroundings.
    Runs in time linear in the text.
    """
    last = None
    for last in _BOX.finditer(text):  # noqa: B007 - only the last one counts
        pass
    if last is None:
        return "no box"
    start = last.end()
    braced = text.startswith("{", start)
    start += braced
    if not text[start:].strip():
        return "cut box"
    end = _closing_brace(text, start) if braced else _bare_end(text, start)
    if end is None:
        return "open box"
    return (start, end) if text[start:end].strip() else "empty box"


def _closing_brace(text: str, start: int) -> int | None:
    """Offset of the brace that closes what was opened before `start`; escaped braces do not count."""
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


def _bare_end(text: str, start: int) -> int | None:
    r"""End of an answer without braces around it: white space, `$`, `\)` or `\]` outside of braces,
    the brace of something around it, or the end of the text; a closing punctuation mark is left out."""
    position = start
    while position < len(text):
        if text[position] == "}" or _BARE_END.match(text, position):
            break
        if text[position] == "{":
            closing = _closing_brace(text, position + 1)
            if closing is None:
                return None
            position = closing
        elif text[position] == "\\":
            position += 1
        position += 1
    end = min(position, len(text))
    while end > start and text[end - 1] in _BARE_TAIL:
        end -= 1
    return end
