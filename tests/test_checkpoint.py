"""Checkpoint folders: whole or absent, the newest whole one found, whatever stopped a save."""

import errno
import itertools
import json
import logging
import multiprocessing
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_meds.agreement import RankError, together
from megatron_meds.checkpoint import Checkpoints, problem_of, read_state
from megatron_meds.randomness import load_random_state, save_random_state

BODIES = "tests.distributed.bodies_checkpoint"
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def weights(value: int):
    """A `write` that stands for a model's."""

    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights.bin").write_bytes(bytes([value]) * 1000)

    return write


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def value_of(folder: Path) -> int:
    return (folder / "actor" / "weights.bin").read_bytes()[0]


def test_a_checkpoint_holds_what_was_given(tmp_path):
    checkpoints = Checkpoints(tmp_path, config="run:\n  steps: 7\n")
    state = {"position": [3, 141], "counts": {"seen": 12}, "share": 0.1}
    path = checkpoints.save(12, weights(5), state)
    assert path == tmp_path / "checkpoints" / "step_000012"
    assert read_state(path).step == 12
    assert read_state(path).state == state
    assert value_of(path) == 5
    assert (path / "config.yaml").read_text() == "run:\n  steps: 7\n"
    assert json.loads((path / "versions.json").read_text())["torch"] == torch.__version__.split("+")[0]
    assert names(checkpoints) == ["latest", "step_000012"]
    assert (checkpoints.folder / "latest").read_text() == "step_000012\n"
    assert checkpoints.find("auto") == path
    assert checkpoints.find(path) == path


def test_a_fresh_folder_has_nothing_to_go_on_from(tmp_path):
    assert Checkpoints(tmp_path).find("auto") is None
    assert Checkpoints(tmp_path).find("never") is None


def test_never_is_refused_where_there_are_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, weights(1), {})
    with pytest.raises(RankError, match=r"run.resume = never.*step_000001.*choose another run.folder"):
        checkpoints.find("never")


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (None, [1, 2, 3, 4, 5])])
def test_the_last_ones_stay(tmp_path, keep, left):
    checkpoints = Checkpoints(tmp_path, keep_last=keep)
    for step in range(1, 6):
        checkpoints.save(step, weights(step), {})
    assert names(checkpoints) == ["latest", *(f"step_{step:06d}" for step in left)]


def test_after_going_back_the_newest_is_the_one_written_last(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (10, 20, 4):
        checkpoints.save(step, weights(step), {})
    assert checkpoints.find("auto").name == "step_000004"
    assert names(checkpoints) == ["latest", "step_000004", "step_000020"]


def test_a_step_written_again_is_replaced(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for value in (1, 2):
        path = checkpoints.save(3, weights(value), {"value": value})
    assert value_of(path) == 2
    assert read_state(path).state == {"value": 2}
    assert names(checkpoints) == ["latest", "step_000003"]


def test_a_full_disk_leaves_the_last_one_and_no_remains(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, weights(1), {})

    def write(folder: Path) -> None:
        weights(2)(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RankError, match=r"step 2 was not written: rank 0: OSError.*No space left"):
        checkpoints.save(2, write, {})
    assert names(checkpoints) == ["latest", "step_000001"]
    assert value_of(checkpoints.find("auto")) == 1


def test_state_that_json_cannot_hold_is_refused_and_leaves_the_last_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, weights(1), {})
    with pytest.raises(RankError, match=r"TypeError.*not JSON serializable"):
        checkpoints.save(2, weights(2), {"position": object()})
    assert names(checkpoints) == ["latest", "step_000001"]


def crash(run: Path, place: str, step: int = 2, skip: int = 0) -> None:
    """Kill a process at one place of its save."""
    process = multiprocessing.get_context("fork").Process(target=_save_until, args=(run, place, step, skip))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _save_until(run: Path, place: str, step: int, skip: int) -> None:
    """Save, and die by SIGKILL: in `write`, a method of Checkpoints, or a rename after `skip` others."""
    renames = itertools.count()
    rename = Path.rename

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    def write(folder: Path) -> None:
        weights(step)(folder)
        if place == "write":
            die()

    if place == "rename":
        Path.rename = lambda path, target: rename(path, target) if next(renames) < skip else die()
    elif place != "write":
        setattr(Checkpoints, place, die)
    Checkpoints(run, keep_last=1).save(step, write, {})


@forks
@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("write", "step_000001"),  # among the caller's files
        ("_finish", "step_000001"),  # all but the manifest is there
        ("rename", "step_000001"),  # whole, without its name
        ("_point_at", "step_000002"),  # named, `latest` still on the old one
        ("_prune", "step_000002"),  # the old one not yet removed
    ],
)
def test_a_kill_anywhere_in_a_save_leaves_a_whole_one(tmp_path, place, found):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, weights(1), {})
    crash(tmp_path, place)
    path = checkpoints.find("auto")
    assert path.name == found
    assert value_of(path) == int(found[-1])
    checkpoints.save(3, weights(3), {})
    assert names(checkpoints) == ["latest", "step_000003"]


