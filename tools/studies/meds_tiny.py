"""DAPO with and without MEDS on the tiny reasoner, and the five ablations of the paper.

    python -m tools.studies.meds_tiny                                   # one seed
    python -m tools.studies.meds_tiny --seeds 1 2 3 --out runs/meds_study
    python -m tools.studies.meds_tiny --variants dapo meds --steps 40

All runs of a seed see the same prompts in the same order and start from the same model, which has
eight layers: what the paper calls 28 (all) is 8 here, and its 14 is 4. One vLLM server serves all runs.
After a run the held-out problems are sampled from the weights it ended with. Prints Markdown. A study
that was stopped goes on with `--out` of the same folder: runs that were measured are not made again.

The planted kinds of mistakes are known for every wrong answer (tools/tiny_reasoner/problems.py), so
the clusters of the memory can be held against them: of each run's own memory, and, so that all
features sort the same answers, of the memory that the run without penalties left.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from megatron_meds.meds import cluster_agreement, cluster_many, select_layers
from megatron_meds.meds.memory import Remembered
from megatron_meds.meds.state import FOLDER, read_shard, shard_files
from megatron_meds.verify import last_boxed
from tools.one_server import metrics_of, serve, train
from tools.studies.shared import EXAMPLE, ROOT, held_out_samples, kept, mean, problems, share
from tools.tiny_reasoner.problems import kind_of

CONFIG = EXAMPLE / "meds.yaml"
COMMON = (
    "data.train.0.limit=128",
    "data.prompts_per_step=32",
    "data.evaluation=[]",
    "algorithm.mini_batch_prompts=16",
    "rollout.dynamic_sampling={enabled: true, max_rounds: 2}",
    "rollout.server.max_num_seqs=512",
    "run.export_at_end=false",
    "tracking.trajectories_per_step=16",
)


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    name: str
    overrides: tuple[str, ...]
    paper: str = ""
    """What the paper calls it."""
    agreement: float | None = None
    """Cluster quality that the paper reports, %."""
    labels: Callable[[np.ndarray], np.ndarray] | None = None
    """[m, L] layer logits of one prompt -> features [m, d]; None: all answers are one cluster."""


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("dapo", ("meds.target=none", "meds.last=half")),
        Variant("single", ("meds.clusters=single", "meds.last=half"), "single", 45.16),
        Variant(
            "8 differences",
            ("meds.last=null", "meds.difference=true"),
            "28, differences",
            52.52,
            lambda layers: select_layers(layers, last=None, difference=True),
        ),
        Variant(
            "4 differences",
            ("meds.last=half", "meds.difference=true"),
            "14, differences",
            54.71,
            lambda layers: select_layers(layers, last=layers.shape[1] // 2, difference=True),
        ),
        Variant("8", ("meds.last=null",), "28", 53.87, lambda layers: select_layers(layers, last=None)),
        Variant(
            "meds",
            ("meds.last=half",),
            "14 (MEDS)",
            61.2,
            lambda layers: select_layers(layers, last=layers.shape[1] // 2),
        ),
    )
}
ABLATIONS = [name for name in VARIANTS if name != "dapo"]


@dataclass
class Held:
    """What the held-out samples of one set of weights are."""

    accuracy: float
    """Share of right samples: pass@1."""
    pass_16: float
    """Share of problems with a right one among their 16."""
    distinct: float
    """Different wrong answers of a problem, mean."""
    variety: float
    """Different wrong answers of a problem over its wrong samples, mean over problems with any."""
    length: float
    """Tokens of a response, mean."""


@dataclass
class Result:
    """One run."""

    seed: int
    variant: str
    held: Held
    eigen: list[float | None] = field(default_factory=list)
    """Top-1 eigen ratio of the wrong answers by step, median over prompts; None where not defined."""
    penalised: float = 0.0
    """Share of wrong answers with a penalty, over the run."""
    rows: int = 0
    """Wrong answers remembered at the end."""
    own: dict[str, float] = field(default_factory=dict)
    """Agreement of the run's own clusters with the planted kinds."""
    same: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of the run without penalties: agreement of each ablation's clusters on its memory."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=12, help="steps of a run; 4 are an epoch (12)")
    parser.add_argument("--problems", type=int, default=96, help="held-out problems, 16 samples of each")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "meds_study")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    held_out = problems("heldout")
    kinds = {row["question"]: row for row in problems("train")}
    results: list[Result] = []
    with serve(CONFIG, COMMON, given.out) as servers:
        start = Held(**kept(given.out / "start.json", lambda: asdict(
            measure(servers.urls, held_out[: given.problems], None)
        )))  # fmt: skip
        for seed in given.seeds:
            for name in given.variants:
                folder = given.out / f"seed{seed}_{name.replace(' ', '_')}"
                found = kept(
                    folder.with_suffix(".json"),
                    lambda name=name, seed=seed, folder=folder: asdict(
                        run(
                            VARIANTS[name],
                            seed,
                            given.steps,
                            folder,
                            servers.urls,
                            held_out[: given.problems],
                            kinds,
                        )
                    ),
                )
                results.append(Result(**{**found, "held": Held(**found["held"])}))
                said = results[-1].held
                print(f"seed {seed}, {name}: {said.accuracy:.1%} right", file=sys.stderr, flush=True)
    print(page(start, results, given.steps, given.problems))


