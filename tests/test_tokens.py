"""The token of a character, looked up one by one and many at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_meds.tokens import TokenMap, token_at


def decode(ids: list[int]) -> str:
    """UTF-8 of bytes: a token may be a part of a character; 256 and above are special and left out."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def dropping_space(ids: list[int]) -> str:
    """As some decoders do: the beginning loses its space."""
    return decode(ids).removeprefix(" ")


@given(
    st.text(max_size=200),
    st.lists(st.integers(0, 200), max_size=3),
    st.sampled_from([decode, dropping_space]),
)
def test_a_map_tells_the_token_that_token_at_tells(text, specials, how):
    ids = list(text.encode(errors="replace"))
    for place in specials:
        ids.insert(min(place, len(ids)), 300)
    whole = how(ids)
    tokens = TokenMap(ids, whole, how)
    assert [tokens.at(i) for i in range(len(whole))] == [
        token_at(ids, i, whole, how) for i in range(len(whole))
    ]


def test_a_map_refuses_another_text_and_places_outside_of_it():
    with pytest.raises(ValueError, match="decode"):
        TokenMap([65], "B", decode)
    with pytest.raises(ValueError, match="outside"):
        TokenMap([65], "A", decode).at(1)
