"""Groups are dealt whole, once, and evenly."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_meds.rollout.dealing import cut_mini_batches, deal, next_round

sizes = st.lists(st.integers(1, 1000), max_size=40)


@given(sizes, st.integers(1, 8))
def test_every_group_goes_to_one_replica(tokens, replicas):
    hands = deal(tokens, range(len(tokens)), replicas)
    assert len(hands) == replicas
    assert sorted(g for hand in hands for g in hand) == list(range(len(tokens)))


@given(sizes, st.integers(1, 8))
def test_no_replica_has_more_than_the_mean_and_one_longest_group(tokens, replicas):
    loads = [sum(tokens[g] for g in hand) for hand in deal(tokens, range(len(tokens)), replicas)]
    assert max(loads) <= sum(tokens) / replicas + max(tokens, default=0)


@given(st.integers(0, 50), st.integers(1, 20) | st.none())
def test_mini_batches_hold_every_group_once_in_order(groups, size):
    batches = cut_mini_batches(groups, size)
    assert [g for batch in batches for g in batch] == list(range(groups))
    assert all(len(batch) == (size or groups) for batch in batches[:-1])


@given(st.integers(1, 512), st.integers(0, 511), st.integers(1, 2000))
def test_a_round_asks_what_is_missing_over_the_share_kept(wanted, kept, asked):
    kept = min(kept, asked, wanted - 1)
    count = next_round(wanted, kept, asked)
    assert min(wanted - kept, wanted) <= count <= wanted


def test_the_first_round_asks_all():
    assert next_round(64, 0, 0) == 64
    assert next_round(64, 48, 64) == 22  # 16 missing, three in four kept
