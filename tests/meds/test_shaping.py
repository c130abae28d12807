"""What a repeated mistake costs, whom, and where it stands in the ledger."""

import math

import numpy as np
import pytest

from megatron_meds.imports import FunctionError
from megatron_meds.meds import Meds, MistakeMemory, penalty, select_layers
from megatron_meds.meds.settings import MedsSettings
from megatron_meds.trajectory import RewardLedger
from tests.meds.samples import LAYERS, decode, step_samples, trajectory


def first_three(layer_logits, trajectories):
    """A user's feature function."""
    assert len(layer_logits) == len(trajectories)
    return layer_logits[:, :3]


def ledger_of(trajectories, right=1.0, wrong=0.0):
    ledger = RewardLedger(trajectories)
    ledger.open("outcome")
    for index, t in enumerate(trajectories):
        ledger.add("outcome", index, right if t.correct else wrong)
    return ledger


def play(settings, steps=3, **rewards):
    """Ledger, trajectories and report of the last of some steps."""
    with_memory = Meds(settings)
    for step in range(steps):
        samples = step_samples(step)
        trajectories = [t for t, _ in samples]
        ledger = ledger_of(trajectories, **rewards)
        logits = np.array([row for _, row in samples])
        answers = with_memory.answer_tokens(trajectories, decode)
        report = with_memory.shape(ledger, trajectories, answers, logits, step)
    return with_memory, ledger, trajectories, report


def test_the_penalty_is_the_natural_logarithm_up_to_its_cap():
    found = penalty(np.array([0, 1, 3, 6, 7, 1000]), alpha=0.1, beta=0.2)
    np.testing.assert_allclose(found, [0, 0.1 * math.log(2), 0.1 * math.log(4), 0.1 * math.log(7), 0.2, 0.2])
    assert penalty([2], alpha=0.02, beta=0.04).tolist() == pytest.approx([0.02 * math.log(3)])
    assert penalty([]).shape == (0,)
    with pytest.raises(ValueError, match="0 or more"):
        penalty([-1])


def test_the_cap_is_twice_alpha_unless_it_is_set():
    assert MedsSettings(alpha=0.02).cap == 0.04
    assert MedsSettings(alpha=0.02, beta=0.5).cap == 0.5


def test_wrong_answers_with_a_box_are_penalised_at_the_last_token_by_what_the_memory_says():
    _, ledger, trajectories, _ = play(MedsSettings(enabled=True))
    memory, expected = MistakeMemory(), {}
    for step in range(3):
        groups = {}
        for t, row in step_samples(step):
            if not t.correct and "box" in t.text:
                groups.setdefault(t.prompt.id, []).append((t.sample, row))
        for key, members in groups.items():
            sizes = memory.visit(key, select_layers(np.array([row for _, row in members], np.float32)))
            costs = penalty(sizes).tolist()
            expected |= {(key, s): c for (s, _), c in zip(members, costs, strict=True) if c and step == 2}
    entries = ledger.entries("meds")
    assert {(trajectories[i].prompt.id, trajectories[i].sample): -v for i, _, v in entries} == expected
    assert len(expected) > 20
    assert all(token == len(trajectories[i]) - 1 for i, token, _ in entries)


def test_a_right_answers_reward_is_divided_and_stored_as_what_it_changes():
    _, ledger, trajectories, report = play(MedsSettings(enabled=True, target="right"), right=2.0, wrong=-1.0)
    entries = ledger.entries("meds")
    assert entries and all(trajectories[i].correct for i, _, _ in entries)
    totals = ledger.totals()
    assert min(totals[i] for i, _, _ in entries) == pytest.approx(2.0 / 1.2)
    assert report.means["meds/penalised_share"][1] == sum(bool(t.correct) for t in trajectories)


def test_both_shapes_both_and_none_remembers_without_shaping():
    memory, ledger, trajectories, _ = play(MedsSettings(enabled=True, target="both"))
    assert {bool(trajectories[i].correct) for i, _, _ in ledger.entries("meds")} == {True, False}
    assert {key[1] for key in memory.memory} == {True, False}
    memory, ledger, _, report = play(MedsSettings(enabled=True, target="none"))
    assert ledger.sources == ["outcome", "meds"] and ledger.entries("meds") == []
    assert memory.memory.rows > 0 and report.means["meds/penalty"][0] == 0
    assert report.means["meds/size"][0] > 0


def test_a_sample_without_a_score_keeps_none():
    meds = Meds(MedsSettings(enabled=True, last=None))
    trajectories = [trajectory("q", i, r"\boxed{2}", False) for i in range(4)]
    for step in range(2):
        ledger = ledger_of(trajectories)
        ledger.mark_unscored("custom", 1)
        answers = meds.answer_tokens(trajectories, decode)
        meds.shape(ledger, trajectories, answers, np.ones((4, LAYERS)), step)
    assert [i for i, _, _ in ledger.entries("meds")] == [0, 2, 3]
    assert np.isnan(ledger.totals()[1])


