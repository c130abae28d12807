"""Whole runs of `megatron-meds train` on the tiny reasoner, with real ranks and a real vLLM server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_meds.meds import MistakeMemory

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "tiny_reasoner" / "meds.yaml"
SMALL = (
    "data.prompts_per_step=16",
    "algorithm.mini_batch_prompts=8",
    "rollout.samples_per_prompt=4",
    "rollout.dynamic_sampling.enabled=false",
    "rollout.server.max_num_seqs=64",
    "data.train.0.limit=16",  # every step asks the same prompts, so that mistakes repeat
    "data.evaluation.0.limit=16",
    "run.evaluate_samples=1",
)


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_meds.cli.main", "train", str(CONFIG), f"run.folder={folder}"]
    return subprocess.Popen(
        [*command, *SMALL, *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def metrics(folder: Path) -> list[dict[str, float]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 280) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()[0][-4000:]
        if time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"it took more than {seconds} s:\n{process.communicate()[0][-4000:]}")
        time.sleep(0.1)


def of_run(folder: Path, word: str) -> list[psutil.Process]:
    """Processes of the run, known by their environment, whose command line holds `word`."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        line = " ".join(process.info["cmdline"] or [])
        if word in line and (process.info["environ"] or {}).get("MEDS_TEST_RUN") == str(folder):
            found.append(process)
    return found


