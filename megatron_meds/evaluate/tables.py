"""An evaluation's numbers as a terminal table, Markdown, LaTeX and JSON. Knows summaries only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_meds.evaluate.pass_at_k import Interval
from megatron_meds.evaluate.summary import Difference, SetSummary

if TYPE_CHECKING:
    from rich.table import Table

Results = Mapping[str, Mapping[str, SetSummary]]
"""Per model, per set."""


def rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """Head and cells: a row for each model and set."""
    ks = list(next(iter(next(iter(results.values())).values())).pass_at)
    head = ["model", "set", "problems x samples", *(f"pass@{k}" for k in ks), "tokens", "boxed", "cut off"]
    cells = []
    for model, sets in results.items():
        for name, found in sets.items():
            cells.append(
                [
                    model,
                    name,
                    f"{found.problems} x {found.samples}",
                    *(percent(found.pass_at[k]) for k in ks),
                    f"{found.tokens:,.0f}",
                    f"{found.boxed:.1%}",
                    f"{found.truncated:.1%}",
                ]
            )
    return head, cells


def difference_rows(differences: Sequence[Difference]) -> tuple[list[str], list[list[str]]]:
    """Head and cells: a row for each model that is compared."""
    names = list(differences[0].by_set)
    head = ["pass@1, model less model", *names]
    return head, [
        [f"{d.model} - {d.baseline}", *(percent(d.by_set[name], signed=True) for name in names)]
        for d in differences
    ]


def percent(value: Interval, signed: bool = False) -> str:
    """`45.8 [41.2, 50.1]`, in %."""
    sign = "+" if signed else ""
    return f"{100 * value.mean:{sign}.1f} [{100 * value.low:{sign}.1f}, {100 * value.high:{sign}.1f}]"


def terminal(head: Sequence[str], cells: Sequence[Sequence[str]], title: str) -> Table:
    """For rich."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index < 2 else "right")
    for row in cells:
        table.add_row(*row)
    return table


def markdown(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table with its line ends."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *cells]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def latex(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A `tabular` with booktabs rules; numbers with their interval in small print."""
    columns = "l" * 2 + "r" * (len(head) - 2)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", _latex_row(head), r"\midrule"]
    lines += [_latex_row(row) for row in cells]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def as_json(
    results: Results, differences: Sequence[Difference], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything, unrounded."""
    return {
        "settings": dict(settings),
        "models": {m: {name: asdict(s) for name, s in sets.items()} for m, sets in results.items()},
        "differences": [asdict(d) for d in differences],
    }


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(_latex_cell(cell) for cell in cells) + r" \\"


def _latex_cell(text: str) -> str:
    escaped = re.sub(r"([#$%&_{}])", r"\\\1", text)
    return re.sub(r" (\[.*\])$", r" {\\scriptsize \1}", escaped)
