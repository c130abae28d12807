"""What a weight sync through shared memory costs, as ratios within one run.

    python tools/benchmarks/sync.py [MODEL] [--layouts tp1 tp3 pp2 tp3pp2] [--precision bf16] [--server]

MODEL is a Hugging Face folder; without one, random weights of the shape of SmolLM2-135M are made.
For each layout real actor ranks sync to a process that receives and keeps the weights, or (--server)
to a real vLLM server. Columns:

    moved      bytes the receiver copied out of the buffer / bytes of the model
    ours       (gather + write + map + calls) / a memory copy of the model by one core
    received   the same, the receiver's copy out of the buffer included
    gathered   the same as `ours` where ranks are on several machines: one rank gathers and writes
    server     seconds of a sync to vLLM, its own loading included, / the memory copy

A sync's time is the median of --repeats, after a first one that fills the buffer's pages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
TARGETS = {"moved": 1.0, "ours": 3.0}
_LAYOUT = re.compile(r"(?:tp(?P<tensor>\d+))?x?(?:pp(?P<pipeline>\d+))?")


@dataclass(frozen=True)
class Measured:
    """One layout; seconds are medians."""

    layout: str
    model_bytes: int
    moved_bytes: int
    copy_seconds: float
    ours_seconds: float
    received_seconds: float
    gathered_seconds: float
    first_seconds: float
    server_seconds: float | None = None


def parse_layout(text: str) -> dict[str, int]:
    """`tp3pp2` or `tp3xpp2` is {"tensor": 3, "pipeline": 2}."""
    match = _LAYOUT.fullmatch(text)
    if not text or match is None:
        raise ValueError(f"layout {text!r} is not of the form tp2, pp2 or tp2pp2")
    return {axis: int(count) for axis, count in match.groupdict().items() if count}


def ratios(measured: Measured) -> dict[str, float]:
    """The columns of the table, without those that were not measured."""
    found = {
        "moved": measured.moved_bytes / measured.model_bytes,
        "ours": measured.ours_seconds / measured.copy_seconds,
        "received": measured.received_seconds / measured.copy_seconds,
        "gathered": measured.gathered_seconds / measured.copy_seconds,
    }
    if measured.server_seconds is not None:
        found["server"] = measured.server_seconds / measured.copy_seconds
    return found


def table(rows: list[Measured]) -> str:
    """Markdown."""
    names = list(ratios(rows[0]))
    lines = [
        "| layout | model MiB | copy ms | first ms | " + " | ".join(names) + " |",
        "|:--|" + "--:|" * (3 + len(names)),
    ]
    for row in rows:
        found = ratios(row)
        cells = [f"{row.model_bytes / 2**20:.0f}", f"{row.copy_seconds * 1e3:.0f}"]
        cells += [f"{row.first_seconds * 1e3:.0f}", *(f"{found[name]:.2f}" for name in names)]
        lines.append(f"| {row.layout} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def missed(rows: list[Measured]) -> list[str]:
    """Targets that were not reached, a line each."""
    return [
        f"{row.layout}: {name} is {ratios(row)[name]:.2f}, the target is {limit:g}"
        for row in rows
        for name, limit in TARGETS.items()
        if ratios(row)[name] > limit * 1.001
    ]


def random_model(folder: Path) -> Path:
    """SmolLM2-135M's shape with random weights, fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (folder / "config.json").is_file():
        LlamaForCausalLM(LlamaConfig(**SMOLLM2)).save_pretrained(folder)
    return folder


# --- on the ranks ----------------------------------------------------------------------------------


