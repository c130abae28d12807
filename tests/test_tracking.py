"""A run can be read afterwards, and while it runs: every step once, whatever happened between."""

import io
import json
import sys
import time
import types

import pandas
import pyarrow.parquet
import pytest
from rich.console import Console

from megatron_meds.tracking import Tracker, sample_rows
from megatron_meds.tracking.samples import thin
from megatron_meds.tracking.settings import TrackingSettings
from megatron_meds.tracking.sinks import read_metrics
from megatron_meds.tracking.view import InPlace, Lines, make_view
from megatron_meds.trajectory import Prompt, RewardLedger, Trajectory, prompt_id

QUIET = TrackingSettings(view="none", tensorboard=False)


def tracker(folder, **settings):
    return Tracker(folder, QUIET.model_copy(update=settings), is_writer=True)


def samples(prompts=2, group=3):
    found = []
    for number in range(prompts):
        question = f"{number}+1"
        prompt = Prompt(prompt_id(question), question, (3, number, 4), str(number + 1), source="sums")
        found += [
            Trajectory(
                prompt, k, [7] * (k + 1), "x" * k, [0.0] * (k + 1), "stop", 5, correct=k == 0, verdict="right"
            )
            for k in range(group)
        ]
    return found


def rewarded(trajectories):
    ledger = RewardLedger(trajectories)
    for index, trajectory in enumerate(trajectories):
        ledger.add("outcome", index, float(bool(trajectory.correct)))
        ledger.add("overlong", index, -0.25)
    return ledger


def test_metrics_are_one_line_a_step_on_disk_at_once(tmp_path):
    with tracker(tmp_path) as one:
        for step in (1, 2):
            one.log(step, {"accuracy": step / 4})
            lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
            assert [(line["step"], line["accuracy"]) for line in lines] == [
                (k, k / 4) for k in range(1, step + 1)
            ]
    assert list(pandas.read_json(tmp_path / "metrics.jsonl", lines=True)["step"]) == [1, 2]


def test_phases_are_timed_and_belong_to_one_step(tmp_path):
    with tracker(tmp_path) as one:
        for _ in range(2):
            with one.phase("rollout"):
                time.sleep(0.02)
        first = one.log(1, {})
        second = one.log(2, {})
    assert 0.04 <= first["seconds/rollout"] <= first["seconds/step"]
    assert "seconds/rollout" not in second


def test_a_phase_that_fails_is_timed_and_its_error_goes_on(tmp_path):
    with tracker(tmp_path) as one:
        with pytest.raises(KeyError), one.phase("score"):
            raise KeyError("sample")
        assert "seconds/score" in one.log(1, {})


def test_resident_memory_is_that_of_the_process(tmp_path):
    import psutil

    with tracker(tmp_path) as one:
        found = one.log(1, {})["memory/resident_gib"]
    assert found == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.05)


def test_numbers_that_are_not_finite_keep_the_file_valid_json(tmp_path):
    with tracker(tmp_path) as one:
        one.log(1, {"a": float("nan"), "b": float("inf"), "c": 1.0})
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (line["a"], line["b"], line["c"]) == (None, None, 1.0)


def test_going_on_drops_later_steps_and_half_a_line_and_appends(tmp_path):
    with tracker(tmp_path) as one:
        for step in (1, 2, 3):
            one.log(step, {"accuracy": 0.1})
            one.write_samples(step, sample_rows(samples(), rewarded(samples()), 10))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "accu')
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    with tracker(tmp_path) as one:
        one.resume(2)
        one.log(3, {"accuracy": 0.7})
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["accuracy"]) for line in lines] == [(1, 0.1), (2, 0.1), (3, 0.7)]
    files = sorted(file.name for file in (tmp_path / "trajectories").iterdir())
    assert files == ["step_000001.parquet", "step_000002.parquet"]