def run(
    variant: Variant,
    seed: int,
    steps: int,
    folder: Path,
    urls: Sequence[str],
    held_out: list[dict],
    training: dict[str, dict],
) -> Result:
    """Train, sample the held-out problems, look into the memory."""
    shutil.rmtree(folder, ignore_errors=True)  # what a stopped study left
    code = train(
        CONFIG, [*COMMON, *variant.overrides, f"run.seed={seed}", f"run.steps={steps}"], folder, urls
    )
    if code:
        sys.exit(f"{folder}.log: the run ended with exit code {code}")
    held = measure(urls, held_out, version=steps + 1)  # one push before the first step, one after each
    rows = metrics_of(folder)
    memory = [
        (remembered, [kind_of(note.answer, training[remembered.question]) for note in remembered.notes])
        for file in shard_files(folder / "checkpoints" / f"step_{steps:06d}" / FOLDER)
        for (_, correct), remembered in read_shard(file)
        if not correct
    ]
    result = Result(
        seed=seed,
        variant=variant.name,
        held=held,
        eigen=[row.get("meds/eigen_ratio") for row in rows],
        penalised=mean(row.get("meds/penalised_share") for row in rows),
        rows=sum(len(remembered) for remembered, _ in memory),
        own=agreement((remembered.labels, known) for remembered, known in memory),
    )
    if variant.name == "dapo":
        result.same = {name: agreement_of(VARIANTS[name], memory) for name in ABLATIONS}
        result.same["same answer"] = agreement(
            (numbers([note.answer for note in remembered.notes]), known) for remembered, known in memory
        )
    return result


def measure(urls: Sequence[str], rows: list[dict], version: int | None) -> Held:
    """Sample the held-out problems from the servers' present weights."""
    groups = held_out_samples(urls, rows, version)
    right, passed, distinct, variety = 0, 0, [], []
    for row, group in zip(rows, groups, strict=True):
        answers = [last_boxed(text) for text, _ in group]
        wrong = [answer for answer in answers if kind_of(answer, row) != "right"]
        right += len(group) - len(wrong)
        passed += len(wrong) < len(group)
        different = len(set(wrong))
        distinct.append(different)
        if wrong:
            variety.append(different / len(wrong))
    lengths = [tokens for group in groups for _, tokens in group]
    return Held(
        accuracy=right / len(lengths),
        pass_16=passed / len(rows),
        distinct=statistics.mean(distinct),
        variety=mean(variety),
        length=statistics.mean(lengths),
    )


def agreement_of(variant: Variant, memory: list[tuple[Remembered, list[str]]]) -> dict[str, float]:
    """Agreement of a variant's clusters of remembered answers, whoever remembered them."""
    sets = [remembered.layers.astype(np.float32) for remembered, _ in memory]
    if variant.labels is None:
        labels = [np.zeros(len(layers), dtype=np.int64) for layers in sets]
    else:
        labels = cluster_many([variant.labels(layers) for layers in sets])
    return agreement((found, known) for found, (_, known) in zip(labels, memory, strict=True))


def agreement(pairs: Iterable[tuple[np.ndarray, list[str]]]) -> dict[str, float]:
    """Mean over prompts, each weighted by its answers; a prompt with one answer says nothing."""
    found, weights = [], []
    for labels, known in pairs:
        if len(labels) > 1:
            found.append(cluster_agreement(labels, numbers(known)))
            weights.append(len(labels))
    if not found:
        return {}
    return {name: float(np.average([one[name] for one in found], weights=weights)) for name in found[0]} | {
        "answers": float(sum(weights)),
        "prompts": float(len(weights)),
    }


