"""The loader deals out every item exactly once an epoch, from an exact position."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_meds.data.loader import PromptLoader
from megatron_meds.trajectory import Prompt, Trajectory, prompt_id


def prompts(count, name="q"):
    return [Prompt(prompt_id(f"{name}{i}"), f"{name}{i}", (i,), "") for i in range(count)]


def numbers(items):
    return [item.token_ids[0] for item in items]


@given(
    count=st.integers(1, 30),
    draws=st.lists(st.integers(0, 45), max_size=12),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_every_epoch_holds_every_item_once_however_it_is_drawn(count, draws, seed, shuffle):
    loader = PromptLoader(prompts(count), 4, seed, shuffle)
    drawn = [number for n in draws for number in numbers(loader.next(n))]
    assert len(drawn) == sum(draws)
    for start in range(0, len(drawn), count):
        epoch = drawn[start : start + count]
        assert len(set(epoch)) == len(epoch)
    assert loader.epochs == pytest.approx(len(drawn) / count)


@given(
    count=st.integers(1, 30),
    before=st.lists(st.integers(0, 20), max_size=6),
    after=st.lists(st.integers(0, 20), max_size=6),
    seed=st.integers(0, 99),
)
def test_a_restored_position_goes_on_exactly_whatever_the_new_seed(count, before, after, seed):
    loader = PromptLoader(prompts(count), 4, seed)
    for n in before:
        loader.next(n)
    restored = PromptLoader(prompts(count), 4, seed + 1, shuffle=False)
    restored.load_state_dict(loader.state_dict())
    assert [numbers(restored.next(n)) for n in after] == [numbers(loader.next(n)) for n in after]
    assert restored.state_dict() == loader.state_dict()


def test_the_last_partial_batch_rolls_into_the_next_epoch():
    loader = PromptLoader(prompts(5), 3, seed=0, shuffle=False)
    assert [numbers(loader.next()) for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_a_set_smaller_than_the_batch_is_dealt_out_evenly():
    loader = PromptLoader(prompts(3), 8, seed=0)
    assert sorted(Counter(numbers(loader.next())).values()) == [2, 3, 3]


def test_epochs_and_seeds_have_orders_of_their_own():
    loader, other = PromptLoader(prompts(50), 50, seed=0), PromptLoader(prompts(50), 50, seed=1)
    first, second = numbers(loader.next()), numbers(loader.next())
    assert first != second
    assert first != numbers(other.next())
    assert first == numbers(PromptLoader(prompts(50), 50, seed=0).next())


def test_a_position_in_other_data_is_refused():
    state = PromptLoader(prompts(5), 3, seed=0).state_dict()
    with pytest.raises(ValueError, match=r"data\.train"):
        PromptLoader(prompts(6), 3, seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match=r"data\.train"):
        PromptLoader(prompts(5)[::-1], 3, seed=0).load_state_dict(state)


def test_nothing_to_deal_out_is_refused():
    with pytest.raises(ValueError, match="empty"):
        PromptLoader([], 3, seed=0)


def test_supervised_examples_are_dealt_out_alike():
    examples = [Trajectory(p, 0, [1], "", [0.0], "stop", 0) for p in prompts(4)]
    loader = PromptLoader(examples, 4, seed=0)
    assert sorted(e.prompt.token_ids[0] for e in loader.next()) == [0, 1, 2, 3]
