"""Settings: what is read, what is refused and how the refusal reads."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron_meds.config import Settings, SettingsError, dump, keys, load
from tests.small_run import write_run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_run(tmp_path / "there")


def faults(config: Path, *overrides: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(config, overrides)
    return caught.value.faults


def test_yaml_lies_over_typed_defaults(config: Path):
    settings = load(config)
    assert settings.run.steps == 3
    assert settings.rollout.samples_per_prompt == 8


def test_overrides_lie_over_the_yaml(config: Path):
    settings = load(config, ["run.steps=7", "rollout.server.cpu_cores=0-1", "run.keep_last=null"])
    assert (settings.run.steps, settings.rollout.server.cpu_cores, settings.run.keep_last) == (7, "0-1", None)


def test_overrides_reach_into_lists(config: Path):
    assert load(config, ["data.train.0.limit=5"]).data.train[0].limit == 5
    assert "data.train has entries 0 to 0" in faults(config, "data.train.1.limit=5")[0]


def test_overrides_replace_whole_sections_and_lists(config: Path):
    settings = load(config, ["data.evaluation=[{path: org/name, limit: 2}]", "rollout={max_tokens: 9}"])
    assert settings.data.evaluation[0].path == "org/name"
    assert settings.rollout.max_tokens == 9


def test_numbers_in_scientific_notation_are_numbers(config: Path):
    assert load(config, ["optimizer.lr=1e-4"]).optimizer.lr == 1e-4


def test_an_empty_section_is_its_defaults(tmp_path: Path):
    config = write_run(tmp_path / "x", {"rollout": None})
    assert load(config).rollout.samples_per_prompt == 8


def test_paths_in_the_yaml_count_from_its_folder(
    config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    settings = load(config)
    assert settings.model.path == config.parent / "model"
    assert settings.run.folder == config.parent / "out"
    assert settings.data.train[0].path == str(config.parent / "problems.jsonl")


def test_paths_in_overrides_count_from_the_working_directory(
    config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    settings = load(config, ["model.path=other", "data.train.0.path=./x.jsonl", "run.resume=out/step_3"])
    assert settings.model.path == tmp_path / "other"
    assert settings.data.train[0].path == str(tmp_path / "x.jsonl")
    assert settings.run.resume == tmp_path / "out/step_3"


def test_words_are_not_taken_for_paths(config: Path):
    assert load(config, ["run.resume=never"]).run.resume == "never"
    assert load(config, ["data.train.0.path=openai/gsm8k"]).data.train[0].path == "openai/gsm8k"


def test_a_run_is_named_after_its_file_and_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = write_run(tmp_path / "x", {"run": {}})
    monkeypatch.chdir(tmp_path)
    assert load(config).run.name == "run"
    assert load(config, ["run.name=other"]).run.folder == tmp_path / "runs/other"


def test_dumped_settings_load_as_the_same_settings(config: Path, tmp_path: Path):
    settings = load(
        config, ["rollout.server.devices=[1, 2]", "optimizer.lr=3e-7", "algorithm.dual_clip=.inf"]
    )
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump(settings))
    assert load(copy) == settings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.tempature=1", "rollout.tempature: no such setting. Did you mean rollout.temperature?"),
        ("kv_cache_gib=1", "kv_cache_gib: no such setting. Did you mean rollout.server.kv_cache_gib?"),
        ("actor.layot.tensor=2", "actor.layot: no such setting. Did you mean actor.layout?"),
        ("data.train.0.pth=x", "data.train.0.pth: no such setting. Did you mean data.train.0.path?"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_one_named(config: Path, override: str, message: str):
    assert faults(config, override) == [message]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rollout.samples_per_prompt=0", ["rollout.samples_per_prompt = 0", "greater than or equal to 1"]),
        ("actor.layout.data=many", ["actor.layout.data = 'many'", "integer", "or should be 'auto'"]),
        ("weights.transport=rdma", ["weights.transport = 'rdma'", "'shm'"]),
        ("rollout.top_p=0.9", ["rollout.top_p", "top_p = 1"]),
        ("rollout.top_k=50", ["rollout.top_k", "top_k = -1"]),
        ("run.name=12", ["run.name = 12", "put the number in quotes"]),
        ("run.name=a/b", ["run.name = 'a/b'"]),
        ("rollout=4", ["rollout = 4", "section"]),
        ("run.steps.x=3", ["run.steps is a value"]),
        ("run.steps", ["section.setting=value"]),
        ("rollout.server.urls=[", ["not valid YAML"]),
        ("model.path=null", ["model.path = None"]),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_what_it_should_be(
    config: Path, override: str, parts: list[str]
):
    (line,) = faults(config, override)
    assert "\n" not in line
    assert all(part in line for part in parts), line


def test_all_faults_are_told_together(config: Path):
    assert len(faults(config, "run.steps=0", "run.stps=1", "rollout.top_p=0.5")) == 3


def test_a_setting_without_default_must_be_given(tmp_path: Path):
    config = write_run(tmp_path / "x", {"model": {}})
    assert faults(config) == ["model.path: must be set, it has no default"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [", "line 1"),
        ("run:\n  steps: 1\n  steps: 2\n", "'steps' is given twice"),
        ("- 1\n", "holds a list"),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused(tmp_path: Path, text: str, part: str):
    config = tmp_path / "bad.yaml"
    config.write_text(text)
    assert part in faults(config)[0]


def test_a_missing_file_is_named(tmp_path: Path):
    assert str(tmp_path / "none.yaml") in faults(tmp_path / "none.yaml")[0]


def test_settings_cannot_be_changed(config: Path):
    with pytest.raises(ValueError, match="frozen"):
        load(config).run.steps = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_every_setting_is_described():
    def undescribed(section: type, prefix: str = ""):
        for name, field in section.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                yield from undescribed(field.annotation, f"{prefix}{name}.")
            elif not field.description and "Settings" not in str(field.annotation):
                yield prefix + name

    assert [key for key in undescribed(Settings) if not key.endswith(("fields", "template"))] == []


@hypothesis_settings(deadline=None)
@given(st.sampled_from(sorted(k for k in keys() if "[]" not in k and "." in k)), st.integers(0, 30))
def test_a_slip_of_the_pen_in_any_key_is_refused_by_its_full_name(key: str, place: int):
    from megatron_meds.config import parse

    wrong = (
        key + "x"
        if place >= len(key.rpartition(".")[2])
        else key[: len(key) - place] + "q" + key[len(key) - place :]
    )
    *parents, leaf = wrong.split(".")
    tree: dict = {}
    node = tree
    for part in parents:
        node = node.setdefault(part, {})
    node[leaf] = 1
    with pytest.raises(SettingsError) as caught:
        parse({"model": {"path": "x"}, **tree})
    assert any(line.startswith(f"{wrong}: no such setting") for line in caught.value.faults)


def test_a_file_extends_another_whose_paths_count_from_its_own_folder(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.yaml").write_text(
        "model: {path: m}\noptimizer: {lr: 1.0e-5, warmup_steps: 7}\ndata: {train: [{path: a.jsonl}]}\n"
    )
    (tmp_path / "deep" / "middle.yaml").write_text("extends: ../base.yaml\noptimizer: {lr: 2.0e-5}\n")
    top = tmp_path / "top.yaml"
    top.write_text("extends: deep/middle.yaml\ndata: {train: [{path: b.jsonl}], shuffle: false}\n")
    settings = load(top, ["run.seed=3"])
    assert settings.model.path == tmp_path / "m"
    assert (settings.optimizer.lr, settings.optimizer.warmup_steps) == (2e-5, 7)
    assert [one.path for one in settings.data.train] == [str(tmp_path / "b.jsonl")]
    assert (settings.run.name, settings.run.seed, settings.data.shuffle) == ("top", 3, False)
    (tmp_path / "base.yaml").write_text("extends: top.yaml\n")
    with pytest.raises(SettingsError, match="extends itself"):
        load(top)
    top.write_text("extends: nowhere.yaml\n")
    with pytest.raises(SettingsError, match=r"nowhere\.yaml: cannot read"):
        load(top)
    top.write_text("extends: [base.yaml]\n")
    with pytest.raises(SettingsError, match="should be the path"):
        load(top)
