"""Train the tiny reasoner a little with every algorithm, and tell in a table how each fared.

    python tools/run_all_algorithms.py                      # 100 steps of each
    python tools/run_all_algorithms.py gspo rloo --steps 3

One vLLM server is started and serves all runs, one after the other, as an `external` one. Each run is
`megatron-meds train` on two replicas with two updates a step, importance weights, and the divergence
from the starting policy measured; some take it into the loss or the reward (`TERMS`). A run's files are
in OUT/NAME, its output in OUT/NAME.log.

Exits with 1 where a run failed, a step is missing, or any metric of any step is not finite.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from one_server import metrics_of, serve, train
from rich.console import Console
from rich.table import Table

from megatron_meds.algorithms.recipe import NAMES

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "tiny_reasoner" / "dapo.yaml"
MODEL = CONFIG.parent / "model"
COMMON = (
    "actor.layout={pipeline: 1, data: 2}",
    "optimizer={lr: 5.0e-5, warmup_steps: 3}",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=128",
    "rollout.dynamic_sampling.enabled=false",
    "rollout.server.max_num_seqs=64",
    "rollout.server.kv_cache_gib=0.25",
    "reward.overlong.buffer=32",
    "data.prompts_per_step=8",
    "data.evaluation=[]",
    "algorithm.mini_batch_prompts=4",
    "algorithm.mismatch={importance_weights: true, max_gap: 5.0}",
    f"model.reference={MODEL}",
    "run.export_at_end=false",
    "tracking.trajectories_per_step=8",
)
TERMS = {
    "grpo": "algorithm.kl.coefficient=0.001",
    "rloo": "algorithm.kl={coefficient: 0.01, term: reward, estimator: k1}",
    "reinforce_pp": "algorithm.kl={coefficient: 0.01, term: reward, estimator: k1}",
    "reinforce_pp_baseline": "algorithm.kl.coefficient=0.01",
    "dr_grpo": "algorithm.entropy_bonus=0.001",
    "ppo": "critic={steps_before_policy: 1, optimizer: {lr: 5.0e-4, warmup_steps: 0}}",
}
"""What an algorithm is run with besides `COMMON`, so that every term is in use somewhere."""


@dataclass(frozen=True)
class Outcome:
    """How a run went."""

    name: str
    exit_code: int
    rows: list[dict[str, float | None]]
    """Metrics by step; None for a number that was not finite."""

    @property
    def not_finite(self) -> list[str]:
        """`step/metric` of every number that is not finite."""
        return [f"{row['step']}/{name}" for row in self.rows for name, v in row.items() if v is None]

    def sound(self, steps: int) -> bool:
        """Whether it made every step and every number is finite."""
        made = [row["step"] for row in self.rows] == list(range(1, steps + 1))
        return self.exit_code == 0 and made and not self.not_finite

    def mean(self, metric: str, part: slice) -> float:
        """Mean of a metric over some of the steps; NaN where there is none."""
        values = [v for row in self.rows[part] if (v := row.get(metric)) is not None]
        return statistics.mean(values) if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("algorithms", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--steps", type=int, default=100, help="steps of each (100)")
    parser.add_argument("--out", type=Path, help="default: runs/algorithms-DATE-TIME")
    given = parser.parse_args()
    if unknown := set(given.algorithms) - set(NAMES):
        parser.error(f"no such algorithm: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    out = given.out or ROOT / "runs" / time.strftime("algorithms-%Y%m%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=False)
    console = Console(width=None if sys.stdout.isatty() else 130)
    outcomes = []
    with serve(CONFIG, COMMON, out) as servers:
        for name in given.algorithms or NAMES:
            outcomes.append(run(name, given.steps, out, servers.urls))
            console.print(f"{name}: exit code {outcomes[-1].exit_code}, {len(outcomes[-1].rows)} steps")
    console.print(table(outcomes, given.steps))
    for outcome in outcomes:
        if outcome.not_finite:
            console.print(f"{outcome.name}: not finite: {', '.join(outcome.not_finite[:10])}")
        if outcome.exit_code:
            console.print(f"{outcome.name}: the end of {out / outcome.name}.log:")
            console.print((out / f"{outcome.name}.log").read_text()[-2000:], markup=False)
    sys.exit(not all(outcome.sound(given.steps) for outcome in outcomes))


def run(name: str, steps: int, out: Path, urls: list[str]) -> Outcome:
    """Train with one algorithm; its output goes to OUT/NAME.log."""
    given = [*COMMON, f"algorithm.name={name}", *([TERMS[name]] if name in TERMS else [])]
    exit_code = train(CONFIG, [*given, f"run.steps={steps}"], out / name, urls)
    return Outcome(name, exit_code, metrics_of(out / name))


def table(outcomes: list[Outcome], steps: int) -> Table:
    """One row a run; `first` and `last` are means over a tenth of the steps."""
    share = max(1, steps // 10)
    first, last, whole = slice(0, share), slice(-share, None), slice(None)
    shown = Table()
    for column in (
        "algorithm", "steps", "not finite", "accuracy\nfirst", "last", "KL ref\nlast", "entropy\nfirst",
        "last", "grad norm\nmean", "clipped\nmean", "s/step\nmean",
    ):  # fmt: skip
        shown.add_column(column, justify="left" if column == "algorithm" else "right")
    for o in outcomes:
        shown.add_row(
            o.name,
            str(len(o.rows)),
            str(len(o.not_finite)),
            f"{o.mean('accuracy', first):.1%}",
            f"{o.mean('accuracy', last):.1%}",
            f"{o.mean('reference/kl', last):.1e}",
            f"{o.mean('entropy', first):.3f}",
            f"{o.mean('entropy', last):.3f}",
            f"{o.mean('update/grad_norm', whole):.3f}",
            f"{o.mean('update/clip_fraction', whole):.2%}",
            f"{o.mean('seconds/step', whole):.2f}",
        )
    return shown


if __name__ == "__main__":
    main()