@forks
@pytest.mark.parametrize("skip", [0, 1])
def test_a_kill_while_a_step_is_replaced_leaves_one_of_that_step(tmp_path, skip):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, weights(1), {})
    crash(tmp_path, "rename", step=1, skip=skip)
    path = checkpoints.find("auto")
    assert path.name == "step_000001"
    assert value_of(path) == 1


def spoil_remove(path: Path) -> None:
    (path / "actor" / "weights.bin").unlink()


def spoil_cut(path: Path) -> None:
    (path / "actor" / "weights.bin").write_bytes(b"x")


def spoil_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def spoil_manifest_text(path: Path) -> None:
    (path / "manifest.json").write_text('{"serial": 2, "fil')


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (spoil_remove, "actor/weights.bin is missing"),
        (spoil_cut, "actor/weights.bin has 1 bytes instead of 1000"),
        (spoil_manifest, "no manifest.json"),
        (spoil_manifest_text, "manifest.json is damaged"),
    ],
)
def test_what_is_not_whole_is_passed_over_with_a_warning_that_says_why(tmp_path, caplog, spoil, problem):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    for step in (1, 2):
        checkpoints.keep_last = step
        checkpoints.save(step, weights(step), {})
    broken = checkpoints.folder / "step_000002"
    spoil(broken)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.find("auto").name == "step_000001"
    assert problem in caplog.text
    assert "latest names step_000002" in caplog.text
    with pytest.raises(RankError, match=f"{problem}; choose a whole checkpoint"):
        checkpoints.find(broken)
    checkpoints.keep_last = 2  # what is not whole takes no place among those that are kept
    checkpoints.save(3, weights(3), {})
    assert [name for name in names(checkpoints) if problem_of(checkpoints.folder / name) is None] == [
        "step_000001",
        "step_000003",
    ]


@pytest.mark.parametrize(
    ("latest", "warning"),
    [
        (None, "latest is absent"),
        ("step_000001", "names step_000001 (not the newest)"),
        ("step_000009", "names step_000009 (no such folder)"),
        ("../elsewhere", "no checkpoint's name"),
    ],
)
def test_a_stale_latest_is_named_and_not_followed(tmp_path, caplog, latest, warning):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, weights(step), {})
    (checkpoints.folder / "latest").unlink()
    if latest:
        (checkpoints.folder / "latest").write_text(latest + "\n")
    with caplog.at_level(logging.WARNING):
        assert checkpoints.find("auto").name == "step_000002"
    assert warning in caplog.text


def test_a_run_whose_checkpoints_are_all_broken_does_not_start_afresh(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    spoil_cut(checkpoints.save(1, weights(1), {}))
    with pytest.raises(RankError, match=r"none of the 1 checkpoints .* is whole; repair or remove"):
        checkpoints.find("auto")


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))  # noqa: NPY002


def test_random_generators_go_on_where_they_were(tmp_path):
    random.gauss(0, 1)  # leaves a second value behind, as numpy's does
    np.random.normal()  # noqa: NPY002
    save_random_state(tmp_path / "state.pt")
    after = [draw() for _ in range(3)]
    load_random_state(tmp_path / "state.pt")
    assert [draw() for _ in range(3)] == after


def test_random_generators_are_left_alone_when_the_number_of_ranks_changed(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, weights(1), {})
    after = draw()
    assert checkpoints.restore_random(path)
    assert draw() == after
    more = Checkpoints(tmp_path, all_gather=lambda value: [value, value])
    with caplog.at_level(logging.WARNING):
        assert not more.restore_random(path)
    assert "is of 1 ranks and this run has 2" in caplog.text


def test_the_failure_of_one_rank_is_raised_on_all(tmp_path, ranks):
    told = ranks(2).run(f"{BODIES}:fail_in_write", layout={"tensor": 2}, run=tmp_path, failing=1)
    for message in told:
        assert "step 2 was not written: rank 1: OSError: [Errno 28] No space left on device" in message
    assert names(Checkpoints(tmp_path)) == ["latest", "step_000001"]


def test_all_ranks_find_the_same_and_restore_their_own_generators(tmp_path, ranks):
    answers = ranks(2).run(f"{BODIES}:save_and_find", layout={}, run=tmp_path)
    assert [answer["found"] for answer in answers] == ["step_000001"] * 2
    assert all(answer["before"] == answer["after"] for answer in answers)
    assert answers[0]["before"] != answers[1]["before"]


def test_an_action_that_fails_names_each_failure_with_its_ranks():
    def fail():
        raise ValueError("no")

    with pytest.raises(RankError, match=r"it failed: ranks 0, 2: ValueError: no; rank 1: OSError: full"):
        together(fail, "it failed", lambda value: [value, (False, "OSError: full"), value, None])
