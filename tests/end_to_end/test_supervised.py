"""Supervised training under an outer torchrun: from random weights, stopped, gone on with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 6


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    """Traces and a model folder without weights, as tools/make_tiny_model.py writes them."""
    folder = tmp_path_factory.mktemp("tiny")
    command = [sys.executable, "tools/make_tiny_model.py", "--problems-only"]
    subprocess.run(
        [*command, "--out", str(folder / "out"), "--build", str(folder / "build")], cwd=ROOT, check=True
    )
    return folder / "build"


def supervise(material: Path, run: Path, *overrides: str) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [
        "-m",
        "megatron_meds.cli.main",
        "train",
        "tools/tiny_reasoner/sft.yaml",
        f"model.path={material / 'model'}",
        f"data.train.0.path={material / 'traces.jsonl'}",
        f"run.folder={run}",
        "data.train.0.limit=256",
        "data.prompts_per_step=16",
        "optimizer.warmup_steps=1",
        "optimizer.schedule=constant",
        "run.export_at_end=false",
    ]
    done = subprocess.run(
        [*command, *arguments, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=560, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(material, tmp_path):
    whole = supervise(material, tmp_path / "whole", f"run.steps={STEPS}")
    supervise(material, tmp_path / "halves", f"run.steps={STEPS // 2}")
    halves = supervise(material, tmp_path / "halves", f"run.steps={STEPS}")

    assert [row["step"] for row in whole] == [row["step"] for row in halves] == list(range(1, STEPS + 1))
    for name in ("update/loss", "update/nll", "update/grad_norm", "learning_rate", "response_tokens"):
        assert [row[name] for row in whole] == [row[name] for row in halves], name
    assert whole[-1]["update/nll"] < whole[0]["update/nll"] - 0.5
