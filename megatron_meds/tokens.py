"""Which token of a text holds a character, from the text's own ids and a function that decodes ids.

Knows no tokenizer: nothing is tokenised again, so that a token may hold several words, or a part of a
character.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
"""Ids to text, special tokens left out or not: the way the ids' own text was made."""
_PIECE = 64
_LONGEST_CHARACTER = 8


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


class TokenMap:
    """For many look-ups in one text: `at(offset)` is `token_at` of it.

    The ids are decoded once, in pieces of some 64 tokens; a look-up then decodes within its piece. With
    a decoder whose pieces do not add up to the text (one that drops a leading space), each look-up is
    `token_at` of the whole.
    """

    def __init__(self, ids: Sequence[int], text: str, decode: Decode) -> None:
        """
        Raises:
            ValueError: `text` is not what the ids decode to.
        """
        self._ids, self._text, self._decode = list(ids), text, decode
        if decode(self._ids) != text:
            raise ValueError("the text is not what the response ids decode to: decode both the same way")
        self._tokens, self._characters = self._cut()

    def at(self, offset: int) -> int:
        """Index of the token that holds the character at `offset`, its first one if it has several.

        Raises:
            ValueError: `offset` lies outside of the text.
        """
        if not 0 <= offset < len(self._text):
            raise ValueError(f"offset {offset} lies outside of a text of {len(self._text)} characters")
        piece = bisect_right(self._characters, offset) - 1
        first, last = self._tokens[piece], self._tokens[piece + 1]
        start, end = self._characters[piece], self._characters[piece + 1]
        return first + token_at(self._ids[first:last], offset - start, self._text[start:end], self._decode)

    def _cut(self) -> tuple[list[int], list[int]]:
        """Where pieces that decode on their own begin: tokens and characters, the ends included."""
        tokens, characters = [0], [0]
        while tokens[-1] < len(self._ids):
            first, start = tokens[-1], characters[-1]
            for end in range(first + _PIECE, first + _PIECE + _LONGEST_CHARACTER):
                found = self._decode(self._ids[first:end])
                if self._text.startswith(found, start):
                    break
            else:
                return [0, len(self._ids)], [0, len(self._text)]
            tokens.append(min(end, len(self._ids)))
            characters.append(start + len(found))
        if characters[-1] != len(self._text):
            return [0, len(self._ids)], [0, len(self._text)]
        return tokens, characters
