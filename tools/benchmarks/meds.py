"""What a step of the mistake memory costs, at the paper's size, against a plain loop over the libraries.

    python tools/benchmarks/meds.py                       # all tables, as Markdown
    python tools/benchmarks/meds.py --prompts 64 --rows 0 160 --reference-prompts 64

The plain loop asks scikit-learn's NearestNeighbors for each row by itself and fits the `hdbscan`
package prompt by prompt. Both start from the same rows; every size must be equal. Times are wall
clock on this machine; read the ratios, which are of one run. Replicas are played one after the other:
their table shows the slowest one's time.
"""

from __future__ import annotations

import argparse
import os
import pickle
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from hdbscan import HDBSCAN
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize

from megatron_meds.meds import MistakeMemory, Note, Rows, ShardedMemory, Visit, owner, select_layers

LAYERS = 28


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 16, 160, 400, 800, 1600])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--reference-prompts", type=int, default=None, help="default: all at 160 rows, else 32"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of ours up to 400 rows; the median is shown")
    parser.add_argument("--only", choices=["rows", "prompts", "replicas"], help="one table; default: all")
    options = parser.parse_args()
    n, samples, workers = options.prompts, options.samples, options.workers
    print(f"{n} prompts x {samples} samples, {LAYERS} layers, {workers} processes")
    if options.only in (None, "rows"):
        print("\n| rows each | exchange s | assign s | cluster s | ours, s | plain loop, s | times | sizes |")
        print("|---:|---:|---:|---:|---:|---:|---:|---|")
        for rows in options.rows:
            known = options.reference_prompts or (n if rows == 160 else 32)
            print(compare(min(known, n), n, rows, samples, workers, options.repeats), flush=True)
    if options.only in (None, "prompts"):
        print("\n| prompts, 160 rows each | assign s | cluster s |\n|---:|---:|---:|")
        for count in (n // 8, n // 4, n // 2, n):
            found, _ = ours(count, 160, samples, workers, options.repeats)
            print(f"| {count} | {found['assign']:.3f} | {found['cluster']:.3f} |", flush=True)
    if options.only in (None, "replicas"):
        print("\n| replicas, 160 rows a prompt | exchange s | assign s | cluster s | sent by one, MB |")
        print("|---:|---:|---:|---:|---:|")
        for replicas in (1, 2, 4, 8):
            print(spread(n, replicas, samples, workers), flush=True)


def responses(prompt: int, count: int, seed: int) -> np.ndarray:
    """[count, L] layer logits of made-up answers to one prompt: some six mistakes, of different spread."""
    modes = np.random.default_rng([1, prompt])
    middles = modes.normal(size=(6, LAYERS)) * 4 - 12
    spread = modes.choice([0.05, 0.3, 1.0], size=6)
    generator = np.random.default_rng([2, prompt, seed])
    kinds = generator.integers(0, 6, count)
    noise = generator.normal(size=(count, LAYERS)) * spread[kinds, None]
    return (middles[kinds] + noise).astype(np.float32)


def step_rows(prompts: Sequence[int], samples: int, seed: int) -> Rows:
    """What a step brings: all samples of each prompt."""
    logits = np.concatenate([responses(p, samples, seed) for p in prompts])
    count = len(prompts)
    return Rows(
        prompt_ids=[f"prompt {p}" for p in prompts for _ in range(samples)],
        correct=np.zeros(count * samples, dtype=bool),
        samples=np.tile(np.arange(samples, dtype=np.int32), count),
        features=select_layers(logits),
        layers=logits,
        notes=[Note("answer " * 4, "response " * 40)] * (count * samples),
        questions=["question " * 20] * (count * samples),
    )


def primed(prompts: Sequence[int], rows: int, workers: int) -> MistakeMemory:
    """A memory that has seen `rows` answers of each prompt."""
    memory = MistakeMemory(workers=workers)
    if rows:
        memory.visit_many([Visit(f"prompt {p}", select_layers(responses(p, rows, 0))) for p in prompts])
    else:
        memory._workers.cluster(
            [np.ones((200, 2))] * 32, [None] * 32
        )  # the processes are up before a step is timed
    return memory


def travelled(outgoing: Sequence[Any]) -> list[Any]:
    """The exchange of one replica with itself, by way of bytes as between processes."""
    return [pickle.loads(pickle.dumps(part)) for part in outgoing]


def ours(prompts: int, rows: int, samples: int, workers: int, repeats: int) -> tuple[dict, np.ndarray]:
    """Median seconds of each part, and the sizes of the first step."""
    times: dict[str, list[float]] = {"exchange": [], "assign": [], "cluster": [], "whole": []}
    sizes = np.empty(0)
    for repeat in range(repeats):
        memory = primed(range(prompts), rows, workers)
        shard = ShardedMemory(memory, exchange=travelled)
        brought = step_rows(range(prompts), samples, seed=1)
        begin = time.perf_counter()
        found = shard.visit(brought, step=1)
        times["whole"].append(time.perf_counter() - begin)
        times["exchange"].append(shard.report.exchange_seconds)
        times["assign"].append(shard.report.assign_seconds)
        times["cluster"].append(shard.report.cluster_seconds)
        sizes = found if repeat == 0 else sizes
        memory.close()
    return {name: median(values) for name, values in times.items()}, sizes


def plain(prompts: int, rows: int, samples: int) -> tuple[float, np.ndarray]:
    """Seconds of the loop over the libraries, and its sizes."""
    features = [select_layers(responses(p, rows, 0)) for p in range(prompts)]
    labels = [fit(known) for known in features]
    new = [select_layers(responses(p, samples, 1)) for p in range(prompts)]
    sizes = []
    begin = time.perf_counter()
    for known, label, arrived in zip(features, labels, new, strict=True):
        if rows:
            index = NearestNeighbors(n_neighbors=min(3, rows), metric="cosine").fit(known)
            for row in arrived:
                votes = Counter(label[index.kneighbors(row[None], return_distance=False)[0]].tolist())
                winner = min(votes, key=lambda v: (-votes[v], v))
                sizes.append(int((label == winner).sum()))
        else:
            sizes += [0] * samples
        fit(np.concatenate([known, arrived]))
    return time.perf_counter() - begin, np.array(sizes)


def fit(rows: np.ndarray) -> np.ndarray:
    if len(rows) < 2:
        return np.full(len(rows), -1)
    return HDBSCAN(min_cluster_size=2, min_samples=1).fit_predict(normalize(rows.astype(np.float64)))


def compare(known: int, prompts: int, rows: int, samples: int, workers: int, repeats: int) -> str:
    """A line of the first table; the plain loop runs on `known` prompts and is scaled to all of them."""
    found, sizes = ours(prompts, rows, samples, workers, repeats if rows <= 400 else 1)
    seconds, expected = plain(known, rows, samples)
    seconds *= prompts / known
    wrong = int((sizes[: known * samples] != expected).sum())
    said = f"{len(expected)} of {len(expected)} equal" if not wrong else f"{wrong} of {len(expected)} DIFFER"
    return (
        f"| {rows} | {found['exchange']:.3f} | {found['assign']:.3f} | {found['cluster']:.3f} | "
        f"{found['whole']:.3f} | {seconds:.2f}{'' if known == prompts else f' (from {known} prompts)'} | "
        f"{seconds / found['whole']:.1f} | {said} |"
    )


def spread(prompts: int, replicas: int, samples: int, workers: int) -> str:
    """A line of the last table: every replica samples an equal part of the prompts and owns its hash's."""
    parts = [step_rows(range(r, prompts, replicas), samples, seed=1) for r in range(replicas)]
    times, sent = [], []
    boxes: list[list[bytes]] = [[] for _ in range(replicas)]
    packing = []
    for rows in parts:
        begin = time.perf_counter()
        homes = np.array([owner(p, replicas) for p in rows.prompt_ids])
        packed = [pickle.dumps(rows.take(np.flatnonzero(homes == r).tolist())) for r in range(replicas)]
        packing.append(time.perf_counter() - begin)
        sent.append(sum(map(len, packed)))
        for box, part in zip(boxes, packed, strict=True):
            box.append(part)
    for replica, box in enumerate(boxes):
        own = [p for p in range(prompts) if owner(f"prompt {p}", replicas) == replica]
        memory = primed(own, 160, workers)
        begin = time.perf_counter()
        arrived = Rows.join([pickle.loads(part) for part in box])
        unpacking = time.perf_counter() - begin
        shard = ShardedMemory(memory)
        shard.visit(arrived, step=1)
        report = shard.report
        times.append((packing[replica] + unpacking, report.assign_seconds, report.cluster_seconds))
        memory.close()
    exchange, assign, cluster = (max(column) for column in zip(*times, strict=True))
    return f"| {replicas} | {exchange:.3f} | {assign:.3f} | {cluster:.3f} | {max(sent) / 1e6:.2f} |"


if __name__ == "__main__":
    main()
