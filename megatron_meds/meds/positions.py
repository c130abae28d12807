r"""Which token of a response begins its answer, and which position predicts it.

Works from the real response ids and a function that decodes ids; knows no tokenizer. Nothing is
tokenised again, so that a token may hold any part of `\boxed{42}`, or several, or a part of a character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_meds.boxes import NoBox, find_last_box

Decode = Callable[[list[int]], str]
"""Ids to text, special tokens left out or not: the way the response's own text was made."""
NoFeature = NoBox | Literal["first token"]
"""Why a response has no feature. `first token`: its answer begins with its very first token, which the
prompt's last position predicts."""


@dataclass(frozen=True)
class AnswerToken:
    """The token y* that holds the first character of the answer in a response."""

    index: int
    """Its number among the response tokens, 1 or more."""
    token_id: int

    @property
    def position(self) -> int:
        """The response token whose hidden states predict it: index - 1."""
        return self.index - 1


def find_answer_token(response_ids: Sequence[int], text: str, decode: Decode) -> AnswerToken | NoFeature:
    """The first token of the answer in the last box of a response, or why there is none.

    Args:
        response_ids: as sampled.
        text: `decode` of all of them.
        decode: such as the tokenizer's, special tokens left out.

    Raises:
        ValueError: `text` is not what the ids decode to.
    """
    span = find_last_box(text)
    if isinstance(span, str):
        return span
    index = token_at(response_ids, span[0], text, decode)
    return AnswerToken(index, response_ids[index]) if index else "first token"


def token_at(ids: Sequence[int], offset: int, text: str, decode: Decode) -> int:
    """Index of the token that holds the character at `offset` of the text, its first one if it has several.

    That is the largest k for which the first k ids decode to at most `offset` characters; found from
    the text's end backwards, in steps that double, then by halving. Decoders that show each byte of
    an unfinished character as one of its own are searched to its beginning.

    Raises:
        ValueError: `text` is not what the ids decode to, or ends before `offset`.
    """
    whole = list(ids)
    if decode(whole) != text:
        raise ValueError("the text is not what the response ids decode to: decode both the same way")
    if not 0 <= offset < len(text):
        raise ValueError(f"offset {offset} lies outside of a text of {len(text)} characters")

    def reaches(count: int) -> bool:
        return len(decode(whole[:count])) > offset

    # The end of the text is nearest to the answer of most responses.
    above, step = len(whole), 16
    while (below := max(above - step, 0)) and reaches(below):
        above, step = below, 2 * step
    while above - below > 1:
        middle = (above + below) // 2
        if reaches(middle):
            above = middle
        else:
            below = middle
    # A prefix that ends within a character may be longer than one that ends behind it.
    for count in range(above, min(above + _LONGEST_CHARACTER, len(whole))):
        if not reaches(count):
            below = count
    return below


_LONGEST_CHARACTER = 4
"""Bytes, hence tokens, of a character in UTF-8."""
