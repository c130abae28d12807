"""Where steps begin: the released behaviour as recorded, the sound rules by their laws."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_meds.vsrm import StepRules, find_region, split_steps
from megatron_meds.vsrm.steps import MARKERS, RELEASED_MARKERS

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "gold_vsrm_splits.json").read_text())["cases"]
SHORT = StepRules(skip=5, gap=5)


def pieces(text: str, rules: StepRules = SHORT, **options) -> list[str]:
    """The steps as text, up to the end of the response."""
    splits = split_steps(text, rules, **options)
    return [text[a:b] for a, b in zip(splits, [*splits[1:], len(text)], strict=True)]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_released_preset_splits_where_the_released_code_does(number):
    case = CASES[number]
    assert split_steps(case["response"], StepRules.released()) == case["splits"]


def test_the_default_is_the_sound_preset():
    for case in CASES:
        assert split_steps(case["response"]) == split_steps(case["response"], StepRules.sound())
    assert {"Therefore", "Thus", "Hence"} == {*MARKERS} - {*RELEASED_MARKERS}


def test_a_marker_moves_the_split_to_the_start_of_its_sentence():
    text = "<think>2+3 is five. I see, but wait! Is it? However so\nHmm, yes</think>"
    assert pieces(text) == [" I see, but wait! Is it?", " However so\n", "Hmm, yes</think>"]
    assert split_steps(text) == []


def test_a_decimal_point_ends_a_sentence_only_in_the_released_code():
    text = "<think>It is one. We take 3.14 here, but it is 2. Done"
    assert pieces(text) == [" We take 3.14 here, but it is 2. Done"]
    released = StepRules(skip=5, gap=5, decimal_ends=True)
    assert pieces(text, released) == ["14 here, but it is 2. Done"]
    assert pieces("<think>It is 2.\nBut no") == ["But no"]
    assert pieces("<think>is it 2? But no") == [" But no"]


def test_markers_are_whole_words_only_in_the_sound_rules():
    text = "<think>Here it is. Solving it. Somehow. We wait"
    assert pieces(text) == [" We wait"]
    anywhere = StepRules(skip=5, gap=5, match="substring")
    assert pieces(text, anywhere) == [" Solving it.", " Somehow.", " We wait"]


def test_markers_count_in_the_cases_listed():
    text = "<think>One two. WAIT now. hOWEVER not. therefore not. Therefore so. let me double-check"
    assert pieces(text) == [
        " WAIT now. hOWEVER not. therefore not.",
        " Therefore so.",
        " let me double-check",
    ]


def test_skip_and_gap_hold_for_the_split_in_the_sound_rules_and_for_the_marker_in_the_released():
    text = "<think>" + "a" * 4 + ". " + "b" * 20 + " but c"
    assert split_steps(text, StepRules(skip=10, gap=5)) == []
    assert split_steps(text, StepRules(skip=10, gap=5, measure="marker")) == [12]


def test_lengths_count_in_tokens_where_asked():
    text = "<think>one two three. But four five six. But seven"
    token_at = [text[: i + 1].count(" ") for i in range(len(text))].__getitem__  # a token begins with a space
    for skip, gap, expected in ((3, 4, 2), (4, 4, 1), (3, 5, 1), (8, 0, 0)):
        rules = StepRules(skip=skip, gap=gap, unit="tokens")
        assert len(split_steps(text, rules, token_at=token_at)) == expected, (skip, gap)
    with pytest.raises(ValueError, match="token_at"):
        split_steps(text, rules)


REGIONS = {
    "plain": ("<think>a b</think>c", False, ("a b", True)),
    "truncated": ("<think>a b", False, ("a b", False)),
    "opened by the prompt": ("a b</think>c", True, ("a b", True)),
    "opened by the prompt, truncated": ("a b", True, ("a b", False)),
    "opened by the prompt and again": ("\n<think>a</think>c", True, ("a", True)),
    "opened by the prompt, and once more within": ("a<think>b</think>c", True, ("a<think>b", True)),
    "closed but never opened": ("a b</think>c", False, ("a b", True)),
    "never opened": ("a b", False, None),
    "nested": ("<think>a<think>b</think>c</think>d", False, ("a<think>b", True)),
    "repeated": ("<think>a</think>b<think>c</think>", False, ("a", True)),
    "closed, then opened": ("a</think>b<think>c", False, ("a", True)),
    "empty": ("<think></think>c", False, ("", True)),
    "nothing": ("", True, ("", False)),
}


@pytest.mark.parametrize("name", REGIONS)
def test_the_reasoning_is_found(name):
    text, opened, expected = REGIONS[name]
    region = find_region(text, StepRules.sound(), opened)
    found = None if region is None else (text[region.start : region.end], region.closed)
    assert found == expected


@pytest.mark.parametrize(
    "text", ["", "But wait. But wait. But wait", "<think></think>But", "<think>One two three four</think>"]
)
def test_a_response_without_reasoning_or_markers_has_no_steps(text):
    assert split_steps(text, SHORT) == []


def test_markers_outside_of_the_reasoning_do_not_count():
    assert pieces("But no.<think>One two. So it is.</think> However, But wait") == [
        " So it is.</think> However, But wait"
    ]


@pytest.mark.parametrize(
    "wrong", [{"skip": -1}, {"gap": -1}, {"markers": ()}, {"markers": ("",)}, {"open_tag": ""}]
)
def test_rules_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError):
        StepRules(**wrong)


WORDS = st.sampled_from(
    [
        "Wait,",
        "but",
        "So",
        "Solving",
        "x=3.14",
        "However",
        "hmm.",
        "one",
        "two",
        ".",
        "!",
        "?",
        "\n",
        "</think>",
    ]
)


@given(st.lists(WORDS, max_size=60).map(" ".join), st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_sound_splits_keep_skip_and_gap_and_begin_a_sentence(body, skip, gap, opened):
    text = body if opened else "<think>" + body
    rules = StepRules(skip=skip, gap=gap)
    region, splits = find_region(text, rules, opened), split_steps(text, rules, opened=opened)
    assert region is not None
    assert all(region.start <= s < region.end for s in splits)
    assert all(s - region.start >= skip for s in splits)
    assert all(b - a >= max(gap, 1) for a, b in itertools.pairwise(splits))
    assert all(s == region.start or text[s - 1] in ".!?\n" for s in splits)
