"""Prefixes are cut from the response's own ids, whatever the tokenizer makes of tags and sentences."""

import itertools
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megatron_meds.vsrm import StepRules, plan_prefixes, split_steps, thin_evenly

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "characters": ROOT / "examples" / "tiny_reasoner" / "model",
    "qwen3": ROOT.parent / "shared" / "data" / "tokenizer" / "qwen3",
}
RULES = StepRules(skip=5, gap=5)
PROMPT = [7, 8]


@cache
def tokenizer(name: str):
    if not FOLDERS[name].is_dir():
        pytest.skip(f"no tokenizer at {FOLDERS[name]}")
    return AutoTokenizer.from_pretrained(FOLDERS[name])


def ids_of(name: str, text: str) -> list[int]:
    return tokenizer(name)(text, add_special_tokens=False)["input_ids"]


def decode_by(name: str):
    return lambda ids: tokenizer(name).decode(ids, skip_special_tokens=True)


def plan(name: str, text: str, rules: StepRules = RULES, end: bool = True, **options):
    """The plan of a response that is `text` and the end-of-text token, and the prefixes' own text."""
    ids = ids_of(name, text) + ([tokenizer(name).eos_token_id] if end else [])
    found = plan_prefixes(PROMPT, ids, text, decode_by(name), ids_of(name, "</think>"), rules, **options)
    assert all(p[:2] == (7, 8) for p in found.prefixes)
    return ids, found, [decode_by(name)(list(p[2:])) for p in found.prefixes]


TEXT = "<think>\n3*4=12. Wait, let me check.\n3*4=12\nSo 12 it is.\n</think>\n\\boxed{12}"


@pytest.mark.parametrize("name", FOLDERS)
def test_prefixes_end_where_steps_begin_and_the_last_one_is_the_whole_reasoning(name):
    ids, found, texts = plan(name, TEXT)
    assert texts == [
        "<think>\n3*4=12.</think>",
        "<think>\n3*4=12. Wait, let me check.\n3*4=12\n</think>",
        TEXT[: TEXT.index("</think>") + 8],
    ]
    assert found.offsets == split_steps(TEXT, RULES)
    close = tuple(ids_of(name, "</think>"))
    for cut, prefix in zip(found.bounds, found.prefixes[:-1], strict=False):
        assert prefix == (*PROMPT, *ids[:cut], *close)
    assert found.prefixes[-1] == (*PROMPT, *ids[: found.bounds[-1]])


def test_a_closing_tag_may_be_several_ids():
    close = [ord(c) for c in "</think>"]

    def decode(ids: list[int]) -> str:
        return "".join(map(chr, ids))

    found = plan_prefixes(PROMPT, [ord(c) for c in TEXT], TEXT, decode, close, RULES)
    assert decode(list(found.prefixes[0][2:])) == "<think>\n3*4=12.</think>"
    assert decode(list(found.prefixes[-1][2:])) == TEXT[: TEXT.index("</think>") + 8]


@pytest.mark.parametrize("name", FOLDERS)
def test_truncated_reasoning_is_closed_by_force_or_as_released_by_its_opening_tag(name):
    text = TEXT[: TEXT.index(" it is")]
    for end in (True, False):  # ended by the model without a closing tag, or cut
        _, found, texts = plan(name, text, end=end)
        assert texts[-1] == text + "</think>"
        assert found.bounds[-1] == len(ids_of(name, text))
        _, released, texts = plan(name, text, end=end, truncated="opening")
        assert texts[-1] == "<think></think>"
        assert released.bounds == found.bounds and released.prefixes[:-1] == found.prefixes[:-1]


@pytest.mark.parametrize("name", FOLDERS)
def test_reasoning_that_the_prompt_opens(name):
    text = TEXT.removeprefix("<think>")
    _, found, texts = plan(name, text, opened=True)
    assert texts[0] == "\n3*4=12.</think>" and len(found) == 2
    truncated = text[: text.index("</think>")]
    assert plan(name, truncated, opened=True)[2][-1] == truncated + "</think>"
    assert len(plan(name, truncated)[1]) == 0
    assert plan(name, truncated, opened=True, truncated="opening")[2][-1] == "</think>"


@pytest.mark.parametrize(
    "text", ["", "But wait. But wait.", "<think></think>But", "<think>a b c d e f</think>"]
)
def test_a_response_without_steps_is_not_asked_about(text):
    _, found, texts = plan("characters", text)
    assert (found.offsets, found.bounds, texts) == ([], [], [])


