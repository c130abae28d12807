"""The same penalties for the same trajectories, whatever the number of replicas; nobody waits in vain."""

import hashlib
import shutil

import numpy as np
import pytest

from megatron_meds.meds import Meds, MistakeMemory, Note, Rows, ShardedMemory, owner
from megatron_meds.meds.settings import MedsSettings
from megatron_meds.trajectory import RewardLedger
from tests.meds.in_process import Replicas
from tests.meds.samples import LAYERS, decode, step_samples

TARGETS = ["wrong", "both"]


def ledgers(replicas, target, steps=4, deal=None, made=None):
    """(prompt, sample) -> (entries of `meds` in each step), over replicas that got whole groups."""
    settings = MedsSettings(enabled=True, target=target, workers=1, max_per_prompt=40)
    world = Replicas(replicas)
    deal = deal or (lambda number, step: (number + step) % replicas)

    def play(replica):
        meds = Meds(settings, replica, replicas, world.exchange(replica))
        found = {}
        for step in range(steps):
            samples = step_samples(step)
            mine = [s for i, s in enumerate(samples) if deal(i // 8, step) == replica]
            trajectories = [t for t, _ in mine]
            ledger = RewardLedger(trajectories)
            ledger.open("outcome")
            for i, t in enumerate(trajectories):
                ledger.add("outcome", i, float(t.correct))
            answers = meds.answer_tokens(trajectories, decode)
            logits = np.array([row for _, row in mine]).reshape(-1, LAYERS)
            meds.shape(ledger, trajectories, answers, logits, step)
            for i, _, value in ledger.entries("meds"):
                found[step, trajectories[i].prompt.question, trajectories[i].sample] = value
        if made is not None:
            made[replica] = meds
        return found

    return {key: value for part in world.run(play) for key, value in part.items()}


@pytest.mark.parametrize("target", TARGETS)
def test_one_two_and_four_replicas_give_the_same_penalties(target):
    single = ledgers(1, target)
    assert len(single) > 50 and min(single.values()) == pytest.approx(-0.2)
    assert ledgers(2, target) == single
    assert ledgers(4, target) == single


def test_replicas_without_any_row_take_part():
    single = ledgers(1, "wrong")
    assert ledgers(3, "wrong", deal=lambda number, step: 1) == single


def test_the_owner_is_the_hash_of_the_prompt_and_shards_hold_their_own_only():
    made = {}
    ledgers(4, "wrong", made=made)
    seen = [key[0] for meds in made.values() for key in meds.memory]
    assert len(seen) == len(set(seen)) == 12
    for replica, meds in made.items():
        for prompt, _ in meds.memory:
            assert int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % 4 == replica == owner(prompt, 4)


def rows_of(prompt_ids, samples, features):
    n = len(prompt_ids)
    return Rows(
        prompt_ids=list(prompt_ids),
        correct=np.zeros(n, dtype=bool),
        samples=np.asarray(samples, dtype=np.int32),
        features=np.asarray(features, dtype=np.float32).reshape(n, -1) if n else np.empty((0, 0), np.float32),
        layers=np.empty((n, 0), np.float32),
        notes=[Note()] * n,
        questions=[""] * n,
    )


def test_two_groups_of_one_question_on_two_replicas_are_one_visit():
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=(2, 6, 5)).astype(np.float32)
    single = ShardedMemory(MistakeMemory(max_per_prompt=9))
    both = rows_of(["p"] * 12, [*range(6)] * 2, np.concatenate([first, second]))
    expected = [single.visit(both, step) for step in range(3)]
    world = Replicas(2)

    def play(replica):
        shard = ShardedMemory(MistakeMemory(max_per_prompt=9), replica, 2, world.exchange(replica))
        mine = rows_of(["p"] * 6, range(6), first if replica == 0 else second)
        return [shard.visit(mine, step) for step in range(3)]

    found = world.run(play)
    for step in range(3):
        np.testing.assert_array_equal(np.concatenate([found[0][step], found[1][step]]), expected[step])


def test_no_rows_anywhere_and_rows_of_different_widths():
    shard = ShardedMemory(MistakeMemory())
    assert shard.visit(rows_of([], [], [])).shape == (0,)
    with pytest.raises(ValueError, match=r"rows of \[3, 4\] features"):
        Rows.join([rows_of(["p"], [0], np.ones((1, 3))), rows_of(["p"], [0], np.ones((1, 4)))])


def test_real_ranks_give_the_same_penalties_also_after_a_stop_at_two_and_a_start_at_four(ranks, tmp_path):
    def play(size, layout, folder, first, last, lone=False):
        results = ranks(size).run(
            "tests.distributed.bodies_meds:penalties",
            layout=layout,
            folder=str(tmp_path / folder),
            first=first,
            last=last,
            lone=lone,
        )
        return {key: value for part in results if part for key, value in part.items()}

    single = ledgers(1, "wrong")
    assert play(2, {"pipeline": 2}, "one", 0, 4) == single
    before = play(4, {"tensor": 2}, "two", 0, 2)
    shutil.copytree(tmp_path / "two", tmp_path / "resumed")
    after = play(4, {}, "resumed", 2, 4)
    assert before | after == single
    assert play(4, {}, "lone", 0, 4, lone=True) == single
