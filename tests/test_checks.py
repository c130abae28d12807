"""What is refused before anything starts: the key, what is wrong, what to change."""

import socket
from pathlib import Path
from typing import Any

import pytest

from megatron_meds import machine
from megatron_meds.checks import Job, check, find_faults
from megatron_meds.config import SettingsError, load
from tests.small_run import write_run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_run(tmp_path / "there")


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)


def faults(config: Path, *overrides: str, job: Job | None = None) -> list[str]:
    settings = load(config, overrides)
    return list(find_faults(settings, job or Job.own(settings)))


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: count)


def test_a_sound_run_passes(config: Path):
    check(load(config, ["actor.layout.tensor=2", "actor.layout.pipeline=2", "actor.layout.data=2"]))


def test_all_faults_are_raised_together(config: Path):
    with pytest.raises(SettingsError) as caught:
        check(load(config, ["actor.layout.tensor=3", "model.attention=te", "data.train=[]"]))
    keys = [line.split(":")[0].split(" ")[0] for line in caught.value.faults]
    assert set(keys) >= {"actor.layout.tensor", "model.attention", "data.train"}


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["actor.layout.tensor=8"], ["actor.layout.tensor = 8", "4 attention heads"]),
        (["actor.layout.pipeline=3"], ["actor.layout.pipeline = 3", "4 layers"]),
        (["actor.layout.pipeline=2", "actor.layout.virtual=4"], ["virtual = 4", "4 layers"]),
        (["actor.layout.virtual=2"], ["actor.layout.virtual = 2", "pipeline of 2 or more"]),
        (["actor.layout.sequence=true"], ["actor.layout.sequence", "tensor of 2 or more"]),
        (["rollout.samples_per_prompt=300"], ["rollout.server.max_num_seqs", "raise that"]),
        (["actor.layout.context=2"], ["actor.layout.context", "set it to 1"]),
        (["actor.device=cuda"], ["actor.device = cuda", "set it to cpu"]),
        (["model.attention=te"], ["model.attention = te", "set it to auto"]),
        (
            ["actor.layout.data=4", "data.prompts_per_step=2"],
            ["data.prompts_per_step = 2", "4 data-parallel replicas", "raise it to 4"],
        ),
        (["algorithm.mini_batch_prompts=9"], ["algorithm.mini_batch_prompts = 9", "prompts_per_step = 8"]),
        (
            ["algorithm.mini_batch_prompts=2", "actor.layout.data=4"],
            ["algorithm.mini_batch_prompts = 2", "4 data-parallel replicas"],
        ),
        (["rollout.samples_per_prompt=1"], ["rollout.samples_per_prompt = 1", "2 or more"]),
        (["data.train=[]"], ["data.train", "at least one"]),
        (["data.train.0.path=./gone.jsonl"], ["data.train.0.path = ", "gone.jsonl: no such file"]),
        (["data.train.0.fields.answer=box(solution)"], ["data.train.0.fields.answer", "last_box(column)"]),
        (["data.train.0.fields.answer=null"], ["data.train.0.fields.answer", "name the column"]),
        (["algorithm.name=sft"], ["data.train.0.fields.response", "sft"]),
        (["run.evaluate_every=2"], ["run.evaluate_every = 2", "data.evaluation"]),
        (["run.resume=/nowhere/at/all"], ["run.resume = /nowhere/at/all", "or auto"]),
        (["optimizer.min_lr=1"], ["optimizer.min_lr = 1.0", "above optimizer.lr"]),
        (["model.path=/nowhere"], ["model.path = /nowhere", "no such folder"]),
        (["model.weights=load"], ["model.path", "*.safetensors", "model.weights=random"]),
        (["rollout.max_tokens=500"], ["= 564", "512 positions"]),
        (["rollout.stop_token_ids=[151]"], ["rollout.stop_token_ids = [151]", "151 entries"]),
        (["rollout.server.max_model_len=100"], ["rollout.server.max_model_len = 100", "128"]),
        (["rollout.server.placement=external"], ["rollout.server.urls", "http://"]),
        (["rollout.server.urls=[http://x:1]"], ["rollout.server.urls", "placement=external"]),
        (["rollout.server.python=/no/python"], ["rollout.server.python = /no/python", "interpreter"]),
        (["weights.transport=nccl"], ["weights.transport = nccl", "shm"]),
        (["rollout.server.port=65535", "rollout.server.count=2"], ["rollout.server.port = 65535", "65536"]),
        (["reward.overlong.buffer=65"], ["reward.overlong.buffer = 65", "rollout.max_tokens = 64"]),
        (["reward.function=mine"], ["reward.function = 'mine'", "module:name"]),
        (["reward.function=no_such_module:f"], ["reward.function", "no module 'no_such_module'"]),
        (["verify.function=no_such_module:f"], ["verify.function", "no module 'no_such_module'"]),
        (["reward.function_replaces_outcome=true"], ["reward.function_replaces_outcome"]),
        (["reward.form.unclosed=-1"], ["reward.form.unclosed", "think_close"]),
        (["algorithm.name=rloo", "rollout.samples_per_prompt=1"], ["samples_per_prompt = 1", "rloo"]),
        (
            [
                "algorithm.name=reinforce_pp",
                "rollout.samples_per_prompt=1",
                "rollout.dynamic_sampling.enabled=true",
            ],
            ["rollout.dynamic_sampling.enabled", "group of one"],
        ),
        (["algorithm.name=rloo", "algorithm.scale_by_std=true"], ["algorithm.scale_by_std", "rloo"]),
        (["algorithm.gamma=0.9"], ["algorithm.gamma = 0.9", "reinforce_pp"]),
        (["algorithm.entropy_advantage.divisor=3"], ["algorithm.entropy_advantage", "grpo_entropy"]),
        (["algorithm.name=gspo", "algorithm.dual_clip=10"], ["algorithm.dual_clip = 10.0", "leave it null"]),
        (["algorithm.mismatch.cap=3"], ["algorithm.mismatch.cap = 3.0", "importance_weights=true"]),
        (["algorithm.lam=0.9"], ["algorithm.lam = 0.9", "ppo"]),
        (["critic.value_clip=1"], ["critic: dapo has none", "algorithm.name=ppo"]),
        (["algorithm.name=ppo", "critic.path=/nowhere"], ["critic.path = /nowhere", "*.safetensors"]),
        (
            ["algorithm.name=ppo", "critic.steps_before_policy=3"],
            ["steps_before_policy = 3", "run.steps = 3"],
        ),
        (["algorithm.name=ppo", "critic.optimizer.min_lr=1"], ["critic.optimizer.min_lr", "above critic."]),
        (["algorithm.kl.coefficient=0.1"], ["algorithm.kl.coefficient = 0.1", "set model.reference"]),
        (["algorithm.kl.term=reward"], ["algorithm.kl: without a coefficient"]),
        (["model.offload_reference=true"], ["model.offload_reference", "algorithm.kl.coefficient"]),
        (["model.reference=/nowhere"], ["model.reference = /nowhere", "*.safetensors"]),
        (["meds.enabled=true", "meds.alpha=0"], ["meds.alpha = 0.0", "meds.target=none"]),
        (["meds.enabled=true", "meds.beta=0"], ["meds.beta = 0.0", "meds.target=none"]),
        (["meds.enabled=true", "meds.backend=cuml"], ["meds.backend = cuml", "auto or sklearn"]),
        (["meds.enabled=true", "meds.feature_function=f"], ["meds.feature_function = 'f'", "module:name"]),
        (
            ["rollout.dynamic_sampling.keep_all_wrong=true", "meds.enabled=true"],
            ["keep_all_wrong", "dynamic_sampling.enabled"],
        ),
        (
            [
                "rollout.dynamic_sampling={enabled: true, keep_all_wrong: true}",
                "meds={enabled: true, target: right}",
            ],
            ["meds.target = right", "wrong or both"],
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name_with_a_remedy(
    config: Path, overrides: list[str], parts: list[str]
):
    found = faults(config, *overrides)
    assert len(found) == 1, found
    assert all(part in found[0] for part in parts), found[0]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, None),
        ({"num_hidden_layers": 2, "hidden_size": 32}, None),
        ({"vocab_size": 152}, "152 vocabulary entries, the policy 151"),
        ({"max_position_embeddings": 100}, "100 positions"),
        ({"model_type": "mamba"}, "mamba"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, "3 attention heads"),
    ],
)
@pytest.mark.parametrize(
    ("key", "use"),
    [("model.reference", "algorithm.kl.coefficient=0.1"), ("critic.path", "algorithm.name=ppo")],
)
def test_reference_and_critic_may_be_other_models_that_read_the_same_tokens_and_are_cut_alike(
    config: Path, changes: dict[str, Any], part: str | None, key: str, use: str, tmp_path: Path
):
    other = write_run(tmp_path / "other", **changes).parent / "model"
    (other / "model.safetensors").write_bytes(b"")
    found = faults(config, f"{key}={other}", use, "actor.layout.tensor=2")
    if part is None:
        assert found == []
    else:
        (fault,) = found
        assert fault.startswith(f"{key} = {other}: ") and part in fault


