"""Answers graded per second, what processes that can be killed cost, and what hostile answers cost.

    python tools/benchmarks/verify.py [--responses FILE.jsonl ...]

grades responses (rows `response`, `gold`; generated ones where no file is given) one after the other by
math-verify in this process, then by the grader with 1 and 2 workers, then with hostile answers mixed in.
Prints Markdown tables; compare rows of one run.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from megatron_meds.verify import Grader, last_boxed

Pair = tuple[str, str]

HOSTILE: dict[str, Callable[[int], str]] = {
    "endless power": lambda n: f"9^{{9^{{9^{{{n + 9}}}}}}}",
    "huge factorial": lambda n: f"({10**7 + n})!",
    "memory": lambda n: f"\\sum_{{k=1}}^{{10^{{{9 + n % 3}}}}} k^{{k}}",
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


def graded(pairs: list[Pair], workers: int, timeout: float) -> tuple[float, Counter[str], list[float]]:
    """Seconds for all, verdicts by reason, and seconds of three further calls with one pair each."""
    with Grader(workers=workers, timeout=timeout) as grader:
        start = time.perf_counter()
        verdicts = grader.grade(pairs)
        seconds = time.perf_counter() - start
        single = []
        for response, gold in generated(3, seed=99):
            start = time.perf_counter()
            grader.grade([(response, gold)])
            single.append(time.perf_counter() - start)
    return seconds, Counter(v.reason for v in verdicts), single


def print_honest(pairs: list[Pair], timeout: float) -> dict[int, float]:
    """The table without hostile answers; seconds by number of workers."""
    base = serially(pairs)
    print("| graded by | seconds | answers/s | of serial | one answer alone |")
    print("|---|---|---|---|---|")
    print(f"| math-verify, serially in process | {base:.2f} | {len(pairs) / base:,.0f} | 1.00 | |")
    found = {}
    for workers in (1, 2):
        seconds, _, single = graded(pairs, workers, timeout)
        found[workers] = seconds
        print(
            f"| grader, {workers} worker{'s' * (workers > 1)} | {seconds:.2f} | {len(pairs) / seconds:,.0f} "
            f"| {base / seconds:.2f} | {sorted(single)[1] * 1000:.1f} ms |"
        )
    return found


def print_hostile(pairs: list[Pair], honest: dict[int, float], each: int, timeout: float, seed: int) -> None:
    """What each kind of hostile answer costs, alone and all mixed among the honest ones."""
    print(f"\n| {each} hostile answers among {len(pairs)} | more seconds, each | verdicts of the hostile |")
    print("|---|---|---|")
    every: list[Pair] = []
    for kind, make in HOSTILE.items():
        bad = [(f"\\boxed{{{make(n)}}}", "1") for n in range(each)]
        every += bad
        seconds, reasons, _ = graded(bad, 1, timeout)
        verdicts = ", ".join(f"{n} {reason}" for reason, n in reasons.most_common())
        print(f"| {kind} | {seconds / each:.2f} | {verdicts} |")
    for workers, alone in honest.items():
        mixed = [*pairs, *every]
        random.Random(seed).shuffle(mixed)
        seconds, reasons, _ = graded(mixed, workers, timeout)
        killed = reasons["timeout"] + reasons["crash"]
        more = (seconds - alone) / len(every)
        print(
            f"| all {len(every)}, {workers} worker{'s' * (workers > 1)} | {more:.2f} "
            f"| {killed} killed; {len(mixed) / seconds:,.0f} answers/s in all |"
        )


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
    honest = print_honest(pairs, arguments.timeout)
    print_hostile(pairs, honest, arguments.hostile, arguments.timeout, arguments.seed)


if __name__ == "__main__":
    main()
