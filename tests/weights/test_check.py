"""Digests of servers, compared by name; against a real server in test_sync_vllm.py."""

import hashlib

from megatron_meds.weights.check import changed, describe, differing

NOTHING = hashlib.sha256(b"").hexdigest()
AT = "dp0:pp0:pcp0:tp0:"


def test_equal_digests_are_no_difference_and_each_other_kind_is_told_by_name():
    reference = {AT + "a": "1", AT + "b": "2", AT + "c": "3", AT + "n": NOTHING}
    assert differing({AT + "a": "1"}, {AT + "a": "1"}) == []
    held = {AT + "a": "1", AT + "b": "9", AT + "d": "4", AT + "n": NOTHING}
    assert differing(held, reference) == [
        "b differs",
        "c is not there",
        "n cannot be told: the server keeps it where it has no digest",
        "d is there, and not in the reference",
    ]


def test_fused_tensors_say_what_they_are_made_of_and_workers_where_they_are():
    assert describe(AT + "x.qkv_proj.weight") == "x.qkv_proj.weight (q_proj, k_proj, v_proj)"
    assert describe("dp0:pp0:pcp0:tp1:norm.weight") == "norm.weight on worker dp0 pp0 pcp0 tp1"


def test_changes_are_counted_by_name():
    assert changed({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == 2