def test_a_new_run_drops_what_an_earlier_one_left(tmp_path):
    with tracker(tmp_path) as one:
        one.log(1, {"accuracy": 0.1})
        one.write_samples(1, sample_rows(samples(), rewarded(samples()), 10))
    with tracker(tmp_path) as one:
        one.log(1, {"accuracy": 0.2})
    assert [line["accuracy"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0.2]
    assert not list((tmp_path / "trajectories").iterdir())


def test_only_the_writer_leaves_files(tmp_path):
    with Tracker(tmp_path, TrackingSettings(), is_writer=False) as other:
        other.resume(0)
        with other.phase("rollout"), other.progress(3):
            other.advance()
        other.say("nothing")
        other.log(1, {"accuracy": 1.0})
        other.write_samples(1, [])
    assert not list(tmp_path.iterdir())


def test_tensorboard_reads_the_same_numbers_and_only_the_last_of_a_repeated_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tracker(tmp_path, tensorboard=True) as one:
        for step in (1, 2, 3):
            one.log(step, {"accuracy": 0.25, "bad": float("nan")})
    with tracker(tmp_path, tensorboard=True) as one:
        one.resume(1)
        one.log(2, {"accuracy": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("accuracy")] == [(1, 0.25), (2, 0.5)]
    assert "bad" not in events.Tags()["scalars"]


class Wandb(types.ModuleType):
    """Stands in for the service, which no test may reach."""

    def __init__(self):
        super().__init__("wandb")
        self.started, self.logged, self.id = [], [], "abc"
        self.__spec__ = types.SimpleNamespace(name="wandb")

    def init(self, **arguments):
        self.started.append(arguments)
        return self

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, metrics):
        self.logged.append(metrics)

    def finish(self):
        self.logged.append("finished")


def test_weights_and_biases_is_told_the_same_and_goes_on_with_its_run(tmp_path, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with tracker(tmp_path / "sums", wandb_project="meds") as one:
        one.log(1, {"accuracy": 0.25})
    with tracker(tmp_path / "sums", wandb_project="meds") as one:
        one.resume(1)
        one.log(2, {"accuracy": 0.5})
    assert [(s["project"], s["name"], s["id"]) for s in wandb.started] == [
        ("meds", "sums", None),
        ("meds", "sums", "abc"),
    ]
    logged = [m if m == "finished" else (m["step"], m["accuracy"]) for m in wandb.logged]
    assert logged == [(1, 0.25), "finished", (2, 0.5), "finished"]


def test_weights_and_biases_that_is_not_installed_is_said_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"tracking\.wandb_project = meds.*pip install wandb"):
        tracker(tmp_path, wandb_project="meds")


def test_trajectory_files_hold_what_was_said_and_what_it_earned(tmp_path):
    trajectories = samples()
    with tracker(tmp_path) as one:
        one.write_samples(12, sample_rows(trajectories, rewarded(trajectories), 100))
    file = tmp_path / "trajectories" / "step_000012.parquet"
    rows = pyarrow.parquet.read_table(file).to_pylist()
    assert len(rows) == 6
    assert rows[0] == {
        "step": 12,
        "prompt_id": prompt_id("0+1"),
        "question": "0+1",
        "answer": "1",
        "source": "sums",
        "sample": 0,
        "text": "",
        "correct": True,
        "verdict": "right",
        "finish_reason": "stop",
        "weight_version": 5,
        "prompt_tokens": 3,
        "response_tokens": 1,
        "prompt_ids": [3, 0, 4],
        "response_ids": [7],
        "reward/outcome": 1.0,
        "reward/overlong": -0.25,
        "reward/total": 0.75,
    }
    assert [file.name] == [f.name for f in file.parent.iterdir()]
    assert list(pandas.read_parquet(file)["reward/total"]) == [0.75, -0.25, -0.25] * 2


def test_duckdb_reads_all_steps_together(tmp_path):
    import duckdb

    with tracker(tmp_path) as one:
        for step in (1, 2):
            one.write_samples(step, sample_rows(samples(), rewarded(samples()), 100))
    query = f"select step, count(*) from '{tmp_path}/trajectories/*.parquet' group by step order by step"
    assert duckdb.sql(query).fetchall() == [(1, 6), (2, 6)]


@pytest.mark.parametrize(
    ("limit", "kept"), [(100, 12), (12, 12), (7, 6), (6, 6), (5, 3), (3, 3), (2, 2), (1, 1)]
)
def test_files_are_bounded_by_whole_groups(limit, kept):
    trajectories = samples(prompts=4, group=3)
    chosen = thin(trajectories, limit)
    assert len(chosen) == kept
    assert chosen == sorted(chosen)
    if limit >= 3:
        counts = {i: sum(trajectories[c].prompt.question == f"{i}+1" for c in chosen) for i in range(4)}
        assert set(counts.values()) <= {0, 3}


def test_groups_of_unlike_sizes_stay_within_the_bound():
    trajectories = samples(prompts=1, group=9) + samples(prompts=6, group=1)[1:]
    for limit in range(1, 16):
        assert 0 < len(thin(trajectories, limit)) <= limit


def test_a_step_without_trajectories_leaves_an_empty_readable_file(tmp_path):
    with tracker(tmp_path) as one:
        one.write_samples(1, [])
    assert pyarrow.parquet.read_table(tmp_path / "trajectories/step_000001.parquet").num_rows == 0


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_trajectories_are_written_every_so_many_steps(tmp_path, every, steps):
    with tracker(tmp_path, trajectories_every=every) as one:
        assert [step for step in range(1, 5) if one.wants_samples(step)] == steps


METRICS = {
    "accuracy": 0.634,
    "reward/total": 0.61,
    "length": 92.1,
    "truncated": 0.0,
    "entropy": 0.312,
    "update/kl_old": 1.5e-4,
    "update/grad_norm": 0.52,
    "tokens_per_second": 3120.4,
}


def screen(terminal, width=140):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, height=30, color_system=None)


