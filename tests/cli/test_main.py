"""The command line as a user meets it: started as a process, judged by output and exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_meds import __version__
from tests.small_run import write_run

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_STEP_NODELIST": "n1",
}


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "megatron_meds.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "120", **environment},
        check=False,
    )


def test_version():
    assert command("--version").stdout == f"megatron-meds {__version__}\n"


def test_help_lists_the_commands_that_exist():
    text = command("--help").stdout
    assert {"train", "check-sync", "convert", "doctor"} <= set(text.split())


def test_help_and_dry_run_import_no_torch(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')")
    config = write_run(tmp_path / "run")
    for arguments in (("train", "--help"), ("check-sync", "--help"), ("train", config, "--dry-run")):
        result = command(*arguments, PYTHONPATH=str(tmp_path))
        assert result.returncode == 0, result.stderr


def test_dry_run_prints_layout_batch_and_servers_and_starts_nothing(tmp_path: Path):
    config = write_run(tmp_path / "run")
    layout = ["actor.layout.tensor=2", "actor.layout.pipeline=2", "actor.layout.data=2"]
    mini = ["algorithm.mini_batch_prompts=3", "rollout.server.count=2", "rollout.server.port=18431"]
    result = command("train", config, *layout, *mini, "--dry-run")
    assert result.returncode == 0, result.stderr
    words = " ".join(result.stdout.split())
    assert "8 actor ranks on CPU: tensor 2 x pipeline 2" in words
    assert "│ 0 │ 0 1 │ 4* 5 │" in words
    assert "│ 1 │ 2 3 │ 6* 7 │" in words
    assert "samples │ 64 │ 8 a prompt" in words
    assert "updates │ 3 │ 3 prompts each, the last 2; 9 in the run" in words
    assert "port 18432" in words
    assert not (config.parent / "out").exists()


@pytest.mark.parametrize(("procid", "lines"), [("0", True), ("3", False)])
def test_under_srun_the_ranks_are_slurm_s_and_the_first_one_speaks(tmp_path: Path, procid: str, lines: bool):
    config = write_run(tmp_path / "run")
    result = command(
        "train",
        config,
        "actor.layout.tensor=2",
        "--dry-run",
        SLURM_PROCID=procid,
        SLURM_LOCALID=procid,
        **SRUN,
    )
    assert result.returncode == 0, result.stderr
    assert ("4 actor ranks on CPU" in result.stdout) == lines


def test_faults_are_one_line_each_without_traceback(tmp_path: Path):
    config = write_run(tmp_path / "run")
    result = command("train", config, "actor.layout.tensor=3", "algorithm.mini_batch_prompts=99")
    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("error: ") for line in lines), result.stderr


@pytest.mark.parametrize(("local", "speaks"), [("0", True), ("1", False)])
def test_of_outer_ranks_one_a_node_tells_the_faults(tmp_path: Path, local: str, speaks: bool):
    config = write_run(tmp_path / "run")
    launcher = {"RANK": local, "LOCAL_RANK": local, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    result = command("train", config, "actor.layout.pipeline=3", **launcher)
    assert result.returncode == 2
    assert bool(result.stderr) == speaks


def test_check_sync_refuses_what_it_cannot_check_before_anything_starts(tmp_path: Path):
    config = write_run(tmp_path / "run")
    external = ["rollout.server.placement=external", "rollout.server.urls=[http://127.0.0.1:9]"]
    result = command("check-sync", config, "algorithm.name=sft", "actor.layout.tensor=3")
    assert result.returncode == 2
    assert "error: algorithm.name = sft" in result.stderr
    assert "actor.layout.tensor" in result.stderr
    result = command("check-sync", config, *external, "--rejoin")
    assert result.returncode == 2
    assert result.stderr.startswith("error: rollout.server.placement = external: --rejoin")
    assert not (config.parent / "out").exists()


def test_an_unknown_key_names_its_neighbour(tmp_path: Path):
    result = command("train", write_run(tmp_path / "run"), "rollout.tempature=1")
    assert result.returncode == 2
    assert result.stderr == ("error: rollout.tempature: no such setting. Did you mean rollout.temperature?\n")


def test_doctor_on_an_install_without_torch_says_what_that_rules_out():
    hide = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "def find_spec(name, package=None):\n"
        "    gone = ('torch', 'megatron', 'vllm', 'transformers')\n"
        "    return None if name.partition('.')[0] in gone else real(name, package)\n"
        "importlib.util.find_spec = find_spec\n"
        "sys.argv = ['megatron-meds', 'doctor']\n"
        "from megatron_meds.cli.main import main\n"
        "main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", hide],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert "Rules out training, scoring and conversion" in result.stdout


def test_a_broken_library_is_a_line_of_doctor_s_not_a_traceback():
    from megatron_meds.cli.doctor import Part, examine

    _, state = examine(Part("json", ("none",), "nothing much", "raise ImportError('libfoo.so is gone')"))
    assert state == "broken: ImportError: libfoo.so is gone. Rules out nothing much"
