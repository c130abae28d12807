"""Where the time of a step goes, and how much of a micro-batch is padding.

    python tools/benchmarks/step.py --batches     # seconds: the batching alone, on drawn lengths
    python tools/benchmarks/step.py               # minutes: also the tiny reasoner's loop, both batchings

prints Markdown tables. The first counts tokens only, so it holds for any machine; the second is this
machine's, and compares columns of one run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from megatron_meds.actor.batches import make_micro_batches
from megatron_meds.trajectory import Prompt, Trajectory

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "tiny_reasoner" / "dapo.yaml"
PHASES = ("rollout", "score", "reward", "update", "sync")


def lengths_of(kind: str, count: int, random: np.random.Generator) -> np.ndarray:
    """Tokens of prompt and response, [count]."""
    if kind == "tiny reasoner":  # some 3 to 12 lines of work, and the box
        return np.clip(random.lognormal(np.log(75), 0.45, count), 20, 256).astype(int)
    if kind == "long tail":  # reasoning models: median 1,500 tokens, one in twelve cut at 7,168 + 1,024
        return np.clip(random.lognormal(np.log(1500), 1.0, count), 120, 8192).astype(int)
    return random.integers(512, 4096, count)  # "even"


def batching_rows(seed: int) -> list[tuple[str, int, int, str, str, int, float]]:
    """(lengths, sequences, budget, batching, shapes, micro-batches, share of real tokens) of each case."""
    found = []
    cases = [("tiny reasoner", 256, 2048), ("long tail", 256, 16384), ("even", 64, 16384)]
    for kind, count, budget in cases:
        lengths = lengths_of(kind, count, np.random.default_rng(seed))
        trajectories = [_trajectory(int(n)) for n in lengths]
        for batching, uniform in (("packed", False), ("packed", True), ("padded", False)):
            batches = make_micro_batches(trajectories, budget=budget, batching=batching, uniform=uniform)
            share = sum(b.real_tokens for b in batches) / sum(b.tokens_bs.numel() for b in batches)
            shapes = "one" if uniform else "their own"
            found.append((kind, count, budget, batching, shapes, len(batches), share))
    return found


def _trajectory(length: int) -> Trajectory:
    prompt = Prompt(id="p", question="", token_ids=(1,) * 16, answer="")
    response = max(1, length - 16)
    return Trajectory(prompt, 0, [1] * response, "", [0.0] * response, "stop", 0)


def run_loop(batching: str, steps: int, work: Path, overrides: list[str]) -> list[dict[str, float]]:
    """Metrics of each step of the real loop; the first step, which warms up, is left out."""
    folder = work / batching
    if folder.exists():
        shutil.rmtree(folder)
    command = [sys.executable, "-m", "megatron_meds.cli.main", "train", str(CONFIG)]
    settings = [
        f"run.folder={folder}",
        f"run.steps={steps + 1}",
        "run.export_at_end=false",
        "data.evaluation=[]",
        "rollout.dynamic_sampling.enabled=false",
        f"actor.batching={batching}",
    ]
    subprocess.run([*command, *settings, *overrides], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 1]


def print_batches(seed: int) -> None:
    print("| lengths | sequences | budget | batching | shapes | micro-batches | real tokens |")
    print("|---|---|---|---|---|---|---|")
    for kind, count, budget, batching, shapes, batches, share in batching_rows(seed):
        print(f"| {kind} | {count} | {budget:,} | {batching} | {shapes} | {batches} | {share:.1%} |")


def print_loop(found: dict[str, list[dict[str, float]]]) -> None:
    """A column for each batching: median seconds of a phase and its share, tokens, real tokens."""

    def middle(batching: str, key: str) -> float:
        return statistics.median(row.get(key, 0.0) for row in found[batching])

    print(f"\n| | {' | '.join(found)} |")
    print("|---|" + "---|" * len(found))
    for phase in PHASES:
        cells = [
            f"{middle(b, f'seconds/{phase}'):.2f} s "
            f"({middle(b, f'seconds/{phase}') / middle(b, 'seconds/step'):.0%})"
            for b in found
        ]
        print(f"| {phase} | {' | '.join(cells)} |")
    print(f"| step | {' | '.join(f'{middle(b, "seconds/step"):.2f} s' for b in found)} |")
    print(f"| tokens of a step | {' | '.join(f'{_tokens(found[b]):,.0f}' for b in found)} |")
    for name, phase in (("scored", "score"), ("trained", "update"), ("sampled", "rollout")):
        key = "response_tokens" if phase == "rollout" else None
        cells = []
        for b in found:
            tokens = middle(b, key) if key else _tokens(found[b])
            cells.append(f"{tokens / middle(b, f'seconds/{phase}'):,.0f} tokens/s")
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"| whole step | {' | '.join(f'{middle(b, "tokens_per_second"):,.0f} tokens/s' for b in found)} |")
    print(f"| real tokens | {' | '.join(f'{middle(b, "score/real_tokens"):.1%}' for b in found)} |")


def _tokens(rows: list[dict[str, float]]) -> float:
    return statistics.median(row["response_tokens"] + row["prompt_tokens"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", action="store_true", help="the batching alone")
    parser.add_argument("--steps", type=int, default=4, help="steps of the loop, after one that warms up")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks/step"), help="the runs' folders")
    parser.add_argument("overrides", nargs="*", help="settings of the loop, such as actor.layout.pipeline=1")
    arguments = parser.parse_args()
    print_batches(arguments.seed)
    if not arguments.batches:
        work = arguments.work.absolute()
        print_loop({b: run_loop(b, arguments.steps, work, arguments.overrides) for b in ("packed", "padded")})


if __name__ == "__main__":
    main()