def rank_main(job: dict[str, Any]) -> None:
    """Measure one layout; the sender writes the result to job["result"]."""
    import torch

    from megatron_meds.actor.mesh import Mesh
    from megatron_meds.actor.model import build_model
    from megatron_meds.actor.settings import ActorSettings, LayoutSettings
    from megatron_meds.actor.shape import read_model_config
    from megatron_meds.weights.control import ControlClient
    from megatron_meds.weights.export import LiveWeights
    from megatron_meds.weights.huggingface import load_weights
    from megatron_meds.weights.shm.sender import ShmSender

    torch.set_num_threads(1)
    folder, layout = Path(job["model"]), LayoutSettings(**parse_layout(job["layout"]))
    actor = ActorSettings(layout=layout, device="cpu", precision=job["precision"])
    mesh = Mesh.create(layout, "cpu")
    shape = read_model_config(folder)
    chunks = build_model(shape, actor, "sdpa", mesh, seed=1)
    load_weights(chunks, folder, shape, mesh)
    live = LiveWeights(chunks, shape, mesh)
    size = sum(t.bytes for t in live.manifest())
    control = ControlClient([job["url"]], timeout=600.0) if mesh.is_sender else None
    bucket = int(job["bucket_mib"] * 2**20)

    def median(action: Callable[[], Any]) -> float:
        return statistics.median(timed(action) for _ in range(job["repeats"]))

    def timed(action: Callable[[], Any]) -> float:
        mesh.barrier()
        started = time.perf_counter()
        action()
        mesh.barrier()
        return time.perf_counter() - started

    def told(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A call of the receiver, by the sender alone."""
        mesh.barrier()
        return control.post(path, body)[0] if control is not None else {}

    def copy_of_the_model() -> float:
        """Seconds of a memory copy between two buffers that are in use; on the sender, alone."""
        if not mesh.is_sender:
            return 0.0
        source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        times = []
        for _ in range(max(job["repeats"], 5)):
            started = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    sender = ShmSender(live, mesh, control, bucket)
    sender.connect()
    assert sender.written_together
    if job["server"]:
        first = timed(sender.send)
        copy = copy_of_the_model()
        found = {"server_seconds": median(sender.send), "copy_seconds": copy, "first_seconds": first}
    else:
        told("read", {"wanted": True})
        first = timed(sender.send)
        copies = [copy_of_the_model()]
        received = median(sender.send)
        stats = told("stats")
        told("read", {"wanted": False})
        ours = median(sender.send)
        copies.append(copy_of_the_model())
        mesh.barrier()
        sender.close()
        gathering = ShmSender(_Gathered(live), mesh, control, bucket)
        gathering.connect()
        timed(gathering.send)
        gathered = median(gathering.send)
        gathering.close()
        found = {
            "moved_bytes": stats.get("bytes", 0) // (job["repeats"] + 1),
            "copy_seconds": statistics.mean(copies),
            "first_seconds": first,
            "received_seconds": received,
            "ours_seconds": ours,
            "gathered_seconds": gathered,
        }
    if mesh.is_sender:
        Path(job["result"]).write_text(json.dumps({"model_bytes": size, **found}))
    mesh.barrier()
    mesh.close(destroy=True)


class _Gathered:
    """Live weights as a sender sees them whose other ranks are on other machines."""

    def __init__(self, live: Any) -> None:
        self.manifest, self.tensors = live.manifest, live.tensors


# --- the run ---------------------------------------------------------------------------------------


@contextmanager
def receiver(model: Path) -> Iterator[str]:
    """The URL of a receiver in a process of its own."""
    import httpx

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tools.benchmarks.receiver", "--port", str(port), "--model", str(model)]
    process = subprocess.Popen(command, cwd=ROOT, env=_environment())
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.get(f"{url}/health", trust_env=False)
                break
            except httpx.ConnectError:
                if process.poll() is not None:
                    raise RuntimeError("the receiver ended while starting") from None
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


@contextmanager
def vllm(model: Path, precision: str, folder: Path) -> Iterator[str]:
    """The URL of a real server."""
    from megatron_meds.rollout.server import Servers
    from megatron_meds.rollout.settings import ServerSettings

    settings = ServerSettings(kv_cache_gib=0.25, max_num_seqs=8)
    dtype = "bfloat16" if precision == "bf16" else "float32"
    with Servers.start(
        settings,
        model,
        run_dir=folder,
        max_model_len=256,
        dtype=dtype,
        device="cpu",
        transport="shm",
        seed=0,
    ) as servers:
        yield servers.urls[0]


def measure(job: dict[str, Any], url: str, folder: Path) -> dict[str, Any]:
    """Run a layout's ranks."""
    layout = parse_layout(job["layout"])
    size = layout.get("tensor", 1) * layout.get("pipeline", 1)
    job = {**job, "url": url, "result": str(folder / "result.json")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += ["-m", "tools.benchmarks.sync", "--rank", json.dumps(job)]
    subprocess.run(command, cwd=ROOT, env=_environment(), check=True)
    return json.loads(Path(job["result"]).read_text())


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": path}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", help="Hugging Face folder")
    parser.add_argument("--layouts", nargs="+", default=["tp1", "tp3", "pp2", "tp3pp2"])
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--bucket-mib", type=float, default=256.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--server", action="store_true", help="also sync to a real vLLM server")
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.rank)
        return
    model = given.model.absolute() if given.model else random_model(ROOT / "build" / "smollm2_random")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        job = {
            "model": str(model),
            "precision": given.precision,
            "bucket_mib": given.bucket_mib,
            "repeats": given.repeats,
            "server": False,
        }
        with receiver(model) as url:
            for layout in given.layouts:
                found = measure({**job, "layout": layout}, url, folder)
                rows.append(Measured(layout, **found))
                print(layout, found, file=sys.stderr)
        if given.server:
            with vllm(model, given.precision, folder) as url:
                for place, row in enumerate(rows):
                    found = measure({**job, "layout": row.layout, "server": True}, url, folder)
                    # The server's run has a memory copy of its own: the ratio is taken within it.
                    seconds = found["server_seconds"] / found["copy_seconds"] * row.copy_seconds
                    rows[place] = Measured(**{**asdict(row), "server_seconds": seconds})
    print(f"{model}, {given.precision}, buckets of {given.bucket_mib:g} MiB, {os.cpu_count()} cores\n")
    print(table(rows))
    for line in missed(rows):
        print(f"missed: {line}")


if __name__ == "__main__":
    main()
