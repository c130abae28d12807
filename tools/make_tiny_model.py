"""Make the tiny reasoner: its problems, its tokenizer, and its weights, by our own trainer.

    python tools/make_tiny_model.py --out examples/tiny_reasoner

writes `train.jsonl` and `heldout.jsonl`, traces with planted mistakes into a build folder, trains a
random Qwen3 on them with `megatron-meds train tools/tiny_reasoner/sft.yaml`, exports it in bf16 to
`OUT/model`, and measures through vLLM how often each kind of answer is given.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tiny_reasoner.problems import write_problems, write_traces
from tiny_reasoner.tokenizer import write_model_folder

STEPS = 800
TRACES_PER_STEP = 64


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
    write_traces(arguments.build / "traces.jsonl", STEPS * TRACES_PER_STEP, arguments.seed, held_out)
    write_model_folder(arguments.build / "model")
    if arguments.problems_only:
        return


if __name__ == "__main__":
    main()
