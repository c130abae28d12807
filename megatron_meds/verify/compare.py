r"""Compares an answer with the reference by math-verify. Runs inside a grading process only.

Knows no clock: a comparison may take for ever, or ask for any amount of memory, and whoever runs the
process ends it. Both texts are wrapped as LaTeX, `\boxed{...}`, so that math-verify looks for nothing
and guesses nothing.
"""

from __future__ import annotations

import logging
import math
import re
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from megatron_meds.verify.boxed import last_boxed

_LATEX = [LatexExtractionConfig(boxed_match_priority=0)]
_DECIMALS = 6
_DIGITS = 15

_WARM_UP = (
    ("\\frac{1}{2}", "0.5"),
    ("x^2+2x+1", "(x+1)^2"),
    ("(1,2]", "1 < x \\le 2"),
    ("\\{1,\\sqrt{2}\\}", "\\sqrt{2},1"),
    ("x=5", "y=5"),
    ("\\text{Monday}", "Tuesday"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\3\\end{pmatrix}"),
    ("\\sum_{n=1}^{10} n", "54"),
)


_FUNCTIONS = "sin|cos|tan|cot|sec|csc|ln|log"
_SPELLINGS = (
    (re.compile(r"^\\approx(?![A-Za-z])\s*"), ""),
    (re.compile(r"(?<=\d)(?:,\\!|\{,\}(?:\\!)?)(?=\d{3})"), ""),  # 29,\!322: thousands, not a list
    (re.compile(r"\\phantom\s*(?:-|\{[^{}]*\})"), ""),
    (re.compile(r"(\\[dt]?frac)\s*(\\(?:pi|theta|alpha|beta))(?![A-Za-z])"), r"\1{\2}"),
    # a + b + c, \sin^2 t: the last letter is no unit
    (re.compile(rf"([+\-*/=]\s*|\\(?:{_FUNCTIONS})(?:\^\{{?\d+\}}?)?\s+)([a-z])$"), r"\1{\2}"),
    (re.compile(r"(?<=\d)\.(?=\s*[/*+\-])"), ""),  # 1./3
    (re.compile(r"\b(?:np|numpy|math)\.(?=[a-z])"), r"\\"),  # np.arcsin(x)
    (re.compile(r"_\s*(?:\{\s*\\(max|min|odot)\s*\}|\\(max|min|odot)(?![A-Za-z]))"), r"_{\1\2}"),
    (re.compile(r"(?<![A-Za-z\\])E_(?:\{(\w+)\}|(\w))"), r"X_{E\1\2}"),  # a lone E is Euler's number
)
"""Spellings that math-verify's parser does not take, and ones of the same meaning that it does. They hold
for answer and reference alike."""


def equal(answer: str, gold: str) -> bool:
    """Whether math-verify finds the answer equal to the reference."""
    reference, decimals, digits = _reference(gold)
    return verify(
        reference,
        _parse(clean(answer)),
        float_rounding=decimals,
        numeric_precision=digits,
        timeout_seconds=None,
    )


def parses(gold: str) -> bool:
    """Whether a reference can be compared as mathematics, not as text only."""
    return any(not isinstance(found, str) for found in _reference(gold)[0])


def clean(text: str) -> str:
    """An answer without what stands around it (its box, `$`, closing full stops and commas, white space),
    and with what the parser stumbles over written as it takes it (`_SPELLINGS`)."""
    inner = last_boxed(text)
    text = text if inner is None else inner
    before = None
    while text != before:
        before = text
        text = text.strip().rstrip(".,").lstrip("$")
        if text.endswith("$") and not text.endswith("\\$"):
            text = text[:-1]
    for written, wanted in _SPELLINGS:
        text = written.sub(wanted, text)
    return text


def warm_up() -> None:
    """Import and fill all that a first comparison would pay for; silence the two warnings that
    math-verify's own clock is off, which is meant: a signal would fire in this process's main
    thread, and not at all inside one long multiplication."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(_not_about_timeouts)
    for answer, gold in _WARM_UP:
        equal(answer, gold)


def _parse(text: str) -> list[Any]:
    # 0 and None both mean no clock of math-verify's own; its annotation knows only the first.
    return parse(f"\\boxed{{{text}}}", extraction_config=_LATEX, parsing_timeout=0)


@lru_cache(maxsize=4096)
def _reference(gold: str) -> tuple[list[Any], int, int]:
    """The parsed reference, and the decimals and digits to compare with.

    math-verify compares numbers to six decimals, so that any two below 1e-7 would be equal: for a small
    reference the leading zeros come on top.
    """
    text = clean(gold)
    found = _parse(text) if _balanced(text) else []
    zeros = max((_leading_zeros(f) for f in found if not isinstance(f, str)), default=0)
    return found, _DECIMALS + zeros, _DIGITS + zeros


def _leading_zeros(expression: Any) -> int:
    """Zeros between the point and the first digit of a number; 0 for whatever is not a number."""
    if not getattr(expression, "is_number", False):  # matrices, sets and relations have none
        return 0
    parts = expression.doit().evalf(5).as_real_imag()  # doit: a percentage is an unevaluated product
    if not all(part.is_Float or part.is_Integer for part in parts):
        return 0
    size = math.hypot(*map(float, parts))
    return max(0, -math.floor(math.log10(size)) - 1) if 0.0 < size < 1.0 else 0


def _balanced(text: str) -> bool:
    """Whether the braces close what they open: wrapped in a box, a stray one would cut the text."""
    return last_boxed(f"\\boxed{{{text}}}") == text.strip() and bool(text.strip())


def _not_about_timeouts(record: logging.LogRecord) -> bool:
    return "Timeout is disabled" not in record.getMessage()
