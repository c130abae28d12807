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

    Prefixes of the ids are decoded, from the end backwards in steps that double, then by halving: most
    answers stand near the end of a response. Only prefixes that decode to a beginning of the text are
    trusted, for one that ends within a character may be shorter or longer than it should be.

    Raises:
        ValueError: `text` is not what the ids decode to, or ends before `offset`.
    """
    whole = list(ids)
    if decode(whole) != text:
        raise ValueError("the text is not what the response ids decode to: decode both the same way")
    if not 0 <= offset < len(text):
        raise ValueError(f"offset {offset} lies outside of a text of {len(text)} characters")
    above, step = len(whole), _FIRST_STEP
    while True:
        below, length = _clean(whole, max(above - step, 0), text, decode)
        if length <= offset:
            break
        above, step = below, 2 * step
    rest, left = whole[below:], text[length:]
    if below and decode(rest) == left:  # as it is with most decoders: then short pieces tell as much
        return below + _bisect(rest, 0, above - below, offset - length, left, decode)
    return _bisect(whole, below, above, offset, text, decode)


_FIRST_STEP = 32


def _bisect(ids: list[int], below: int, above: int, offset: int, text: str, decode: Decode) -> int:
    """Largest count of tokens in [below, above) that decode to at most `offset` characters."""
    while above - below > 1:
        middle = (below + above) // 2
        count, length = _clean(ids, middle, text, decode)
        if count <= below:  # nothing to trust up to the middle: look behind it
            lengths = ((k, _length(ids, k, text, decode)) for k in range(middle + 1, above))
            count, length = next(((k, n) for k, n in lengths if n is not None), (above, None))
            if length is None:
                break
        if length > offset:
            above = count
        else:
            below = count
    # What is left are tokens that share a character, or several.
    return max((k for k in range(below + 1, above) if len(decode(ids[:k])) <= offset), default=below)


def _clean(ids: list[int], count: int, text: str, decode: Decode) -> tuple[int, int]:
    """The largest number of tokens, `count` or fewer, that decode to a beginning of the text; its length."""
    while (length := _length(ids, count, text, decode)) is None:
        count -= 1
    return count, length


def _length(ids: list[int], count: int, text: str, decode: Decode) -> int | None:
    """Characters of the first `count` tokens; None where these are no beginning of the text."""
    if count == 0:
        return 0
    found = decode(ids[:count])
    return len(found) if text.startswith(found) else None