@pytest.fixture(scope="module")
def first_run(tmp_path_factory) -> tuple[Path, str]:
    """Two steps from start to export; the run's folder and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    process = start(folder, "run.steps=2")
    output, _ = process.communicate(timeout=560)
    assert process.returncode == 0, output[-4000:]
    return folder, output


def test_a_run_logs_every_step_and_says_accuracy_before_and_after(first_run):
    folder, output = first_run
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    wanted = {
        "accuracy", "length", "truncated", "entropy", "reward/outcome", "reward/overlong", "reward/total",
        "update/kl_old", "update/clip_fraction", "update/grad_norm", "mismatch/abs", "mismatch/kl",
        "tokens_per_second", "seconds/rollout", "seconds/score", "seconds/update", "seconds/sync",
        "memory/resident_gib", "learning_rate",
    }  # fmt: skip
    assert wanted <= rows[1].keys()
    assert "evaluation/heldout/accuracy" in rows[0] and "evaluation/heldout/accuracy" in rows[2]
    assert "before training" in output


def test_the_server_samples_from_the_actors_own_weights(first_run):
    folder, _ = first_run
    for row in metrics(folder)[1:]:
        assert row["mismatch/abs"] < 1e-3
        assert row["mismatch/unknown_tokens"] == 0


def test_trajectories_are_kept_as_parquet(first_run):
    import pyarrow.parquet

    folder, _ = first_run
    rows = pyarrow.parquet.read_table(folder / "trajectories" / "step_000001.parquet").to_pylist()
    assert len(rows) == 64
    assert len({(row["prompt_id"], row["sample"]) for row in rows}) == 64
    right = [row for row in rows if row["correct"]]
    assert right and all(f"\\boxed{{{row['answer']}}}" in row["text"] for row in right)


def remembered(folder: Path) -> list[dict]:
    import pyarrow.parquet

    (checkpoint,) = (folder / "checkpoints").glob("step_*")
    return pyarrow.parquet.read_table(checkpoint / "memory").to_pylist()


def sampled(folder: Path, step: int) -> dict[tuple[str, int], dict]:
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(folder / "trajectories" / f"step_{step:06d}.parquet").to_pylist()
    return {(row["prompt_id"], row["sample"]): row for row in rows}


def test_wrong_answers_are_remembered_by_the_layer_logits_of_hugging_face(first_run):
    folder, _ = first_run
    model = AutoModelForCausalLM.from_pretrained(CONFIG.parent / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(CONFIG.parent / "model")
    outputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _m, _i, out: outputs.append(out))
    first = {(row["prompt_id"], row["sample"]): row for row in remembered(folder) if row["step"] == 1}
    wrong = {
        key for key, row in sampled(folder, 1).items() if not row["correct"] and "\\boxed{" in row["text"]
    }
    assert set(first) == wrong and len(wrong) > 5
    for key, row in list(first.items())[:5]:
        response = sampled(folder, 1)[key]
        head = response["text"][: response["text"].rindex("{") + 1]
        index = len(tokenizer(head, add_special_tokens=False)["input_ids"])  # one token a character
        prompt, ids = response["prompt_ids"], response["response_ids"]
        outputs.clear()
        with torch.no_grad():
            model(torch.tensor([prompt + ids]))
            hidden = torch.stack([h.reshape(-1, h.shape[-1])[len(prompt) + index - 1] for h in outputs])
            hidden[-1] = model.model.norm(hidden[-1])
            logits = hidden @ model.lm_head.weight[ids[index]]
        assert torch.allclose(torch.tensor(row["feature"]), logits[4:], atol=1e-3), key


def test_a_mistake_costs_what_its_cluster_counted_before(first_run):
    folder, _ = first_run
    groups: dict[str, list[dict]] = {}
    for row in remembered(folder):
        groups.setdefault(row["prompt_id"], []).append(row)
    wanted = {}
    for prompt, rows in groups.items():
        memory = MistakeMemory()
        for step in (1, 2):
            new = sorted((row for row in rows if row["step"] == step), key=lambda row: row["sample"])
            features = np.array([row["feature"] for row in new], dtype=np.float32)
            for row, size in zip(new, memory.visit(prompt, features), strict=True):
                wanted[step, prompt, row["sample"]] = -min(0.1 * np.log(size + 1), 0.2)
    found = {
        (step, *key): row["reward/meds"]
        for step in (1, 2)
        for key, row in sampled(folder, step).items()
        if (step, *key) in wanted or row["reward/meds"]
    }
    assert found == pytest.approx(wanted)
    assert all(value == 0 for (step, *_), value in found.items() if step == 1)
    second = [value for (step, *_), value in found.items() if step == 2]
    assert min(second) < -0.05
    row = metrics(folder)[2]
    assert row["reward/meds"] == pytest.approx(sum(second) / 64)
    assert row["meds/memory_rows"] == len(remembered(folder))


def test_the_memory_of_a_run_is_shown(first_run):
    folder, _ = first_run
    command = [sys.executable, "-m", "megatron_meds.cli.main", "memory", "show", str(folder)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert max(remembered(folder), key=lambda row: row["prompt_id"])["prompt_id"][:8] in shown


def test_the_export_loads_in_transformers_and_differs_from_the_start(first_run):
    folder, _ = first_run
    model = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(CONFIG.parent / "model", dtype=torch.float32).state_dict()
    moved = [name for name, t in model.state_dict().items() if not torch.equal(t, before[name])]
    assert len(moved) == len(before)
    tokenizer = AutoTokenizer.from_pretrained(folder / "export")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3+4"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    answer = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert "<think>\n3+4=7" in tokenizer.decode(answer[0])


def test_a_finished_run_is_not_run_again(first_run):
    folder, _ = first_run
    process = start(folder, "run.steps=2")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "finished its 2 steps" in output and "Traceback" not in output


def test_a_killed_server_and_then_a_killed_trainer(first_run, tmp_path, monkeypatch):
    """From the export of the first run, at another temperature: kill -9 of the server in the middle of a
    rollout loses and doubles nothing; kill -9 of the trainer leaves no server behind."""
    folder = tmp_path / "second"
    monkeypatch.setenv("MEDS_TEST_RUN", str(folder))
    process = start(
        folder,
        "run.steps=50",
        f"model.path={first_run[0] / 'export'}",
        "rollout.temperature=0.6",
        "run.evaluate_at_start=false",
        "rollout.samples_per_prompt=8",
        "rollout.server.max_num_seqs=128",
        "algorithm.kl={coefficient: 0.001, term: reward}",
        f"model.reference={CONFIG.parent / 'model'}",
        "algorithm.mismatch={importance_weights: true, max_gap: 5.0}",
    )
    try:
        wait_for(lambda: len(metrics(folder)) >= 1, process)
        (server,) = [
            p for p in of_run(folder, "vllm.entrypoints") if "supervisor" not in " ".join(p.cmdline())
        ]
        time.sleep(0.5)  # the next rollout has begun, and takes seconds
        server.send_signal(signal.SIGKILL)
        wait_for(lambda: len(metrics(folder)) >= 2, process)

        row = metrics(folder)[1]
        assert row["rollout/servers_restarted"] == 1
        # the policy is two steps away from the reference, and its servers agree with it
        assert 0 < row["reference/kl"] < 0.1 and -1e-2 < row["reward/kl"] < 0
        assert row["mismatch/capped"] == row["mismatch/dropped_sequences"] == 0
        assert row["mismatch/abs"] < 1e-3
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(folder / "trajectories" / "step_000002.parquet").to_pylist()
        assert len(rows) == 128
        assert len({(r["prompt_id"], r["sample"]) for r in rows}) == 128

        supervisors = of_run(folder, "rollout.supervisor")
        servers = [*supervisors, *(child for s in supervisors for child in s.children(recursive=True))]
        assert len(servers) > 2
        for rank in of_run(folder, "megatron_meds.cli"):
            os.kill(rank.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(servers, timeout=60)
        assert not alive
    finally:
        for left in of_run(folder, ""):
            left.kill()
        process.communicate()