def test_ppo_takes_one_sample_a_prompt_discounts_and_a_lambda(config: Path):
    ppo = ["algorithm={name: ppo, gamma: 0.99, lam: 0.95}", "rollout.samples_per_prompt=1"]
    assert faults(config, *ppo, "critic.steps_before_policy=2", "critic.value_clip=.inf") == []


def test_k1_is_a_reward_and_no_loss(config: Path):
    (config.parent / "model/model.safetensors").write_bytes(b"")
    k1 = ["model.weights=load", "algorithm.kl={coefficient: 0.1, estimator: k1}"]
    (found,) = faults(config, *k1)
    assert found.startswith("algorithm.kl.estimator = k1") and "algorithm.kl.term=reward" in found
    assert faults(config, *k1, "algorithm.kl.term=reward") == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm.kl.coefficient=-0.1"], "algorithm.kl.coefficient = -0.1"),
        (["algorithm.entropy_bonus=-0.1"], "algorithm.entropy_bonus = -0.1"),
        (["algorithm.mismatch.cap=0"], "algorithm.mismatch.cap = 0"),
        (["algorithm.entropy_advantage.divisor=1"], "algorithm.entropy_advantage.divisor = 1"),
    ],
)
def test_a_coefficient_out_of_bounds_is_refused_by_its_key(config: Path, overrides: list[str], key: str):
    with pytest.raises(SettingsError, match=key):
        load(config, overrides)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("algorithm.kl.coefficient=0.1", "algorithm.kl.coefficient = 0.1"),
        ("model.reference=model", "model.reference"),
        ("algorithm.entropy_bonus=0.1", "algorithm.entropy_bonus = 0.1"),
        ("algorithm.mismatch.importance_weights=true", "algorithm.mismatch"),
    ],
)
def test_supervised_training_has_no_terms_of_a_policy(config: Path, override: str, key: str):
    supervised = ["algorithm.name=sft", "data.train.0.fields={response: trace, answer: null}"]
    (found,) = faults(config, *supervised, override)
    assert found.startswith(key) and "sft" in found


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ({"model_type": "mamba"}, "model_type = 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_by_its_key(
    tmp_path: Path, model: dict[str, Any], part: str
):
    (found,) = faults(write_run(tmp_path / "run", **model))
    assert found.startswith(f"model.path = {tmp_path / 'run/model'}")
    assert part in found


