"""The arithmetic of the benchmark of weight syncs."""

import pytest

from tools.benchmarks.sync import Measured, missed, parse_layout, ratios, table

MEASURED = Measured(
    "tp3", 200, 200, copy_seconds=0.1, ours_seconds=0.15, received_seconds=0.4, gathered_seconds=0.9,
    first_seconds=1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("tp1", {"tensor": 1}),
        ("pp2", {"pipeline": 2}),
        ("tp3pp2", {"tensor": 3, "pipeline": 2}),
        ("tp1xpp2", {"tensor": 1, "pipeline": 2}),
    ],
)
def test_layouts_are_named_as_people_name_them(text, layout):
    assert parse_layout(text) == layout


@pytest.mark.parametrize("text", ["", "dp2", "tp", "pp2tp2"])
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match="layout"):
        parse_layout(text)


def test_ratios_are_over_a_memory_copy_and_the_model_s_bytes():
    assert ratios(MEASURED) == pytest.approx({"moved": 1.0, "ours": 1.5, "received": 4.0, "gathered": 9.0})
    assert table([MEASURED]).splitlines()[-1] == "| tp3 | 0 | 100 | 1000 | 1.00 | 1.50 | 4.00 | 9.00 |"


def test_only_a_missed_target_is_told():
    assert missed([MEASURED]) == []
    slow = Measured(**{**MEASURED.__dict__, "ours_seconds": 0.31})
    assert missed([slow]) == ["tp3: ours is 3.10, the target is 3"]
