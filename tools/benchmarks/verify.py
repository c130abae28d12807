"""Answers graded per second, what processes that can be killed cost, and what hostile answers cost.

    python tools/benchmarks/verify.py [--responses FILE.jsonl ...]

grades responses (rows `response`, `gold`; generated ones where no file is given) one after the other by
math-verify in this process, then by the grader with 1 and 2 workers, then with hostile answers mixed in.
Prints Markdown tables; compare rows of one run.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from megatron_meds.verify import Grader, last_boxed

Pair = tuple[str, str]

HOSTILE: dict[str, Callable[[int], str]] = {
    "endless power": lambda n: f"9^{{9^{{9^{{{n + 9}}}}}}}",
    "huge factorial": lambda n: f"({10**7 + n})!",
    "huge sum": lambda n: f"\\sum_{{k=1}}^{{{10**9 + n}}} k^{{k}}",
    "memory": lambda n: f"2^{{{10**11 + n}}}",
    "deep nesting": lambda n: "\\frac{1}{" * (3000 + n) + "2" + "}" * (3000 + n),
    "very long": lambda n: "+".join(str(n + k) for k in range(20_000)),
    "unclosed": lambda n: "\\sqrt{" * (500 + n),
}
"""Answers that ask for ever more time, memory or stack; the number makes each one different."""


def generated(count: int, seed: int) -> list[Pair]:
    """Responses like those of a run: boxed fractions, roots and polynomials, half of them right."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 9)
        answer, gold = rng.choice(
            [
                (f"\\frac{{{a * c}}}{{{b * c}}}", f"\\frac{{{a}}}{{{b}}}"),
                (f"{c}\\sqrt{{{b}}}", f"\\sqrt{{{c * c * b}}}"),
                (f"(x+{a})^2", f"x^2+{2 * a}x+{a * a}"),
                (f"{a}.0", f"{a}"),
                (f"({b},{a})", f"({b}, {a})"),
            ]
        )
        if rng.random() < 0.5:
            gold = gold.replace(str(a), str(a + 1), 1)
        pairs.append((f"We find that the answer is \\boxed{{{answer}}}.", gold))
    return pairs


def read(files: list[Path]) -> list[Pair]:
    """(response, gold) of every row."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(_boxed(row["response"]), row["gold"]) for row in rows]


def _boxed(response: str) -> str:
    """A response without a box gets one around its final line, `A: ...` (as GSM8K's solutions have)."""
    if last_boxed(response) is not None:
        return response
    return f"{response}\n\\boxed{{{response.rpartition('A:')[2].strip()}}}"


def serially(pairs: list[Pair]) -> float:
    """Seconds that math-verify takes in this process, warm, on the same boxes; no clock over any."""
    from megatron_meds.verify import compare

    compare.warm_up()
    start = time.perf_counter()
    for response, gold in pairs:
        answer = last_boxed(response)
        if answer is not None:
            compare.equal(answer, gold)
    return time.perf_counter() - start


def grade(grader: Grader, pairs: list[Pair]) -> tuple[float, Counter[str]]:
    """Seconds for all, and verdicts by reason."""
    start = time.perf_counter()
    verdicts = grader.grade(pairs)
    return time.perf_counter() - start, Counter(v.reason for v in verdicts)


def print_tables(pairs: list[Pair], each: int, timeout: float, seed: int) -> None:
    """What the grader gives and costs on honest answers; then what hostile ones add."""
    hostile = {kind: [(f"\\boxed{{{make(n)}}}", "1") for n in range(each)] for kind, make in HOSTILE.items()}
    every = [pair for bad in hostile.values() for pair in bad]
    mixed = [*pairs, *every]
    random.Random(seed).shuffle(mixed)
    base = serially(pairs)
    print("| graded by | seconds | answers/s | of serial | one answer alone |")
    print("|---|---|---|---|---|")
    print(f"| math-verify, serially in process | {base:.2f} | {len(pairs) / base:,.0f} | 1.00 | |")
    rows = []
    for workers in (1, 2):
        name = f"{workers} worker{'s' * (workers > 1)}"
        with Grader(workers=workers, timeout=timeout) as grader:
            alone, _ = grade(grader, pairs)
            single = statistics.median(grade(grader, [pair])[0] for pair in generated(9, seed=99))
            print(
                f"| grader, {name} | {alone:.2f} | {len(pairs) / alone:,.0f} | {base / alone:.2f} "
                f"| {single * 1000:.1f} ms |"
            )
            for kind, bad in hostile.items() if workers == 1 else ():
                seconds, reasons = grade(grader, bad)
                verdicts = ", ".join(f"{n} {reason}" for reason, n in reasons.most_common())
                rows.append(f"| {kind}, {name} | {seconds / each:.2f} | {verdicts} |")
            again, _ = grade(grader, pairs)  # references are parsed by now, in the mix as well
            seconds, reasons = grade(grader, mixed)
            killed, rate = reasons["timeout"] + reasons["crash"], len(mixed) / seconds
            rows.append(
                f"| all {len(every)} among {len(pairs)}, {name} | {(seconds - again) / len(every):.2f} "
                f"| {killed} killed; {rate:,.0f} answers/s in all |"
            )
    print(f"\n| hostile answers, limit {timeout:g} s | more seconds, each | verdicts |")
    print("|---|---|---|")
    print("\n".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=Path, nargs="*", default=[], help="rows `response`, `gold`")
    parser.add_argument("--count", type=int, default=1000, help="generated responses")
    parser.add_argument("--hostile", type=int, default=3, help="hostile answers of each kind")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds an answer may take")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    pairs = read(arguments.responses) if arguments.responses else generated(arguments.count, arguments.seed)
    logging.getLogger("megatron_meds").setLevel(logging.ERROR)  # timeouts are what is measured
    print_tables(pairs, arguments.hostile, arguments.timeout, arguments.seed)


if __name__ == "__main__":
    main()
