"""Make the tiny reasoner: its problems, its tokenizer, and its weights, by our own trainer.

    python tools/make_tiny_model.py --out examples/tiny_reasoner

writes `train.jsonl` and `heldout.jsonl`, traces with planted mistakes into a build folder, trains a
random Qwen3 on them with `megatron-meds train tools/tiny_reasoner/sft.yaml`, exports it in bf16 to
`OUT/model`, and measures through vLLM how often each kind of answer is given.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from tiny_reasoner.problems import HELD_OUT_PROBLEMS, write_problems, write_traces
from tiny_reasoner.tokenizer import write_model_folder

STEPS = 800
TRACES_PER_STEP = 64
SAMPLES = 8
HERE = Path(__file__).parent / "tiny_reasoner"
NAMES = {
    "right": "right",
    "left_to_right": "left to right",
    "minus_as_plus": "minus taken for plus",
    "slip": "one operation off by 1 or 10",
    "other": "any other",
}


def train(build: Path, seed: int) -> Path:
    """Train from random weights on the traces; returns the Hugging Face folder of the result."""
    run = (build / "run").absolute()
    if run.exists():
        shutil.rmtree(run)
    _command(
        "train",
        HERE / "sft.yaml",
        f"run.folder={run}",
        f"run.seed={seed}",
        f"run.steps={STEPS}",
        f"data.prompts_per_step={TRACES_PER_STEP}",
        f"data.train.0.path={(build / 'traces.jsonl').absolute()}",
        f"model.path={(build / 'model').absolute()}",
    )
    return run / "export"


def write_card(model: Path, out: Path, build: Path, seed: int) -> None:
    """Measure the model on the held-out problems and write its README.md."""
    from tiny_reasoner.measure import measure

    found = measure(model, out / "heldout.jsonl", SAMPLES, seed, build)
    text = (HERE / "card.md").read_text()
    card = text.format(
        seed=seed,
        steps=STEPS,
        traces=TRACES_PER_STEP,
        problems=HELD_OUT_PROBLEMS,
        samples=SAMPLES,
        table="\n".join(f"| {NAMES[kind]} | {share:.1%} |" for kind, share in found.kinds.items()),
        boxed=found.boxed,
        characters=found.characters,
    )
    (model / "README.md").write_text(card)
    print(card)


def _command(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "megatron_meds.cli.main", *map(str, arguments)], check=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("examples/tiny_reasoner"))
    parser.add_argument("--build", type=Path, default=Path("build/tiny_reasoner"), help="traces and run")
    parser.add_argument("--seed", type=int, default=0)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--problems-only", action="store_true", help="stop before the training")
    only.add_argument("--measure-only", action="store_true", help="measure OUT/model as it is")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    out, build, seed = arguments.out, arguments.build, arguments.seed
    model = out / "model"
    if not arguments.measure_only:
        held_out = write_problems(out, seed)
        write_traces(build / "traces.jsonl", STEPS * TRACES_PER_STEP, seed, held_out)
        write_model_folder(build / "model")
        if arguments.problems_only:
            return
        _command("convert", train(build, seed), model, "--dtype", "bf16", "--overwrite")
    write_card(model, out, build, seed)


if __name__ == "__main__":
    main()
