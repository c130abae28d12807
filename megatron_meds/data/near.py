"""Problems of two sets that read nearly alike: cosine of tf-idf weighted character 5-grams.

For what `overlap` cannot see: words changed, a sentence added. Knows texts only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from sklearn.feature_extraction.text import TfidfVectorizer

from megatron_meds.data.datasets import Row
from megatron_meds.data.overlap import core

_ROWS = 256
"""Evaluation problems compared at a time."""


@dataclass(frozen=True)
class Pair:
    """A training problem and an evaluation problem, by their places, that read alike."""

    training: int
    evaluation: int
    similarity: float
    """0 to 1."""
    identical: bool
    """The same letters, digits and signs of arithmetic."""


def find_near(training: Sequence[str], evaluation: Sequence[str], threshold: float = 0.9) -> list[Pair]:
    """Every pair of a similarity of at least `threshold`, and every identical one, by evaluation problem.

    Args:
        training, evaluation: questions.
        threshold: above 0, at most 1.
    """
    if not training or not evaluation:
        return []
    cores = [core(text) for text in training], [core(text) for text in evaluation]
    vectorizer = TfidfVectorizer(analyzer="char", ngram_range=(5, 5), sublinear_tf=True)
    padded = [[f"    {text}    " for text in part] for part in cores]  # short problems have 5-grams too
    left = vectorizer.fit_transform(padded[0]).T.tocsc()
    right = vectorizer.transform(padded[1])
    places: dict[str, list[int]] = {}
    for index, text in enumerate(cores[0]):
        places.setdefault(text, []).append(index)
    found = []
    for start in range(0, len(evaluation), _ROWS):
        table = (right[start : start + _ROWS] @ left).tocsr()
        for row in range(table.shape[0]):
            part = table[row]
            near = dict(zip(part.indices.tolist(), part.data.tolist(), strict=True))
            same = places.get(cores[1][start + row], [])
            chosen = {i for i, value in near.items() if value >= threshold} | set(same)
            found += [
                Pair(i, start + row, 1.0 if i in same else min(1.0, near[i]), i in same)
                for i in sorted(chosen)
            ]
    return found


def kept_rows(rows: Sequence[Row], gone: Set[int], target: Path) -> int:
    """Write the rows but those at places in `gone` as JSON lines, `question` and `answer` and what else
    they hold; returns how many."""
    kept = [row for index, row in enumerate(rows) if index not in gone]
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", encoding="utf-8") as file:
        for row in kept:
            line = {**row.extra, "question": row.question, "answer": row.answer}
            if row.system is not None:
                line["system"] = row.system
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
    return len(kept)