def test_samples_without_a_feature_are_counted_by_reason_and_shift_no_other_row():
    texts = [
        r"\boxed{2}",
        "none",
        r"so \boxed{",
        r"so \boxed{2",
        r"so \boxed{}",
        r"so \boxed{2}",
        r"so \boxed{2}",
    ]
    trajectories = [trajectory("q", i, text, False) for i, text in enumerate(texts)]
    meds = Meds(MedsSettings(enabled=True))
    answers = meds.answer_tokens(trajectories, lambda ids: decode(ids))
    logits = np.arange(7 * LAYERS, dtype=float).reshape(7, LAYERS)
    logits[6, -1] = np.inf
    report = meds.shape(ledger_of(trajectories), trajectories, answers, logits, 1)
    reasons = {name: n for name, n in report.totals.items() if name.startswith("meds/no_feature/") and n}
    assert reasons == dict.fromkeys(
        [f"meds/no_feature/{r}" for r in ("not_finite", "no_box", "cut_box", "open_box", "empty_box")], 1.0
    )
    remembered = meds.memory[trajectories[0].prompt.id, False]
    assert remembered.samples.tolist() == [0, 5]
    np.testing.assert_array_equal(remembered.features, logits[[0, 5]][:, -14:])
    np.testing.assert_array_equal(remembered.layers, logits[[0, 5]])
    assert [note.answer for note in remembered.notes] == ["2", "2"]


def test_texts_are_bounded_and_can_be_left_out():
    long = "x" * 500 + rf"\boxed{{{'9' * 90}}}"
    for characters, answer, end in ((10, "999999999…", "…" + "9" * 8 + "}"), (0, "", "")):
        settings = MedsSettings(
            enabled=True,
            answer_characters=characters,
            response_characters=characters,
            keep_layer_logits=False,
        )
        meds = Meds(settings)
        trajectories = [trajectory("a question " * 9, 0, long, False)]
        answers = meds.answer_tokens(trajectories, decode)
        meds.shape(ledger_of(trajectories), trajectories, answers, np.ones((1, LAYERS)), 1)
        kept = meds.memory[trajectories[0].prompt.id, False]
        assert tuple(kept.notes[0]) == (answer, end)
        assert len(kept.question) == characters and kept.layers.shape == (1, 0)


def test_the_metrics_of_a_step():
    meds, ledger, trajectories, report = play(MedsSettings(enabled=True, workers=1))
    values = {name: total / count for name, (total, count) in report.means.items()} | report.totals
    wrong = [i for i, t in enumerate(trajectories) if not t.correct]
    assert values["meds/penalty"] == pytest.approx(-ledger.totals("meds")[wrong].mean())
    assert values["meds/penalised_share"] == pytest.approx(len(ledger.entries("meds")) / len(wrong))
    labels = [meds.memory[key].labels for key in meds.memory]
    assert values["meds/noise_share"] == pytest.approx((np.concatenate(labels) < 0).mean())
    assert values["meds/clusters"] == pytest.approx(np.mean([len(set(part[part >= 0])) for part in labels]))
    assert values["meds/memory_rows"] == sum(map(len, labels)) == meds.memory.rows
    assert values["meds/memory_bytes"] == meds.memory.bytes > 0
    assert {f"meds/seconds/{part}" for part in ("exchange", "assign", "cluster", "diagnose")} <= set(
        report.maxima
    )
    ratios = [report.maxima[f"meds/eigen_ratio{kind}"] for kind in ("", "_normalised", "_pooled")]
    assert all(1 / 14 < ratio < 1 for ratio in ratios)


def test_a_users_feature_function_takes_the_place_of_the_layers():
    meds, *_ = play(MedsSettings(enabled=True, feature_function=f"{__name__}:first_three"))
    assert {meds.memory[key].features.shape[1] for key in meds.memory} == {3}
    with pytest.raises(FunctionError, match=r"meds\.feature_function"):
        Meds(MedsSettings(feature_function="math:no_such"))


def test_what_does_not_fit_is_refused_by_name():
    meds = Meds(MedsSettings(enabled=True))
    one = trajectory("q", 3, r"so \boxed{2}", False)
    with pytest.raises(ValueError, match="1 trajectories come with layer logits of shape"):
        meds.shape(ledger_of([one]), [one], meds.answer_tokens([one], decode), np.ones((2, 4)), 0)
    with pytest.raises(ValueError, match=f"sample {one.key}: the text is not"):
        meds.answer_tokens([one], lambda ids: "another text")
    one.correct = None
    with pytest.raises(ValueError, match=f"sample {one.key} was not graded"):
        meds.answer_tokens([one], decode)
    with pytest.raises(ValueError, match="last = 0"):
        MedsSettings(last=0)