def numbers(names: Sequence[str]) -> np.ndarray:
    """[n] a number for each different name."""
    return np.unique(np.array(names), return_inverse=True)[1]


# --- what is printed -------------------------------------------------------------------------------


def page(start: Held, results: list[Result], steps: int, problems: int) -> str:
    """The tables as Markdown, means over seeds."""
    names = [name for name in VARIANTS if any(r.variant == name for r in results)]
    by_name = {name: [r for r in results if r.variant == name] for name in names}
    seeds = sorted({r.seed for r in results})
    parts = [
        f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))}), {steps} steps, "
        f"{problems} held-out problems, 16 samples of each at temperature 1.",
        held_table(start, by_name),
        eigen_table(by_name, steps),
    ]
    same = [r.same for r in results if r.same]
    if same:
        parts.append(same_table(same))
    ablations = [name for name in ABLATIONS if name in by_name]
    if same and len(ablations) > 2:
        parts.append(ranking(same, {name: by_name[name] for name in ablations}))
    return "\n\n".join(parts)


def held_table(start: Held, by_name: dict[str, list[Result]]) -> str:
    lines = [
        "| | right | pass@16 | different wrong answers a problem | of its wrong samples | tokens | "
        "penalised | remembered | own clusters: Rand | adjusted | purity |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        f"| before training | {held_cells([start])} | | | | | |",
    ]
    for name, runs in by_name.items():
        own = [share([r.own.get(key, float("nan")) for r in runs]) for key in AGREEMENT]
        penalised = "" if name == "dapo" else share([r.penalised for r in runs])
        rows = f"{mean(float(r.rows) for r in runs):.0f}"
        lines.append(
            f"| {name} | {held_cells([r.held for r in runs])} | {penalised} | {rows} | {' | '.join(own)} |"
        )
    return "\n".join(lines)


def held_cells(held: list[Held]) -> str:
    plain = [f"{mean(getattr(h, key) for h in held):.2f}" for key in ("distinct", "variety", "length")]
    shares = [share([getattr(h, key) for h in held]) for key in ("accuracy", "pass_16")]
    return " | ".join([*shares, *plain])


def eigen_table(by_name: dict[str, list[Result]], steps: int) -> str:
    """Mean top-1 eigen ratio over quarters of the run."""
    edges = np.linspace(0, steps, 5).round().astype(int)
    head = " | ".join(f"steps {a + 1} to {b}" for a, b in pairwise(edges))
    lines = [f"| top-1 eigen ratio | {head} |", "|---" + "|---:" * 4 + "|"]
    for name, runs in by_name.items():
        cells = [f"{mean(v for r in runs for v in r.eigen[a:b]):.3f}" for a, b in pairwise(edges)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


AGREEMENT = ("rand", "adjusted_rand", "purity")


def same_table(same: list[dict[str, dict[str, float]]]) -> str:
    lines = [
        "| clusters of the same wrong answers | Rand | adjusted Rand | purity | the paper's |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in [*ABLATIONS, "same answer"]:
        cells = [share([one[name][key] for one in same]) for key in AGREEMENT]
        variant = VARIANTS.get(name)
        paper = f"{variant.agreement} % ({variant.paper})" if variant else ""
        lines.append(f"| {name} | {' | '.join(cells)} | {paper} |")
    one = same[0]["meds"]
    lines += ["", f"{one['answers']:.0f} answers to {one['prompts']:.0f} prompts (first seed)."]
    return "\n".join(lines)


def ranking(same: list[dict[str, dict[str, float]]], by_name: dict[str, list[Result]]) -> str:
    """Rank correlation of agreement and accuracy over the ablations."""
    accuracy = [mean(r.held.accuracy for r in runs) for runs in by_name.values()]
    said = []
    for key in AGREEMENT:
        found = [mean(one[name][key] for one in same) for name in by_name]
        said.append(f"{key.replace('_', ' ')} {spearmanr(found, accuracy)[0]:+.2f}")
    order = sorted(zip(accuracy, by_name, strict=True), reverse=True)
    return (
        f"Rank correlation (Spearman) of agreement with accuracy over {len(accuracy)} ablations: "
        f"{', '.join(said)}. By accuracy: {', '.join(f'{name} {value:.1%}' for value, name in order)}."
    )


if __name__ == "__main__":
    main()
