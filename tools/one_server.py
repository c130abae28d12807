"""Several runs one after the other on one vLLM server, to which each brings its own weights.

For tools that compare runs: a server takes half a minute to start, and need not start again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_meds import config
from megatron_meds.actor.shape import read_model_config
from megatron_meds.arithmetic import server_tokens
from megatron_meds.rollout.server import Servers


def serve(settings_file: Path, overrides: Sequence[str], out: Path) -> Servers:
    """Start the server of a configuration with the weights its runs start from; it logs to OUT/servers."""
    settings = config.load(settings_file, overrides)
    return Servers.start(
        settings.rollout.server,
        settings.model.path,
        run_dir=out,
        max_model_len=server_tokens(settings, read_model_config(settings.model.path).max_positions),
        dtype="float32",
        device="cpu",
        transport="shm",
        seed=settings.run.seed,
    )


def train(settings_file: Path, overrides: Sequence[str], folder: Path, urls: Sequence[str]) -> int:
    """`megatron-meds train` into a folder on those servers; its output goes to FOLDER.log.

    Returns:
        Its exit code.
    """
    command = [sys.executable, "-m", "megatron_meds.cli.main", "train", str(settings_file), *overrides]
    command += [f"run.name={folder.name}", f"run.folder={folder}"]
    command += ["rollout.server.placement=external", f"rollout.server.urls=[{', '.join(urls)}]"]
    with folder.with_name(f"{folder.name}.log").open("w") as log:
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode


def metrics_of(folder: Path) -> list[dict[str, float | None]]:
    """A run's metrics by step; None for a number that was not finite, [] where nothing was logged."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
