"""The CPU form of the GPU check, as its user runs it, and the pure parts of its rows."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from tests.tiny import VOCABULARY
from tools.gpu_checks.bench import SIZES, make_trajectories
from tools.gpu_checks.findings import Line, as_markdown, as_text
from tools.gpu_checks.speed import forward_flops

# What a bare machine with a GPU has not: importing these fails in the run.
ABSENT = ("sklearn", "rich", "vllm", "pyarrow", "datasets", "math_verify", "tensorboard")
RUN = """
import runpy, sys
sys.modules.update(dict.fromkeys({absent!r}))
runpy.run_path("tools/gpu_check.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """(exit code, rows by name, Markdown) of one run on the CPU."""
    folder = tmp_path_factory.mktemp("gpu_check")
    files = ["--json", str(folder / "table.json"), "--markdown", str(folder / "table.md")]
    command = [sys.executable, "-c", RUN.format(absent=ABSENT), "--device", "cpu", "--size", "tiny", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (folder / "table.json").exists(), done.stdout + done.stderr
    rows = json.loads((folder / "table.json").read_text())["rows"]
    return done, {row["check"]: row for row in rows}, (folder / "table.md").read_text()


def test_every_row_runs_on_the_cpu_without_what_a_bare_machine_lacks(table):
    done, rows, markdown = table
    results = {name: row["status"] for name, row in rows.items()}
    assert "FAIL" not in results.values(), done.stdout + done.stderr
    assert done.returncode == 0
    optional = {name for name in rows if name.startswith(("transformer-engine", "vLLM", "cuML"))}
    assert {name for name, status in results.items() if status == "not here"} == optional
    assert "| parity, bf16 | pass |" in markdown


def test_its_numbers_are_as_near_as_the_precision_allows(table):
    _, rows, _ = table
    for name in ("logprob", "entropy", "gradient"):
        assert rows["parity, fp32"]["numbers"][name] < 1e-4
    assert 1e-4 < rows["parity, bf16"]["numbers"]["logprob"] < 0.05
    assert rows["memory over steps"]["numbers"]["spread"] == 0
    assert 0 < rows["update throughput"]["numbers"]["mfu"] < 1


def test_flops_are_those_that_torch_counts(tiny):
    model = AutoModelForCausalLM.from_pretrained(
        tiny("qwen3_tied"), dtype=torch.float32, attn_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.tensor([[3]] * 5))
    trajectories = make_trajectories([(1, 1)] * 5, VOCABULARY, np.random.default_rng(0))
    # transformers counts the rotary angles too
    assert forward_flops(SIZES["tiny"], trajectories) == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_tables_keep_every_line_and_its_columns():
    lines = [
        Line("one", "pass", "1e-3 | x", "1e-2", 0.25, {}),
        Line("a longer name", "not here", "needs a GPU", "", 0.0, {}),
    ]
    text = as_text(lines).splitlines()
    assert [line.index("pass" if "pass" in line else "not here") for line in text[1:]] == [15, 15]
    assert as_markdown(lines, "here").count("\n|") == 4
    assert "1e-3 \\| x" in as_markdown(lines, "here")