def test_splits_within_one_token_are_one():
    pieces = ["<think>One two", ". But wait. But", " three.", "</think>"]

    def decode(ids: list[int]) -> str:
        return "".join(pieces[i] for i in ids)

    text = decode([0, 1, 2, 3])
    rules = StepRules(skip=1, gap=1)
    assert len(split_steps(text, rules)) == 2
    found = plan_prefixes([9], [0, 1, 2, 3], text, decode, [3], rules)
    assert found.prefixes == [(9, 0, 3), (9, 0, 1, 2, 3)] and found.bounds == [1, 4]


def test_a_cut_leaves_the_opening_tag_whole():
    pieces = ["<think>But", " no", "</think>"]

    def decode(ids: list[int]) -> str:
        return "".join(pieces[i] for i in ids)

    found = plan_prefixes([9], [0, 1, 2], decode([0, 1, 2]), decode, [2], StepRules(skip=0, gap=1))
    assert found.prefixes == [(9, 0, 2), (9, 0, 1, 2)]


def many(count: int) -> str:
    return "<think>First.\n" + "".join(f"But {i}.\n" for i in range(count)) + "</think>1"


def test_thinning_keeps_the_first_and_the_last_prefix_and_joins_the_steps_between():
    _ids, whole, _ = plan("characters", many(9), StepRules(skip=1, gap=1))
    _, thin, _ = plan("characters", many(9), StepRules(skip=1, gap=1), most=4)
    assert len(whole.prefixes) == 10 and whole.thinned == 0
    assert thin.prefixes == [whole.prefixes[j] for j in (0, 3, 6, 9)] and thin.thinned == 6
    assert thin.bounds == [whole.bounds[j] for j in (0, 3, 6, 9)]
    assert thin.offsets == [whole.offsets[j] for j in (0, 3, 6)]


def test_prefixes_without_room_behind_them_are_dropped_and_counted():
    _, whole, _ = plan("characters", many(9), StepRules(skip=1, gap=1))
    limit = len(whole.prefixes[4])
    _, short, _ = plan("characters", many(9), StepRules(skip=1, gap=1), longest=limit)
    assert short.prefixes == whole.prefixes[:5] and short.dropped == 5 and len(short) == 4
    _, none, _ = plan("characters", many(9), StepRules(skip=1, gap=1), longest=len(whole.prefixes[0]))
    assert len(none) == 0 and none.dropped == 9


@pytest.mark.parametrize(
    ("options", "message"), [({"most": 1}, "most"), ({"longest": 10, "most": 0}, "most"), ({}, "decode")]
)
def test_what_cannot_be_planned_is_refused(options, message):
    text = TEXT if options else TEXT + "x"
    with pytest.raises(ValueError, match=message):
        plan_prefixes(
            PROMPT, ids_of("characters", TEXT), text, decode_by("characters"), [5], RULES, **options
        )


@given(st.integers(2, 40), st.integers(2, 40))
def test_thinning_is_even(count, most):
    kept = thin_evenly(range(count), most)
    assert len(kept) == min(count, most) and kept[0] == 0 and kept[-1] == count - 1
    gaps = {b - a for a, b in itertools.pairwise(kept)}
    assert max(gaps) - min(gaps) <= 1


PARTS = st.sampled_from(
    [
        "Wait, let me check.\n",
        "But 🙂 is. ",
        "So π=3.14 ",
        "however",
        "说三。",
        "\n\n",
        " 12*3=36",
        "</think>",
        "?",
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PARTS, max_size=80).map("".join), st.booleans(), st.sampled_from(["characters", "tokens"]))
def test_cuts_are_token_boundaries_in_order_and_hold_the_text_before_the_step(body, opened, unit):
    text = body if opened else "<think>" + body
    rules = StepRules(skip=4, gap=3, unit=unit)
    ids, found, _ = plan("qwen3", text, rules, opened=opened)
    close = ids_of("qwen3", "</think>")[0]
    assert all(a < b for a, b in zip(found.bounds, found.bounds[1:], strict=False))
    for offset, cut, prefix in zip(found.offsets, found.bounds, found.prefixes, strict=False):
        assert prefix == (*PROMPT, *ids[:cut], close)
        before = decode_by("qwen3")(ids[:cut]).rstrip("�")
        after = decode_by("qwen3")(ids[: cut + 1])
        assert text.startswith(before) and len(before) <= offset < len(after)
