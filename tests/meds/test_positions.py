r"""The token that begins the answer, however a tokenizer splits `\boxed{42}`."""

import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer

from megatron_meds.meds import AnswerToken, find_answer_token
from megatron_meds.tokens import token_at

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "characters": ROOT / "examples" / "tiny_reasoner" / "model",
    "qwen3": ROOT.parent / "shared" / "data" / "tokenizer" / "qwen3",
    "smollm2": ROOT / "build" / "smollm2",
}
TEXTS = {
    r"so \boxed{42}.": "4",
    r"\boxed{1}, no: \boxed{-17} it is": "-",
    r"\boxed{\frac{1}{2}}": "\\",
    r"first \boxed{x = \boxed{3}}": "3",
    r"\boxed{ 42}": " ",
    r"in a \fbox{9}": "9",
    r"$\boxed 42$": "4",
    "over lines \\boxed{\n5}": "\n",
    r"\boxed{42} and much more text behind it, enough for several steps backwards " + "x y " * 60: "4",
}
BEYOND_ASCII = {
    r"π is \boxed{π/2} 🙂": "π",
    r"🙂🙂 \boxed{½}": "½",
    r"说 \boxed{三} 🙂": "三",
    r"🙂\boxed{🙂}": "🙂",
}


def bpe(vocabulary: list[str], merges: list[tuple[str, str]], decoder: object) -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=merges))
    tokenizer.decoder = decoder
    return tokenizer


@cache
def loaded(kind: str):
    if not (FOLDERS[kind] / "tokenizer.json").is_file():
        pytest.skip(f"{FOLDERS[kind]} is not here")
    return AutoTokenizer.from_pretrained(FOLDERS[kind])


@pytest.fixture(params=[*FOLDERS, "merged brace"])
def coder(request):
    """(encode, decode) of one kind of tokenizer."""
    if request.param == "merged brace":
        characters = sorted(set("".join(TEXTS)))
        merges = [("{", "4"), ("d", "{4"), ("{", "-"), ("{", "\\"), ("{", " "), ("{", "3"), ("{", "9")]
        tokenizer = bpe([*characters, *(a + b for a, b in merges)], merges, decoders.Fuse())
        return lambda text: tokenizer.encode(text).ids, tokenizer.decode
    tokenizer = loaded(request.param)
    return (
        lambda text: tokenizer(text, add_special_tokens=False).input_ids,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
    )


@pytest.mark.parametrize("text", TEXTS)
def test_the_token_holds_the_first_character_of_the_answer(coder, text):
    encode, decode = coder
    ids = encode(text)
    answer = find_answer_token(ids, text, decode)
    before, through = decode(ids[: answer.index]), decode(ids[: answer.index + 1])
    begin = re.compile(r".*\\(?:boxed|fbox)(?:\{| )", re.DOTALL).match(text)
    offset = begin.end()
    assert text[offset] == TEXTS[text]
    assert len(before) <= offset < len(through)
    assert text.startswith(before) and through[offset] == TEXTS[text]
    assert answer.token_id == ids[answer.index]
    assert answer.position == answer.index - 1


def test_with_qwen_the_brace_predicts_the_answer_and_with_a_merged_brace_what_stands_before():
    def predicting(kind: str, text: str) -> str:
        if kind == "merged":
            tokenizer = bpe([*sorted(set(text)), "{4"], [("{", "4")], decoders.Fuse())
            ids, decode = tokenizer.encode(text).ids, tokenizer.decode
        else:
            tokenizer = loaded(kind)
            ids, decode = tokenizer(text).input_ids, tokenizer.decode
        return decode([ids[find_answer_token(ids, text, decode).position]])

    assert predicting("merged", r"so \boxed{42}") == "d"
    assert predicting("characters", r"so \boxed{42}") == "{"
    assert predicting("qwen3", r"so \boxed{42}") == "{"


@pytest.mark.parametrize("text", BEYOND_ASCII)
@pytest.mark.parametrize("kind", ["qwen3", "smollm2", "bytes one by one"])
def test_an_answer_of_several_tokens_per_character_begins_with_the_first_of_them(kind, text):
    if kind == "bytes one by one":
        # As Llama's tokenizer falls back: an unfinished character shows one mark per byte.
        tokenizer = bpe(
            [f"<0x{i:02X}>" for i in range(256)],
            [],
            decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
        )
        ids, decode = list(text.encode()), tokenizer.decode
        assert len(decode(ids[: ids.index(0xF0) + 3])) > len(decode(ids[: ids.index(0xF0) + 4]))
    else:
        tokenizer = loaded(kind)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        decode = tokenizer.decode
    answer = find_answer_token(ids, text, decode)
    head = text[: text.index("{") + 1]
    assert decode(ids[: answer.index]) == head
    assert len(decode(ids[: answer.index + 1])) > len(head)
    # The very next token on whose end the text is whole again holds the rest of that character.
    whole = next(k for k in range(answer.index + 1, len(ids) + 1) if text.startswith(decode(ids[:k])))
    assert decode(ids[:whole]).startswith(head + BEYOND_ASCII[text])


@settings(deadline=None, max_examples=40)
@given(st.text(alphabet="ab4{}🙂é三", min_size=1, max_size=30), st.data())
def test_every_character_of_every_text_is_found_in_its_first_byte(text, data):
    ids = list(text.encode())
    tokenizer = bpe(
        [f"<0x{i:02X}>" for i in range(256)],
        [],
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
    )
    offset = data.draw(st.integers(0, len(text) - 1))
    assert token_at(ids, offset, text, tokenizer.decode) == len(text[:offset].encode())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("the answer is 42", "no box"),
        (r"\boxed{1} but \boxed{", "cut box"),
        (r"\boxed{1} but \boxed", "cut box"),
        (r"\boxed{1} but \boxed{2", "open box"),
        (r"\boxed{1} but \boxed{} it is", "empty box"),
        (r"\boxed{  }.", "empty box"),
    ],
)
def test_a_response_without_an_answer_says_why(text, reason):
    assert find_answer_token(list(map(ord, text)), text, lambda ids: "".join(map(chr, ids))) == reason


def test_an_answer_in_the_very_first_token_has_no_position_before_it():
    vocabulary = [r"\boxed{4", "2}", "so "]
    decode = lambda ids: "".join(vocabulary[i] for i in ids)  # noqa: E731
    assert find_answer_token([0, 1], r"\boxed{42}", decode) == "first token"
    assert find_answer_token([2, 0, 1], r"so \boxed{42}", decode) == AnswerToken(1, 0)


def test_tokens_that_leave_no_text_are_stepped_over():
    decode = lambda ids: "".join("" if i < 0 else chr(i) for i in ids)  # noqa: E731
    ids = [-1, *map(ord, r"\boxed{"), -1, -1, ord("4"), ord("}"), -1]
    assert find_answer_token(ids, r"\boxed{4}", decode) == AnswerToken(10, ord("4"))


def test_a_text_that_the_ids_do_not_decode_to_is_refused():
    with pytest.raises(ValueError, match="decode both the same way"):
        find_answer_token([65, 66], r"\boxed{4}", lambda ids: "".join(map(chr, ids)))