def test_key_value_heads_and_tensor_ranks_must_divide_one_another(tmp_path: Path):
    config = write_run(tmp_path / "run", num_attention_heads=12, num_key_value_heads=4)
    (found,) = faults(config, "actor.layout.tensor=6")
    assert "actor.layout.tensor = 6" in found
    assert "key/value heads" in found
    assert faults(config, "actor.layout.tensor=12") == []


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path):
    config = write_run(tmp_path / "run")
    (config.parent / "model/config.json").unlink()
    assert "config.json" in faults(config)[0]


def test_a_port_in_use_is_refused(config: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        (found,) = faults(config, f"rollout.server.port={port}")
        assert f"rollout.server.port = {port}" in found
        assert "choose another" in found
        ranks = Job(world_size=1, ranks_per_node=1, launcher=False)
        assert faults(config, f"rollout.server.port={port}", job=ranks) == []
    assert faults(config, f"rollout.server.port={port}") == []


def test_every_server_s_port_is_tried(config: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        found = faults(config, f"rollout.server.port={port - 1}", "rollout.server.count=2")
        assert any(f"127.0.0.1:{port} " in line for line in found)


def test_ranks_of_an_outer_launcher_must_hold_whole_copies_of_the_model(config: Path):
    job = Job(world_size=6, ranks_per_node=6, launcher=False)
    (found,) = faults(config, "actor.layout.tensor=4", "actor.layout.data=auto", job=job)
    assert "6 ranks" in found
    (found,) = faults(config, "actor.layout.tensor=2", "actor.layout.data=2", job=job)
    assert found.startswith("actor.layout.data = 2")
    assert "set it to 3 or auto" in found
    assert faults(config, "actor.layout.tensor=2", job=job) == []


def test_a_run_that_must_start_afresh_leaves_an_old_one_alone(config: Path):
    (config.parent / "out").mkdir()
    assert faults(config, "run.resume=never") == []
    (config.parent / "out/metrics.jsonl").write_text("{}")
    (found,) = faults(config, "run.resume=never")
    assert "already holds a run" in found
    assert faults(config, "run.resume=auto") == []


def test_external_servers_are_urls_each_once_and_near_for_shared_memory(config: Path):
    external = "rollout.server.placement=external"
    (found,) = faults(config, external, "rollout.server.urls=[localhost]")
    assert "http://host:port" in found
    (found,) = faults(config, external, "rollout.server.urls=[http://localhost:1, http://localhost:1]")
    assert "listed twice" in found
    (found,) = faults(config, external, "rollout.server.urls=[http://10.0.0.5:8000]")
    assert "weights.transport" in found
    assert faults(config, external, "rollout.server.urls=[http://127.0.0.1:1, http://127.0.0.1:2]") == []


def test_supervised_training_needs_no_servers_and_no_answers(config: Path):
    supervised = ["algorithm.name=sft", "data.train.0.fields={response: trace, answer: null}"]
    assert faults(config, *supervised, "rollout.server.placement=external") == []


def test_a_user_s_function_may_lie_in_the_working_directory(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_rewards.py").write_text("def shorter(trajectories): ...")
    monkeypatch.chdir(tmp_path)
    assert faults(config, "reward.function=my_rewards:shorter") == []


def test_actor_and_servers_must_fit_the_gpus(config: Path, monkeypatch: pytest.MonkeyPatch):
    with_gpus(monkeypatch, 4)
    cuda = "actor.device=cuda"
    assert faults(config, cuda, "actor.layout.tensor=2", "rollout.server.count=2") == []
    (found,) = faults(config, cuda, "actor.layout.tensor=2", "rollout.server.count=3")
    assert "need 5, there are 4" in found
    (found,) = faults(config, cuda, "actor.layout.tensor=2", "rollout.server.devices=[1]")
    assert "GPUs [1] are the actor's" in found
    (found,) = faults(config, cuda, "rollout.server.devices=[7]")
    assert "GPUs [7] are not here" in found
    (found,) = faults(config, cuda, "rollout.server.devices=[2, 3]")
    assert "need 1 different ones" in found
    assert "weights.transport = shm" in faults(config, cuda, "weights.transport=shm")[0]


def test_auto_takes_a_gpu_where_one_is(config: Path, monkeypatch: pytest.MonkeyPatch):
    with_gpus(monkeypatch, 2)
    assert faults(config, "actor.device=auto", "model.attention=te") == []
    with_gpus(monkeypatch, 0)
    assert faults(config, "actor.device=auto", "model.attention=te") != []
