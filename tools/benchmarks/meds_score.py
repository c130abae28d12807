"""What the layer logits of MEDS cost the score pass: time, memory, operations and bytes.

    python -m tools.benchmarks.meds_score build/smollm2             # made by tools/fetch_smollm2.py
    python -m tools.benchmarks.meds_score examples/tiny_reasoner/model --pairs 5 --layout pipeline=2

Passes with and without features alternate in one process, and the median of the pairs' ratios is
shown; peak memory is that of fresh processes, one with and one without in turn. A response here has
one answer token in 128, many more than a long chain of thought. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_meds.trajectory import Prompt, Trajectory

ROOT = Path(__file__).parents[2]
PROMPT, RESPONSE = 32, 128
"""Tokens."""


def rank_main(job: dict[str, Any]) -> None:
    """Measure on this rank; the first one writes to job["result"]."""
    import torch

    from megatron_meds.actor.mesh import Mesh
    from megatron_meds.actor.model import build_model
    from megatron_meds.actor.scoring import score
    from megatron_meds.actor.settings import ActorSettings, LayoutSettings
    from megatron_meds.actor.shape import read_model_config
    from megatron_meds.weights.huggingface import load_weights

    torch.set_num_threads(job["threads"])
    folder, layout = Path(job["model"]), LayoutSettings(**job["layout"])
    actor = ActorSettings(layout=layout, device="cpu", precision="fp32", tokens_per_micro_batch=1024)
    mesh = Mesh.create(layout, "cpu")
    shape = read_model_config(folder)
    chunks: list[Any] = list(build_model(shape, actor, "sdpa", mesh, seed=1))
    load_weights(chunks, folder, shape, mesh)
    samples = responses(job["samples"], shape.vocab)
    answers = [RESPONSE - 3] * len(samples)

    def one_pass(features: bool) -> float:
        mesh.barrier()
        started = time.perf_counter()
        score(
            chunks,
            samples,
            actor,
            mesh,
            vocabulary=shape.vocab,
            temperature=1.0,
            answer_tokens=answers if features else None,
        )
        mesh.barrier()
        return time.perf_counter() - started

    found: dict[str, Any] = {"layers": shape.layers, "hidden": shape.hidden}
    found["parameters"] = sum(p.numel() for chunk in chunks for p in chunk.parameters())
    if job["mode"] == "time":
        for features in (False, True):
            one_pass(features)
        # the order within a pair alternates too: what comes second may find warmer caches
        pairs = []
        for number in range(job["pairs"]):
            order = (False, True) if number % 2 == 0 else (True, False)
            times = {features: one_pass(features) for features in order}
            pairs.append((times[False], times[True]))
        found["pairs"] = pairs
    else:
        for _ in range(2):
            one_pass(job["mode"] == "features")
        status = Path("/proc/self/status").read_text().splitlines()
        found["peak_kib"] = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    if mesh.is_first_head:
        Path(job["result"]).write_text(json.dumps(found))
    mesh.barrier()
    mesh.close(destroy=True)


def responses(count: int, vocabulary: int) -> list[Trajectory]:
    """Made-up ones, of random tokens."""
    random = np.random.default_rng(1)
    found = []
    for number in range(count):
        ids = random.integers(0, vocabulary, PROMPT + RESPONSE).tolist()
        prompt = Prompt(id=str(number), question="", token_ids=tuple(ids[:PROMPT]), answer="")
        found.append(Trajectory(prompt, 0, ids[PROMPT:], "", [0.0] * RESPONSE, "stop", 0))
    return found


def measure(job: dict[str, Any], mode: str) -> dict[str, Any]:
    """Run the ranks of one measurement."""
    layout = job["layout"]
    size = layout.get("tensor", 1) * layout.get("pipeline", 1)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command += ["-m", "tools.benchmarks.meds_score", str(job["model"])]
        command += ["--rank", json.dumps({**job, "mode": mode, "result": str(result)})]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        return json.loads(result.read_text())


def print_table(job: dict[str, Any], processes: int) -> None:
    timed = measure(job, "time")
    ratios = [with_ / without for without, with_ in timed["pairs"]]
    without, with_ = (statistics.median(column) for column in zip(*timed["pairs"], strict=True))
    peaks = {mode: [] for mode in ("plain", "features")}
    for _ in range(processes):
        for mode, found in peaks.items():
            found.append(measure(job, mode)["peak_kib"] / 1024)
    plain, features = (statistics.median(found) for found in peaks.values())
    samples, layers, hidden = job["samples"], timed["layers"], timed["hidden"]
    tokens = samples * (PROMPT + RESPONSE)
    forward = 2.0 * timed["parameters"] * tokens  # attention's own products left out: they make it more
    tap = 2.0 * samples * layers * hidden
    kept = 4 * (samples * hidden + hidden + samples * layers)
    print("| | without features | with | more |")
    print("|---|---:|---:|---:|")
    print(
        f"| seconds, median of {len(ratios)} pairs | {without:.3f} | {with_:.3f} "
        f"| {statistics.median(ratios) - 1:+.2%} |"
    )
    print(
        f"| peak memory of {processes} processes each, MiB | {plain:.1f} | {features:.1f} "
        f"| {features / plain - 1:+.2%} |"
    )
    print(
        f"| operations, of this rank's share | {forward:.2e} | {forward + tap:.2e} | {tap / forward:+.6%} |"
    )
    print(f"| bytes kept for features | 0 | {kept:,} | |")
    print(
        f"\n{job['model']}, layout {job['layout'] or 'one rank'}, {samples} samples of {PROMPT} + {RESPONSE} "
        f"tokens, {layers} layers; quartiles of the pairs' ratios "
        f"{', '.join(f'{q - 1:+.2%}' for q in statistics.quantiles(ratios, n=4))}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=3, help="of each kind, for the peak memory")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of a rank")
    parser.add_argument("--layout", nargs="*", default=[], help="such as pipeline=2")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(json.loads(given.rank))
        return
    layout = {name: int(count) for name, _, count in (item.partition("=") for item in given.layout)}
    job = {"model": str(given.model.absolute()), "layout": layout}
    job |= {"pairs": given.pairs, "samples": given.samples, "threads": given.threads}
    print_table(job, given.processes)


if __name__ == "__main__":
    main()
