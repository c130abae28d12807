"""The plan against what Megatron-Core builds and what is measured, and what it says does not fit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_meds.actor.settings import LayoutSettings
from megatron_meds.actor.shape import read_model_config
from megatron_meds.cli.main import app
from megatron_meds.plan.memory import layer_activations, model_states
from megatron_meds.plan.parameters import stage_parameters, whole_parameters

ROOT = Path(__file__).parents[2]
LAYOUTS = [
    {},
    {"tensor": 2, "sequence": True},
    {"tensor": 4},
    {"pipeline": 2},
    {"pipeline": 2, "virtual": 2},
    {"pipeline": 2, "stages": "Ett|ttL"},
    {"pipeline": 4, "tensor": 2},
]


def test_every_ranks_parameters_are_those_that_are_built(tiny):
    jobs = []
    for kind in ("qwen2", "qwen3", "qwen3_tied"):
        folder = tiny(kind)
        for layout in LAYOUTS:
            size = layout.get("tensor", 1) * layout.get("pipeline", 1)
            jobs += [
                {"world": 8, "rank": rank, "layout": layout, "folder": str(folder)}
                for rank in range(0, 8, max(1, 8 // size))
            ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.examples.shapes_on_meta", json.dumps(jobs)],
        capture_output=True, text=True, cwd=ROOT, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for job, found in zip(jobs, json.loads(done.stdout.splitlines()[-1]), strict=True):
        stages = stage_parameters(read_model_config(Path(job["folder"])), LayoutSettings(**job["layout"]))
        assert found["count"] == stages[found["pipeline"]].total, job


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}], ids=["tp2-dp2", "pp2-dp2"])
def test_weights_gradients_and_optimizer_are_the_bytes_that_are_there(ranks, tiny, layout, distributed):
    folder = tiny("qwen3")
    found = ranks(4).run(
        "tests.distributed.bodies_plan:states", layout=layout, folder=folder, distributed=distributed
    )
    shape, cut = read_model_config(folder), LayoutSettings(**layout)
    for measured in found:
        own = stage_parameters(shape, cut)[measured["stage"]]
        expected = model_states(own.total, 2, bf16=False, distributed=distributed)
        assert measured["weights"] == expected["weights"]
        # buckets are filled up to multiples of what the replicas share
        assert measured["gradients"] == pytest.approx(expected["gradients"], rel=0.02)
        assert measured["optimizer"] == pytest.approx(expected["optimizer"], rel=0.02)


def test_the_unfused_layers_of_the_cpu_keep_up_to_twice_what_is_counted_for_fused_ones(ranks, tiny):
    folder = tiny("qwen3")
    found = ranks(2).run(
        "tests.distributed.bodies_plan:kept_by_a_layer", layout={}, folder=folder, tokens=512
    )
    shape = read_model_config(folder)
    expected = layer_activations(shape, 512, 1, False, "none", bf16=False)
    assert all(1.0 < r["bytes"] / expected < 2.0 for r in found)


def models(tmp_path, title):
    folder = tmp_path / title
    folder.mkdir()
    text = (ROOT / "tests" / "examples" / "models" / f"{title}.json").read_text()
    (folder / "config.json").write_text(text)
    return folder


def test_the_size_of_known_models(tmp_path):
    sizes = {"Qwen3-1.7B": 1.72e9, "Qwen3-8B": 8.19e9, "Qwen2.5-Math-7B": 7.62e9}
    for title, size in sizes.items():
        assert whole_parameters(read_model_config(models(tmp_path, title))) == pytest.approx(size, rel=0.002)


def plan(*words):
    return CliRunner().invoke(app, ["plan", *map(str, words)], catch_exceptions=False)


def test_a_plan_says_what_fits_and_what_to_change(tmp_path):
    recipe = ROOT / "examples" / "recipes" / "meds" / "qwen3-8b-meds.yaml"
    words = [recipe, f"model.path={models(tmp_path, 'Qwen3-8B')}", "--nodes", 4, "--ranks-per-node", 4]
    found = plan(*words)
    assert found.exit_code == 0 and "does not fit" not in found.output
    assert all(
        part in found.output for part in ("optimizer", "activations", "KV cache", "billion tokens a day")
    )
    small = ["actor.layout={tensor: 1, sequence: false}", "--gpu", "a100"]
    found = plan(*words, *small)
    assert found.exit_code == 1 and "does not fit: an actor GPU needs" in found.output
    assert "set actor.recompute=full" in " ".join(found.output.split())
    found = plan(*words[:2], "actor.layout={tensor: 1, sequence: false, data: 1}", "--gpu", "h100")
    assert found.exit_code == 1 and "a larger actor.layout.tensor" in " ".join(found.output.split())


def test_more_cards_and_a_faster_one_take_less_time(tmp_path):
    recipe = ROOT / "examples" / "recipes" / "vsrm" / "r1-distill-qwen-7b-ppo-vsrm.yaml"
    words = [recipe, f"model.path={models(tmp_path, 'DeepSeek-R1-Distill-Qwen-7B')}"]

    def a_day(*more):
        output = plan(*words, *more).output
        return float(output.split(" billion tokens a day")[0].split()[-1])

    base = a_day("--nodes", 2, "--ranks-per-node", 4)
    assert a_day("--nodes", 2, "--ranks-per-node", 4, "--gpu", "h200") > base
    assert a_day("--nodes", 4, "--ranks-per-node", 4, "actor.layout.data=4") > 1.5 * base
    assert a_day("--nodes", 2, "--ranks-per-node", 4, "vsrm.share=0.25") > base
