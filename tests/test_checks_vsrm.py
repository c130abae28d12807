"""Step rewards that cannot work are refused before anything starts."""

from pathlib import Path

import pytest

from megatron_meds.arithmetic import server_tokens
from megatron_meds.checks import Job, find_faults
from megatron_meds.config import load
from tests.small_run import write_run

ON = "vsrm.enabled=true"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_run(tmp_path / "there")


def faults(config: Path, *overrides: str) -> list[str]:
    settings = load(config, overrides)
    return [f for f in find_faults(settings, Job.own(settings)) if "safetensors" not in f]


@pytest.mark.parametrize("name", ["reinforce_pp", "grpo", "dapo", "gspo", "rloo"])
def test_step_rewards_go_with_every_algorithm_that_learns_from_rewards(config, name):
    assert faults(config, ON, f"algorithm.name={name}") == []


def test_they_go_with_the_memory_of_mistakes(config):
    assert faults(config, ON, "meds.enabled=true") == []


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["vsrm.skip=3"], ["vsrm", "vsrm.enabled=true"]),
        ([ON, "algorithm.name=sft"], ["vsrm.enabled", "sft"]),
        ([ON, "vsrm.candidates=300"], ["vsrm.candidates = 300", "max_num_seqs = 256"]),
        ([ON, "vsrm.min_gain=6"], ["vsrm.min_gain = 6", "vsrm.candidates = 5"]),
        ([ON, "rollout.server.extra_args=[--no-enable-prefix-caching]"], ["extra_args", "drop it"]),
        ([ON, "reward.form={think_close: </done>, unclosed: -1}"], ["vsrm.close_tag", "</done>"]),
        ([ON, "rollout.server.max_model_len=140"], ["max_model_len = 140", "168"]),
    ],
)
def test_what_cannot_work_is_refused(config, overrides, parts):
    found = [f for f in faults(config, *overrides) if all(part in f for part in parts)]
    assert len(found) == 1, faults(config, *overrides)


def test_servers_make_room_for_continuations_as_far_as_the_model_reaches(config):
    assert server_tokens(load(config), 512) == 128
    settings = load(config, [ON, "vsrm.max_tokens=40"])
    assert server_tokens(settings, 512) == 128 + 8 + 40
    assert server_tokens(settings, 150) == 150
    assert server_tokens(load(config, [ON, "rollout.server.max_model_len=140"]), 512) == 140


def test_presets_choose_what_is_left_open(config):
    sound, released = (load(config, [ON, f"vsrm.preset={p}"]).vsrm for p in ("sound", "released"))
    assert (sound.rules().match, sound.last_prefix, sound.rewarded_token, sound.on_outcome) == (
        "word", "close", "last", "add",
    )  # fmt: skip
    assert (released.rules().match, released.last_prefix, released.rewarded_token, released.on_outcome) == (
        "substring", "opening", "first", "overwrite",
    )  # fmt: skip
    mixed = load(
        config, ["vsrm.preset=released", "vsrm.match=word", "vsrm.place=last", "vsrm.markers=[Step]"]
    ).vsrm
    assert mixed.rules().match == "word" and mixed.rules().decimal_ends
    assert mixed.rewarded_token == "last" and mixed.rules().markers == ("Step",)
