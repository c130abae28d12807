"""The tiny reasoner through TRL's GRPOTrainer and through `megatron-meds train`, in one run.

    python tools/benchmarks/against_trl.py --write docs/benchmarks.md

Same model, prompts, samples a step, updates a step, fp32, cores. TRL and accelerate are installed into
build/against_trl and run on the torch and transformers of the present environment, which stays as it
is. Start-up and the first step of each are left out. Some 5 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tiny_reasoner"
PACKAGES = ("trl==1.16.0", "accelerate==1.15.0")
HEADING = "## Against TRL"
PROMPTS, SAMPLES, UPDATES, MAX_TOKENS = 64, 8, 2, 256
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Side:
    """One trainer's steps after the first."""

    name: str
    version: str
    seconds: list[float]
    tokens: list[float]
    """Of prompts and responses, each step."""
    how: str

    @property
    def rate(self) -> float:
        """Tokens a second, over all of these steps."""
        return sum(self.tokens) / sum(self.seconds)


def run_trl(build: Path, steps: int, micro_batch: int, seed: int) -> Side:
    """Time TRL, installed beside the present environment if it is not there yet."""
    packages = build / "packages"
    if not (packages / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*command, *PACKAGES], check=True)
    task = {
        "model": str(EXAMPLE / "model"),
        "train": str(EXAMPLE / "train.jsonl"),
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "updates": UPDATES,
        "max_tokens": MAX_TOKENS,
        "lr": LEARNING_RATE,
        "steps": steps,
        "micro_batch": micro_batch,
        "threads": len(os.sched_getaffinity(0)),
        "seed": seed,
    }
    out = build / "trl.json"
    out.unlink(missing_ok=True)
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("trl_side.py")), json.dumps(task), str(out)],
        env=os.environ | {"PYTHONPATH": f"{packages}:{ROOT}"},
        check=True,
    )
    found = json.loads(out.read_text())
    return Side(
        "TRL GRPOTrainer",
        found["version"],
        found["seconds"][1:],
        found["tokens"][1:],
        f"transformers' generate, micro-batches of {micro_batch}",
    )


def run_ours(build: Path, steps: int, seed: int) -> Side:
    """Time `megatron-meds train` on the example's layout. Its last step, which saves, is left out too."""
    folder = build / "run"
    shutil.rmtree(folder, ignore_errors=True)
    overrides = {
        "run.folder": folder,
        "run.steps": steps + 1,
        "run.seed": seed,
        "run.evaluate_at_start": "false",
        "run.evaluate_at_end": "false",
        "run.export_at_end": "false",
        "actor.precision": "fp32",
        "optimizer.lr": LEARNING_RATE,
        "algorithm.mini_batch_prompts": PROMPTS // UPDATES,
        "rollout.samples_per_prompt": SAMPLES,
        "rollout.max_tokens": MAX_TOKENS,
        "rollout.dynamic_sampling.enabled": "false",
        "data.prompts_per_step": PROMPTS,
        "data.shuffle": "false",
    }
    command = [sys.executable, "-m", "megatron_meds.cli.main", "train", str(EXAMPLE / "dapo.yaml")]
    subprocess.run([*command, *(f"{key}={value}" for key, value in overrides.items())], check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steady = [line for line in lines if 1 < line["step"] <= steps]
    return Side(
        "megatron_meds",
        "2 pipeline stages beside a vLLM server",
        [line["seconds/step"] for line in steady],
        [line["prompt_tokens"] + line["response_tokens"] for line in steady],
        "vLLM, packed micro-batches of 2,048 tokens",
    )


def as_section(ours: Side, theirs: Side, cores: int) -> str:
    """The section of docs/benchmarks.md."""
    rows = [
        f"| {side.name} | {side.how} | {len(side.seconds)} | {statistics.mean(side.seconds):.1f} "
        f"| {side.rate:,.0f} | {side.rate / theirs.rate:.1f} |"
        for side in (theirs, ours)
    ]
    return "\n".join(
        [
            HEADING,
            "",
            "    python tools/benchmarks/against_trl.py --write docs/benchmarks.md",
            "",
            f"{theirs.version}, on {cores} CPU cores, both in one run. The tiny reasoner in fp32; a step is "
            f"{PROMPTS} prompts x {SAMPLES} samples of at most {MAX_TOKENS} tokens and {UPDATES} updates of "
            "the clipped policy loss without a reference model. Tokens are those of prompts and responses; "
            "a step's seconds hold sampling, rewards, the pass for old log-probabilities, updates and, for "
            "megatron_meds, the sync of weights to the server. Start-up and the first step of each are left "
            "out. TRL samples with transformers: its vLLM modes need CUDA.",
            "",
            "| trainer | samples and learns by | steps | s a step | tokens/s | ratio |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def replace_section(text: str, section: str) -> str:
    """The document with its section of that heading replaced, or the section added at the end."""
    lines, new = text.splitlines(), section.splitlines()
    start = lines.index(new[0]) if new[0] in lines else len(lines)
    later = (place for place in range(start + 1, len(lines)) if lines[place].startswith("## "))
    end = next(later, len(lines))
    parts = [lines[:start], new, lines[end:]]
    return "\n\n".join("\n".join(part).strip("\n") for part in parts if part) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "against_trl")
    parser.add_argument("--trl-steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--our-steps", type=int, default=5, help="the first is not counted")
    parser.add_argument("--trl-micro-batch", type=int, default=128, help="samples of a micro-batch of TRL")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, help="put the table into this Markdown file")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    build = arguments.build.absolute()
    build.mkdir(parents=True, exist_ok=True)
    theirs = run_trl(build, arguments.trl_steps, arguments.trl_micro_batch, arguments.seed)
    ours = run_ours(build, arguments.our_steps, arguments.seed)
    section = as_section(ours, theirs, len(os.sched_getaffinity(0)))
    print(section)
    if arguments.write is not None:
        text = arguments.write.read_text() if arguments.write.exists() else "# Benchmarks\n"
        arguments.write.write_text(replace_section(text, section))


if __name__ == "__main__":
    main()
