"""PPO through `megatron-meds train`: a critic that learns first, alone, and goes on after a resume."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModel

from megatron_meds import config
from megatron_meds.rollout.server import Servers

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "tiny_reasoner" / "ppo.yaml"
SMALL = (
    "data.prompts_per_step=16",
    "algorithm.mini_batch_prompts=8",
    "data.evaluation=[]",
    "rollout.max_tokens=128",
    "rollout.server.max_num_seqs=16",
    "rollout.server.kv_cache_gib=0.125",
    "run.export_at_end=false",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server of the starting policy, to which both runs bring their weights."""
    settings = config.load(CONFIG, SMALL)
    with Servers.start(
        settings.rollout.server,
        settings.model.path,
        run_dir=tmp_path_factory.mktemp("server"),
        max_model_len=settings.data.max_prompt_tokens + settings.rollout.max_tokens,
        dtype="float32",
        device="cpu",
        transport="shm",
        seed=1,
    ) as servers:
        yield servers


def train(folder: Path, urls: list[str], *overrides: str) -> list[dict[str, float]]:
    """Run to the end; the metrics of every step."""
    external = ["rollout.server.placement=external", f"rollout.server.urls=[{', '.join(urls)}]"]
    command = [sys.executable, "-m", "megatron_meds.cli.main", "train", str(CONFIG), f"run.folder={folder}"]
    done = subprocess.run(
        [*command, *SMALL, *external, *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(900)
def test_the_critic_learns_alone_then_with_the_policy_and_goes_on_after_a_resume(server, ranks, tmp_path):
    folder = tmp_path / "run"
    first, second = train(folder, server.urls, "run.steps=2")
    assert all(math.isfinite(value) for row in (first, second) for value in row.values())
    assert first["critic/value"] == 0 and second["critic/value"] != 0
    assert first["critic/return"] == pytest.approx(
        first["reward/total"], abs=0.25
    )  # of tokens, and of samples
    assert first["critic/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert first["critic/grad_norm"] > 0 and second["critic/loss"] > 0
    assert "update/loss" not in first and second["update/grad_norm"] > 0
    assert (first["learning_rate"], first["critic/learning_rate"]) == (0, 1e-3)
    assert second["learning_rate"] == pytest.approx(1e-4 / 3)

    state = folder / "checkpoints" / "step_000002" / "critic"
    assert (state / "critic.json").is_file()
    (weights,) = ranks(1).run(
        "tests.distributed.bodies_critic:weights_of_state",
        layout={},
        folder=CONFIG.parent / "model",
        state=state,
    )
    *_, third = train(folder, server.urls, "run.steps=3")
    assert third["step"] == 3
    head = weights.pop("score.weight")[0]
    model = AutoModel.from_pretrained(CONFIG.parent / "model", dtype=torch.float32)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
    values = []
    rows = pyarrow.parquet.read_table(folder / "trajectories" / "step_000003.parquet").to_pylist()
    for row in rows:
        prompt, response = row["prompt_ids"], row["response_ids"]
        with torch.no_grad():
            hidden = model(torch.tensor([prompt + response])).last_hidden_state[0]
        values.append((hidden[len(prompt) - 1 : -1] @ head).numpy())
    assert len(rows) == 16
    assert third["critic/value"] == pytest.approx(np.concatenate(values).mean(), abs=1e-4)
