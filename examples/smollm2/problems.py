"""One-digit additions for SmolLM2: all hundred of them, dealt into training and held-out problems.

    python examples/smollm2/problems.py

writes train.jsonl and heldout.jsonl beside itself. A sum and its mirror image (3 + 5, 5 + 3) go to the
same side, so that no held-out sum was seen in training.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SEED = 1
HELD_OUT_PAIRS = 18
"""Of the 55 pairs of digits."""


def problems() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(training, held-out) rows, each `question` and `answer`."""
    pairs = [(a, b) for a in range(10) for b in range(a, 10)]
    random.Random(SEED).shuffle(pairs)
    return _rows(pairs[HELD_OUT_PAIRS:]), _rows(pairs[:HELD_OUT_PAIRS])


def _rows(pairs: list[tuple[int, int]]) -> list[dict[str, str]]:
    ordered = sorted({sum_ for a, b in pairs for sum_ in ((a, b), (b, a))})
    return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in ordered]


def main() -> None:
    folder = Path(__file__).parent
    for name, rows in zip(("train", "heldout"), problems(), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