def still(view, width=140):
    """What an in-place view shows now, as text."""
    console = screen(terminal=False, width=width)
    console.print(view.render())
    return console.file.getvalue()


def test_without_a_terminal_a_step_is_one_plain_line(tmp_path):
    console = screen(terminal=False)
    with Tracker(
        tmp_path / "tiny", QUIET, is_writer=True, view=make_view("auto", "tiny", 16, console)
    ) as one:
        one.say("data: [4,096] rows")
        with one.phase("rollout"), one.progress(512):
            one.advance(512)
        one.log(12, METRICS)
        one.log(12, {"evaluation/heldout/accuracy": 0.771})
    first, note, step, evaluation = console.file.getvalue().splitlines()
    assert first == "tiny: 16 steps"
    assert note == "data: [4,096] rows"
    assert step.startswith(
        "step 12/16: accuracy 63.4%, reward 0.610, length 92.1, truncated 0.0%, entropy 0.312, "
        "KL 1.5e-04, grad norm 0.520, tokens/s 3,120, seconds 0.0 (rollout 0.0)"
    )
    assert "heldout 77.1% right" in evaluation


def test_on_a_terminal_the_last_steps_the_phase_and_the_bar_are_shown(tmp_path):
    console = screen(terminal=True)
    view = make_view("auto", "tiny", 16, console)
    assert isinstance(view, InPlace)
    with Tracker(tmp_path / "tiny", QUIET, is_writer=True, view=view) as one:
        one.log(0, {"evaluation/heldout/accuracy": 0.602})
        for step in range(1, 15):
            one.log(step, METRICS | {"accuracy": step / 100})
        one.log(14, {"evaluation/heldout/accuracy": 0.771})
        with one.phase("rollout"), one.progress(512):
            one.advance(100)
            frame = still(view)
    assert "tiny: step 14 of 16" in frame
    assert "heldout: 60.2% right at step 0, 77.1% at step 14 (+16.9 points)" in frame
    assert "rollout 0 s" in frame
    assert "100/512" in frame
    for title in ("accuracy", "reward", "length", "truncated", "entropy", "KL", "grad norm", "tokens/s"):
        assert title in frame
    rows = [line for line in frame.splitlines() if line.strip()[:2].strip().isdecimal()]
    assert [int(row.split()[0]) for row in rows] == list(range(3, 15))
    assert "mismatch" not in frame


def test_a_bar_grows_with_what_comes_beyond_the_announced():
    view = InPlace(screen(terminal=True), "tiny", 16)
    with view.progress(8, "trajectories"):
        for _ in range(3):
            view.advance(4)
        assert "12/12" in still(view)
        view.advance(0, total=20)
        assert "12/20" in still(view)
    assert "12/" not in still(view)
    view.close()


def test_a_narrow_terminal_gets_no_broken_rows(tmp_path):
    console = screen(terminal=True, width=80)
    view = InPlace(console, "tiny", 16)
    view.step(1, METRICS | {"update/clip_fraction": 0.1, "learning_rate": 1e-4})
    frame = still(view, width=80)
    view.close()
    assert all(len(line) <= 80 for line in frame.splitlines())
    assert "clipped" not in frame


@pytest.mark.parametrize(
    ("kind", "terminal", "view"), [("auto", False, Lines), ("lines", True, Lines), ("live", False, InPlace)]
)
def test_the_view_can_be_chosen(kind, terminal, view):
    made = make_view(kind, "tiny", None, screen(terminal))
    made.close()
    assert type(made) is view
