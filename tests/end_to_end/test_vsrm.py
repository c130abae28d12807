"""A run with MEDS and VSRM on the tiny reasoner, with real ranks and a real vLLM server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_meds.config import load
from megatron_meds.vsrm import split_steps, step_rewards

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "tiny_reasoner" / "meds_vsrm.yaml"
OVERRIDES = (
    "run.steps=2",
    "run.export_at_end=false",
    "run.evaluate_at_start=false",
    "run.evaluate_at_end=false",
    "data.prompts_per_step=8",
    "algorithm.mini_batch_prompts=8",
    "rollout.samples_per_prompt=4",
    "rollout.dynamic_sampling.enabled=false",
    "rollout.server.max_num_seqs=64",
    "vsrm.share=0.75",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[list[dict[str, float]], list[list[dict]]]:
    """The metrics and the sampled trajectories of two steps."""
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("runs") / "both"
    command = [sys.executable, "-m", "megatron_meds.cli.main", "train", str(CONFIG), f"run.folder={folder}"]
    done = subprocess.run(
        [*command, *OVERRIDES], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = sorted((folder / "trajectories").glob("step_*.parquet"))
    return metrics, [pyarrow.parquet.read_table(file).to_pylist() for file in files]


def measured(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["step_offsets"] is not None]


def test_steps_earn_what_their_recorded_accuracies_say(run):
    metrics, steps = run
    settings = load(CONFIG).vsrm
    tokenizer = AutoTokenizer.from_pretrained(CONFIG.parent / "model")
    for row, rows in zip(metrics, steps, strict=True):
        found = measured(rows)
        assert 8 < len(found) < 32  # three quarters were chosen
        for one in found:
            accuracies, bounds = one["step_accuracies"], one["step_bounds"]
            assert {round(a * settings.candidates, 6) % 1 for a in accuracies} == {0.0}
            expected = step_rewards(accuracies, settings.gamma, settings.window, settings.least_change)
            assert one["step_rewards"] == pytest.approx(expected.tolist())
            assert one["reward/steps"] == pytest.approx(sum(one["step_rewards"]))
            assert set(one["step_offsets"]) <= set(split_steps(one["text"], settings.rules()))
            for offset, bound in zip(one["step_offsets"], bounds, strict=False):
                assert tokenizer.decode(one["response_ids"][:bound]) == one["text"][:offset]
        assert any(abs(r) > 0 for one in found for r in one["step_rewards"])
        assert row["reward/steps"] == pytest.approx(sum(r["reward/steps"] for r in rows) / len(rows))


def test_prefixes_were_continued_by_the_weights_that_sampled_them(run):
    _, steps = run
    versions = [{(r["weight_version"], r["step_weight_version"]) for r in measured(rows)} for rows in steps]
    assert versions == [{(1, 1)}, {(2, 2)}]


def test_all_sources_of_reward_are_logged_by_name_and_what_was_asked_is_counted(run):
    metrics, _ = run
    for row in metrics:
        assert {
            "reward/outcome",
            "reward/overlong",
            "reward/meds",
            "reward/steps",
            "seconds/steps",
        } <= row.keys()
        assert row["vsrm/prefixes_asked"] > 0 and row["vsrm/continuation_tokens"] > row["vsrm/prefixes_asked"]
        assert row["vsrm/cached_share"] > 0.3
        assert row["vsrm/accuracy_last"] > row["vsrm/accuracy_first"]
