"""`megatron-meds check-sync` as a user runs it: real ranks, and real vLLM servers where it says so."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.small_run import write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tiny, tmp_path) -> Path:
    """A run with the model of the fixture `vllm_server`, on two pipeline stages."""
    path = write_run(tmp_path / "run", {"actor": {"device": "cpu", "layout": {"pipeline": 2}}})
    for file in tiny("qwen3_tied").iterdir():
        shutil.copyfile(file, path.parent / "model" / file.name)
    tree = yaml.safe_load(path.read_text())
    tree["model"]["weights"] = "load"
    tree["rollout"]["server"] = {"kv_cache_gib": 0.125, "max_num_seqs": 16, "stop_timeout_seconds": 5}
    path.write_text(yaml.safe_dump(tree))
    return path


def check_sync(
    config: Path, *arguments: str, launcher: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *launcher, "-m", "megatron_meds.cli.main", "check-sync", str(config), *arguments],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "COLUMNS": "200", **environment},
        cwd=ROOT,
        check=False,
    )


def rows(output: str) -> list[list[str]]:
    """Cells of the table's rows."""
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


@pytest.fixture
def receivers(tmp_path) -> str:
    """An interpreter for `rollout.server.python` that starts a receiver in place of vLLM."""
    script = tmp_path / "python"
    receiver = ROOT / "tools" / "benchmarks" / "receiver.py"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {receiver} "$@"\n')
    script.chmod(0o755)
    return f"rollout.server.python={script}"


@pytest.mark.timeout(900)
def test_a_real_server_holds_the_actor_s_weights_after_each_sync(config, vllm_server):
    external = ["rollout.server.placement=external", f"rollout.server.urls=[{vllm_server.urls[0]}]"]
    result = check_sync(config, *external)
    assert result.returncode == 0, result.stdout + result.stderr
    found = rows(result.stdout)
    assert [row[0] for row in found] == ["sync 1", "sync 2"]
    for _, url, tensors, changed, differ, tokens, alike, logprob in found:
        assert (url, differ, tokens) == (vllm_server.urls[0], "0", "48")
        assert tensors == changed
        assert alike.startswith("equal")
        assert float(logprob) < 1e-3
    folder = config.parent / "out"
    assert [path.name for path in folder.iterdir()] == ["check_sync"]
    assert not list(folder.glob("check_sync/export*"))


def test_two_servers_and_one_that_joins_again_hold_them_too_under_an_outer_torchrun(config, receivers):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    options = ("rollout.server.count=2", "--rejoin", "--no-outputs")
    result = check_sync(config, receivers, *options, launcher=torchrun)
    assert result.returncode == 0, result.stdout + result.stderr
    found = rows(result.stdout)
    assert [row[0] for row in found] == ["sync 1"] * 2 + ["sync 2"] * 2 + ["restart"] * 2
    assert len({row[1] for row in found}) == 2
    assert {row[4] for row in found} == {"0"}
    tensors = found[0][2]
    assert [row[3] for row in found] == [*[tensors] * 4, "0", "0"]


def test_a_wrong_tensor_is_named_with_its_server_and_the_exit_code_says_so(config, receivers):
    wrong = "model.layers.3.mlp.down_proj.weight"
    result = check_sync(config, receivers, "--no-outputs", RECEIVER_SPOILS=wrong)
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 2, result.stderr
    for number, line in enumerate(lines, start=1):
        assert line.startswith(f"error: sync {number}, server http://127.0.0.1:")
        assert line.endswith(f"{wrong} differs")
    assert (config.parent / "out" / "check_sync" / "export_1" / "model.safetensors").is_file()
