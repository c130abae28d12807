"""Benchmark tools replace their own section of a document and leave the others."""

from tools.benchmarks.against_trl import replace_section

NEW = "## Against TRL\n\nnew\n"


def test_a_section_is_replaced_where_it_stands_and_added_where_it_is_not():
    document = "# Benchmarks\n\n## Against TRL\n\nold\n\n| a |\n\n## Sync\n\nkept\n"
    replaced = replace_section(document, NEW)
    assert replaced == "# Benchmarks\n\n## Against TRL\n\nnew\n\n## Sync\n\nkept\n"
    assert replace_section(replaced, NEW) == replaced
    assert replace_section("# Benchmarks\n", NEW) == "# Benchmarks\n\n## Against TRL\n\nnew\n"
