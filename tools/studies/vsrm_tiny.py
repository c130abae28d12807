"""PPO with and without VSRM on the tiny reasoner, its ablations, and two other ways to shorten reasoning.

    python -m tools.studies.vsrm_tiny                                   # one seed
    python -m tools.studies.vsrm_tiny --seeds 1 2 3 --out runs/vsrm_study
    python -m tools.studies.vsrm_tiny --variants ppo vsrm --steps 40

All runs of a seed see the same prompts in the same order and start from the same model. One vLLM server
serves all runs. After a run the held-out problems are sampled from the weights it ended with: share right,
pass@k, length, and how many of the planted re-checks ("Wait, let me check.", which never change the answer)
are left. Prints Markdown. A study that was stopped goes on with `--out` of the same folder: runs that were
measured are not made again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_meds.evaluate import pass_at_k
from megatron_meds.verify import last_boxed
from tools.one_server import metrics_of, serve, train
from tools.studies.shared import (
    EXAMPLE,
    ROOT,
    SAMPLES,
    held_out_samples,
    kept,
    mean,
    number,
    problems,
    share,
)
from tools.tiny_reasoner.problems import CHECK, kind_of

CONFIG = EXAMPLE / "vsrm_ppo.yaml"
COMMON = (
    "data.prompts_per_step=32",
    "data.evaluation=[]",
    "algorithm.mini_batch_prompts=16",
    "rollout.samples_per_prompt=4",  # a group, for the length reward; PPO itself needs none
    "run.export_at_end=false",
    "tracking.trajectories_per_step=16",
)
FORM = "reward.form={think_close: </think>, unclosed: -1.0, no_box: -0.5, replaces_outcome: true}"
NO_STEPS = "vsrm={enabled: false}"
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ppo": ("PPO: outcome", (NO_STEPS, "reward={}")),
    "form": ("PPO: outcome and format", (NO_STEPS, FORM)),
    "vsrm": ("PPO + VSRM", (FORM,)),
    "no_look_ahead": ("PPO + VSRM without look-ahead", (FORM, "vsrm.window=0")),
    "length": ("PPO + length penalty", (NO_STEPS, FORM, "reward.length={penalty: 0.5}")),
    "exit_decay": (
        "PPO + decaying reward of early exits",
        (FORM, "vsrm.reward_function=tools.studies.own_rewards:exit_decay"),
    ),
    "group_length": (
        "PPO: length beside the group's right answers",
        (
            NO_STEPS,
            "reward={function: 'tools.studies.own_rewards:group_length', function_replaces_outcome: true}",
        ),
    ),
}
"""Name -> (what it is, settings on top of the example)."""


@dataclass
class Held:
    """What the held-out samples of one set of weights are."""

    accuracy: float
    pass_at: dict[str, float]
    """By k, as text."""
    tokens: float
    checks: float
    """Re-checks of a response, mean."""
    boxed: float


@dataclass
class Result:
    """One run."""

    seed: int
    variant: str
    held: Held
    lengths: list[float | None] = field(default_factory=list)
    """Mean tokens of the sampled responses by step."""
    seconds: float = 0.0
    """Of a step, mean."""
    continued: float = 0.0
    """Tokens of continuations for each token of a response, over the run."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--problems", type=int, default=96, help="held-out problems, 16 samples of each")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "vsrm_study")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = problems("heldout")[: given.problems]
    results = []
    with serve(CONFIG, COMMON, given.out) as servers:
        start = kept(given.out / "start.json", lambda: asdict(measure(servers.urls, rows, None)))
        for seed in given.seeds:
            for name in given.variants:
                folder = given.out / f"seed{seed}_{name}"
                found = kept(
                    folder.with_suffix(".json"),
                    lambda name=name, seed=seed, folder=folder: asdict(
                        run(name, seed, given.steps, folder, servers.urls, rows)
                    ),
                )
                results.append(Result(**{**found, "held": Held(**found["held"])}))
                print(f"seed {seed}, {name}: {json.dumps(found['held'])}", file=sys.stderr, flush=True)
    print(page(Held(**start), results, given.steps, given.problems))


def run(name: str, seed: int, steps: int, folder: Path, urls: Sequence[str], rows: list[dict]) -> Result:
    """Train, then sample the held-out problems."""
    shutil.rmtree(folder, ignore_errors=True)  # what a stopped study left
    given = [*COMMON, *VARIANTS[name][1], f"run.seed={seed}", f"run.steps={steps}"]
    if code := train(CONFIG, given, folder, urls):
        sys.exit(f"{folder}.log: the run ended with exit code {code}")
    metrics = metrics_of(folder)
    return Result(
        seed=seed,
        variant=name,
        held=measure(urls, rows, version=steps + 1),  # one push before the first step, one after each
        lengths=[row.get("length") for row in metrics],
        seconds=mean(row.get("seconds/step") for row in metrics),
        continued=sum(row.get("vsrm/continuation_tokens") or 0.0 for row in metrics)
        / sum(row.get("response_tokens") or 0.0 for row in metrics),
    )


def measure(urls: Sequence[str], rows: list[dict], version: int | None) -> Held:
    """Sample the held-out problems from the servers' present weights."""
    groups = held_out_samples(urls, rows, version)
    right = [
        sum(kind_of(last_boxed(text), row) == "right" for text, _ in group)
        for row, group in zip(rows, groups, strict=True)
    ]
    every = [one for group in groups for one in group]
    return Held(
        accuracy=sum(right) / len(every),
        pass_at={str(k): statistics.mean(pass_at_k(SAMPLES, c, k) for c in right) for k in (1, 2, 4, 8, 16)},
        tokens=statistics.mean(tokens for _, tokens in every),
        checks=statistics.mean(text.count(CHECK) for text, _ in every),
        boxed=statistics.mean(last_boxed(text) is not None for text, _ in every),
    )


def page(start: Held, results: list[Result], steps: int, count: int) -> str:
    """The table as Markdown, means over seeds."""
    seeds = sorted({r.seed for r in results})
    lines = [
        f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))}), {steps} steps, "
        f"{count} held-out problems, {SAMPLES} samples of each at temperature 1.",
        "",
        "| | right | pass@4 | pass@16 | tokens | re-checks | boxed | s a step | continued, of sampled |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        f"| before training | {cells([start])} | | |",
    ]
    for name, (title, _) in VARIANTS.items():
        runs = [r for r in results if r.variant == name]
        if runs:
            cost = f"{mean(r.seconds for r in runs):.1f} | {mean(r.continued for r in runs):.2f}"
            lines.append(f"| {title} | {cells([r.held for r in runs])} | {cost} |")
    return "\n".join(lines)


def cells(held: list[Held]) -> str:
    return " | ".join(
        [
            share([h.accuracy for h in held]),
            share([h.pass_at["4"] for h in held]),
            share([h.pass_at["16"] for h in held]),
            number([h.tokens for h in held], 1),
            number([h.checks for h in held]),
            share([h.boxed for h in held]),
        ]
    )


if __name__ == "__main__":
    main()
