r"""Which token of a response begins its answer, and which position predicts it.

Works from the real response ids and a function that decodes ids; knows no tokenizer. Nothing is
tokenised again, so that a token may hold any part of `\boxed{42}`, or several, or a part of a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_meds.boxes import NoBox, find_last_box
from megatron_meds.tokens import Decode, token_at

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
