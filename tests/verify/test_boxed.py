r"""Where the answer stands: the last `\boxed{}` only, whatever its form, whatever stood before."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_meds.verify import last_boxed, last_boxed_span

ANSWERS = {
    r"so \boxed{42}.": "42",
    r"\boxed{1} and then \boxed{2}": "2",
    r"\boxed{\frac{1}{2}}": r"\frac{1}{2}",
    r"\boxed{\frac{\sqrt{2}}{2}} is it": r"\frac{\sqrt{2}}{2}",
    r"\boxed{\left\{1, 2\right\}}": r"\left\{1, 2\right\}",
    r"\boxed{a \} b}": r"a \} b",
    r"\boxed{x \\}": r"x \\",
    r"\fbox{7}": "7",
    r"\boxed{1} but \fbox{2}": "2",
    r"\boxed{ 42 }": "42",
    r"\boxed {42}": "42",
    r"$\boxed 42$": "42",
    r"\boxed 42": "42",
    r"\boxed 42. Done": "42",
    r"\(\boxed 1,000\)": "1,000",
    r"\boxed\frac{1}{2} = x": r"\frac{1}{2}",
    r"{\boxed 3}": "3",
    r"\boxed{x = \boxed{3}}": "3",
    "\\boxed{\n5\n}": "5",
    r"\boxed{½}": "½",
}
NO_ANSWERS = [
    "",
    "the answer is 42",
    r"\boxed{1} then \boxed{2",
    r"\boxed{\frac{1}{2}",
    r"\boxed{1} then \boxed{}",
    r"\boxed{  }",
    r"\boxed",
    r"\boxed{1} and \boxed{",
    r"\boxed $",
    r"\boxed \frac{1",
    r"\boxedtext{3}",
    r"boxed{3}",
    r"\boxed{1\}",
]


@pytest.mark.parametrize("text", ANSWERS)
def test_the_last_box_holds_the_answer(text):
    assert last_boxed(text) == ANSWERS[text]


@pytest.mark.parametrize("text", NO_ANSWERS)
def test_no_box_an_empty_or_an_unterminated_last_one_is_no_answer_whatever_came_before(text):
    assert last_boxed(text) is None
    assert last_boxed_span(text) is None


def test_the_span_starts_right_after_the_brace_and_ends_at_the_closing_one():
    text = r"so \boxed{ 42 } it is"
    start, end = last_boxed_span(text)
    assert text[start - 1] == "{"
    assert text[end] == "}"
    assert text[start:end] == " 42 "


@settings(deadline=None)
@given(st.text(alphabet="ab{}\\ $.", max_size=40), st.text(alphabet="xy1 $.", max_size=20))
def test_a_balanced_box_is_found_whatever_text_stands_around_it(before, after):
    assert last_boxed(f"{before} \\boxed{{\\frac{{1}}{{2}}}}{after}") == r"\frac{1}{2}"


@settings(deadline=None)
@given(st.text(alphabet="\\boxedf{}[]() 1$.", max_size=60))
def test_the_span_is_where_the_answer_stands_in_any_text(text):
    answer, span = last_boxed(text), last_boxed_span(text)
    assert (answer is None) == (span is None)
    if span is not None:
        assert text[span[0] : span[1]].strip() == answer != ""


@pytest.mark.parametrize("text", [r"\boxed{" * 50_000, r"\boxed " * 50_000, r"\boxed{" + "{" * 300_000])
def test_hostile_texts_take_no_time(text):
    begin = time.perf_counter()
    assert last_boxed(text) is None
    assert time.perf_counter() - begin < 5.0
