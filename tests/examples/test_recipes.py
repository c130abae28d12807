"""The papers' recipes: every one is a run that could start on its nodes, with the settings it names."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_meds.checks import Job, find_faults
from megatron_meds.config import Settings, load

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
MODELS = {
    "qwen2.5-math-7b": ("Qwen2.5-Math-7B", 1),
    "qwen3-1.7b": ("Qwen3-1.7B", 2),
    "qwen3-8b": ("Qwen3-8B", 4),
    "r1-distill-qwen-1.5b": ("DeepSeek-R1-Distill-Qwen-1.5B", 1),
    "deepscaler-1.5b": ("DeepScaleR-1.5B-Preview", 1),
    "r1-distill-qwen-7b": ("DeepSeek-R1-Distill-Qwen-7B", 2),
}
"""File -> (Hugging Face name, nodes)."""
ACTORS = 4
"""GPUs of a node that the actor has."""
RUNS = sorted(
    path.relative_to(RECIPES).with_suffix("").as_posix()
    for path in RECIPES.glob("*/*.yaml")
    if path.stem != "base" and path.stem not in MODELS
)


def model_of(recipe: str) -> str:
    return max((m for m in MODELS if recipe.partition("/")[2].startswith(f"{m}-")), key=len)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Per model a folder with its config.json and empty files in place of weights and tokenizer."""
    found = {}
    for name, (title, _) in MODELS.items():
        folder = found[name] = tmp_path_factory.mktemp("models") / title
        folder.mkdir()
        (folder / "config.json").write_text((Path(__file__).parent / "models" / f"{title}.json").read_text())
        for empty in ("model.safetensors", "tokenizer.json"):
            (folder / empty).touch()
    return found


def settings_of(recipe: str, folders: dict[str, Path]) -> Settings:
    return load(RECIPES / f"{recipe}.yaml", [f"model.path={folders[model_of(recipe)]}"])


def test_every_model_has_every_method():
    papers = {"meds": ["dapo", "grpo", "grpo-entropy", "meds"]}
    papers["vsrm"] = ["ppo", "ppo-vsrm", "reinforce-pp", "reinforce-pp-vsrm"]
    folder_of = {m: "vsrm" if m.startswith(("r1", "deepscaler")) else "meds" for m in MODELS}
    assert sorted(f"{folder_of[m]}/{m}-{k}" for m in MODELS for k in papers[folder_of[m]]) == RUNS


@pytest.mark.parametrize("recipe", RUNS)
def test_a_recipe_has_no_fault_on_its_nodes(recipe, folders):
    nodes = MODELS[model_of(recipe)][1]
    job = Job(world_size=ACTORS * nodes, ranks_per_node=ACTORS, launcher=False)
    faults = [f for f in find_faults(settings_of(recipe, folders), job) if "no NVIDIA GPU" not in f]
    assert faults == []


@pytest.mark.parametrize("recipe", [r for r in RUNS if r.startswith("meds/")])
def test_the_meds_papers_settings(recipe, folders):
    s = settings_of(recipe, folders)
    assert (s.optimizer.lr, s.optimizer.warmup_steps, s.optimizer.schedule) == (1e-6, 10, "constant")
    assert (s.optimizer.weight_decay, s.optimizer.clip_grad) == (0.1, 1.0)
    assert (s.data.prompts_per_step, s.rollout.samples_per_prompt) == (512, 16)
    assert (s.algorithm.mini_batch_prompts, s.data.max_prompt_tokens, s.rollout.temperature) == (
        16,
        1024,
        1.0,
    )
    assert s.rollout.max_tokens == (3072 if "2.5" in recipe else 7168)
    assert s.meds.enabled == recipe.endswith("-meds")
    if s.meds.enabled:
        assert (s.meds.alpha, s.meds.cap, s.meds.last) == (
            (0.02, 0.04, 14) if "8b" in recipe else (0.1, 0.2, 14)
        )
    if "grpo" in recipe:
        assert (s.algorithm.kl.coefficient, s.algorithm.kl.estimator, s.algorithm.kl.term) == (
            0.001,
            "k3",
            "loss",
        )
        assert (s.algorithm.clip_high, s.algorithm.aggregation) == (0.2, "seq-mean-token-mean")
        assert not s.rollout.dynamic_sampling.enabled and s.reward.overlong.buffer == 0
    else:
        assert (s.algorithm.clip_low, s.algorithm.clip_high, s.algorithm.dual_clip) == (0.2, 0.28, 10.0)
        assert s.rollout.dynamic_sampling.enabled and s.reward.overlong.buffer == 512


@pytest.mark.parametrize("recipe", [r for r in RUNS if r.startswith("vsrm/")])
def test_the_vsrm_papers_settings(recipe, folders):
    s = settings_of(recipe, folders)
    assert (s.optimizer.lr, s.data.prompts_per_step, s.algorithm.mini_batch_prompts) == (1e-6, 256, 128)
    assert (s.data.max_prompt_tokens, s.rollout.max_tokens, s.rollout.temperature) == (768, 7424, 0.6)
    assert (s.reward.form.no_box, s.reward.form.unclosed, s.rollout.samples_per_prompt) == (-9.5, -10.0, 1)
    assert s.vsrm.enabled == recipe.endswith("-vsrm")
    if s.vsrm.enabled:
        v = s.vsrm
        assert (v.preset, v.skip, v.gap, v.candidates, v.max_tokens) == ("released", 1000, 400, 5, 768)
        assert (v.temperature, v.top_p, v.gamma, v.window) == (0.6, 0.95, 0.7, 4)
    if "-ppo" in recipe:
        assert (s.critic.optimizer.lr, s.critic.value_clip, s.algorithm.dual_clip) == (1e-5, 0.5, 3.0)
        assert (s.algorithm.gamma, s.algorithm.lam) == (1.0, 1.0)


def test_the_ranks_shares_of_every_model_make_the_whole_of_it(folders):
    from transformers import AutoConfig, AutoModelForCausalLM

    jobs = []
    for name, (_, nodes) in MODELS.items():
        recipe = next(r for r in RUNS if model_of(r) == name)
        layout = settings_of(recipe, folders).actor.layout.model_dump()
        world = ACTORS * nodes
        jobs += [
            {"world": world, "rank": rank, "layout": layout, "folder": str(folders[name])}
            for rank in (0, world - 1)
        ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.examples.shapes_on_meta", json.dumps(jobs)],
        capture_output=True, text=True, cwd=ROOT, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for job, found in zip(jobs, json.loads(done.stdout.splitlines()[-1]), strict=True):
        config = AutoConfig.from_pretrained(job["folder"])
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
        everywhere = sum(p.numel() for n, p in whole.named_parameters() if "norm" in n)
        tensor = job["layout"]["tensor"]
        assert found["count"] * tensor - everywhere * (tensor - 1) == sum(
            p.numel() for p in whole.parameters()
        )
        assert found["replicas"] * tensor == job["world"]


def test_the_readme_has_a_command_for_every_recipe():
    text = (RECIPES / "README.md").read_text()
    assert (
        sorted(set(re.findall(r"`((?:meds|vsrm)/[\w.-]+)\.yaml`", text)) - {"meds/base", "vsrm/base"}) == RUNS
    )
