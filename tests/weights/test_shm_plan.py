import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_meds.weights.shm.plan import ALIGNMENT, Entry, make_plan

entries = st.lists(st.integers(1, 5000), min_size=1, max_size=40).map(
    lambda sizes: [Entry(f"t{i}", (n,), "uint8", n) for i, n in enumerate(sizes)]
)


@settings(deadline=None)
@given(entries, st.integers(1, 8000))
def test_every_tensor_comes_once_in_order_and_none_overlap(listed, bucket_bytes):
    plan = make_plan(listed, bucket_bytes)
    assert [p.name for bucket in plan.buckets for p in bucket] == [e.name for e in listed]
    for number, bucket in enumerate(plan.buckets):
        start = (number % plan.slots) * plan.slot_bytes
        free = start
        for place in bucket:
            assert place.offset % ALIGNMENT == 0
            assert place.offset >= free
            free = place.offset + place.nbytes
        assert free <= start + plan.slot_bytes <= plan.size


@settings(deadline=None)
@given(entries, st.integers(1, 8000))
def test_a_bucket_is_filled_while_the_one_before_is_still_read(listed, bucket_bytes):
    plan = make_plan(listed, bucket_bytes)
    for before, after in zip(plan.buckets, plan.buckets[1:], strict=False):
        written = range(after[0].offset, after[-1].offset + after[-1].nbytes)
        assert not any(p.offset in written or p.offset + p.nbytes - 1 in written for p in before)


def test_a_tensor_larger_than_a_bucket_gets_one_of_its_own():
    plan = make_plan(
        [Entry("a", (1,), "uint8", 1), Entry("b", (9000,), "uint8", 9000), Entry("c", (1,), "uint8", 1)], 256
    )
    assert [[p.name for p in bucket] for bucket in plan.buckets] == [["a"], ["b"], ["c"]]
    assert plan.slot_bytes >= 9000


def test_a_model_that_fits_one_bucket_takes_no_more_memory_than_it_needs():
    assert make_plan([Entry("a", (100,), "uint8", 100)], 2**30).size == 128


def test_a_name_listed_twice_is_refused_by_name():
    with pytest.raises(ValueError, match="tensor a is listed twice"):
        make_plan([Entry("a", (1,), "uint8", 1)] * 2, 10)


def test_nothing_to_send_is_refused():
    with pytest.raises(ValueError, match="no tensor"):
        make_plan([], 10)
