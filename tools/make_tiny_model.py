"""Make the tiny reasoner: its problems, its tokenizer, and its weights, by our own trainer.

    python tools/make_tiny_model.py --out examples/tiny_reasoner

writes `train.jsonl` and `heldout.jsonl`, traces with planted mistakes into a build folder, trains a
random Qwen3 on them with `megatron-meds train tools/tiny_reasoner/sft.yaml`, exports it in bf16 to
`OUT/model`, and measures through vLLM how often each kind of answer is given.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

from tiny_reasoner import problems
from tiny_reasoner.tokenizer import write_model_folder

TRAIN_PROBLEMS = 4096
HELD_OUT_PROBLEMS = 512
STEPS = 800
TRACES_PER_STEP = 64


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Write JSON lines; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_problems(out: Path, seed: int) -> set[str]:
    """Write the two problem sets, which share no question; returns the held-out questions."""
    drawn = problems.draw_problems(random.Random(seed), TRAIN_PROBLEMS + HELD_OUT_PROBLEMS)
    held_out = drawn[:HELD_OUT_PROBLEMS]
    write_rows(out / "heldout.jsonl", map(problems.problem_row, held_out))
    write_rows(out / "train.jsonl", map(problems.problem_row, drawn[HELD_OUT_PROBLEMS:]))
    return {problem.question for problem in held_out}


def write_traces(path: Path, seed: int, held_out: set[str]) -> None:
    """Write the traces of the whole training, none about a held-out problem."""
    rng = random.Random(seed + 1)
    write_rows(path, problems.draw_traces(rng, STEPS * TRACES_PER_STEP, held_out))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("examples/tiny_reasoner"))
    parser.add_argument("--build", type=Path, default=Path("build/tiny_reasoner"), help="traces and run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems-only", action="store_true", help="stop before the training")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    held_out = write_problems(arguments.out, arguments.seed)
    write_traces(arguments.build / "traces.jsonl", arguments.seed, held_out)
    write_model_folder(arguments.build / "model")
    if arguments.problems_only:
        return


if __name__ == "__main__":
    main()
