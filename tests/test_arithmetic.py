"""How ranks and batches divide."""

from pathlib import Path

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron_meds.actor.settings import LayoutSettings
from megatron_meds.arithmetic import batch_arithmetic, own_world_size, places, replicas
from megatron_meds.config import load
from tests.small_run import write_run

SIZES = st.integers(1, 4)


@hypothesis_settings(deadline=None)
@given(SIZES, SIZES, SIZES, SIZES)
def test_every_place_is_taken_by_one_rank_and_every_replica_has_one_head(t: int, p: int, c: int, d: int):
    layout = LayoutSettings(tensor=t, pipeline=p, context=c, data=d)
    found = places(layout, own_world_size(layout))
    assert len({(x.replica, x.stage, x.context, x.tensor) for x in found}) == len(found) == t * p * c * d
    assert sorted(x.replica for x in found if x.head) == list(range(d))


def test_tensor_ranks_are_neighbours_and_stages_far_apart():
    layout = LayoutSettings(tensor=2, pipeline=2, data=2)
    assert [(x.replica, x.stage, x.tensor) for x in places(layout, 8)] == [
        (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)
    ]  # fmt: skip


def test_data_auto_is_what_the_launcher_started():
    layout = LayoutSettings(tensor=2, pipeline=2)
    assert own_world_size(layout) == 4
    assert replicas(layout, 16) == 4


def test_a_step_in_numbers(tmp_path: Path):
    settings = load(
        write_run(tmp_path / "run"),
        [
            "data.prompts_per_step=10",
            "algorithm.mini_batch_prompts=4",
            "algorithm.epochs=2",
            "actor.layout.data=3",
            "actor.tokens_per_micro_batch=256",
        ],
    )
    batch = batch_arithmetic(settings, world_size=3)
    assert (batch.prompts, batch.samples, batch.prompts_per_replica) == (10, 80, 4)
    assert (batch.updates, batch.last_update_prompts, batch.total_updates) == (6, 2, 18)
    assert (batch.sequence_tokens, batch.tokens) == (128, 80 * 128)
    assert batch.micro_batches == 8  # 2 prompts of 8 samples on the fullest replica, two sequences in each


def test_a_sequence_beyond_the_budget_gets_a_micro_batch_of_its_own(tmp_path: Path):
    settings = load(write_run(tmp_path / "run"), ["actor.tokens_per_micro_batch=10"])
    assert batch_arithmetic(settings, 1).micro_batches == 64


def test_supervised_examples_are_single(tmp_path: Path):
    settings = load(write_run(tmp_path / "run"), ["algorithm.name=sft"])
    assert batch_arithmetic(settings, 1).samples == 8
