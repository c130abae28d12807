"""Draw the accuracy of runs over their steps, as an SVG that needs nothing to be seen.

    python tools/learning_curve.py docs/quickstart.svg runs/seed1 runs/seed2 runs/seed3

One line a run: the share of right answers among the step's training samples; dots: held-out accuracy
where it was measured. Knows RUN/metrics.jsonl and nothing else.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 64, 150, 48, 48
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # told apart by the colour-blind
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #333 } .title { font-size: 15px; font-weight: 600 }
.grid { stroke: #ccc; stroke-width: 1 } .back { fill: #fff }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .grid { stroke: #444 } .back { fill: #16181c } }
</style>"""


def read_run(folder: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """(step, training accuracy) and (step, held-out accuracy) of a run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training = [(row["step"], row["accuracy"]) for row in rows if "accuracy" in row]
    held_out = [
        (row["step"], value)
        for row in rows
        for name, value in row.items()
        if name.startswith("evaluation/") and name.endswith("/accuracy")
    ]
    return training, held_out


def draw(runs: dict[str, Path]) -> str:
    """The SVG's text."""
    curves = {name: read_run(folder) for name, folder in runs.items()}
    points = [p for pair in curves.values() for part in pair for p in part]
    steps = max(step for step, _ in points)
    low = min(0.5, min(value for _, value in points) - 0.02)

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / steps
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / (1 - low))
        return round(x, 1), round(y, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        STYLE,
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="26">DAPO on the tiny reasoner: share of right answers</text>',
    ]
    for tenth in range(int(low * 10) + 1, 11):
        x, y = at(0, tenth / 10)
        parts.append(f'<line class="grid" x1="{x}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{tenth * 10} %</text>')
    for step in range(0, steps + 1, max(1, steps // 8)):
        x, y = at(step, low)
        parts.append(f'<text x="{x}" y="{y + 22}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    for index, (name, (training, held_out)) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        line = " ".join(f"{x},{y}" for x, y in (at(*p) for p in training))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for step, value in held_out:
            x, y = at(step, value)
            parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>')
        x, y = WIDTH - RIGHT + 16, TOP + 20 * (index + 1)
        parts.append(
            f'<line x1="{x}" y1="{y - 4}" x2="{x + 20}" y2="{y - 4}" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{x + 26}" y="{y}">{escape(name)}</text>')
    x, y = WIDTH - RIGHT + 26, TOP + 20 * (len(curves) + 1)
    parts.append(
        f'<circle cx="{x}" cy="{y - 4}" r="5" fill="#888"/><text x="{x + 16}" y="{y}">held out</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("svg", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    arguments = parser.parse_args()
    arguments.svg.write_text(draw({folder.name: folder for folder in arguments.runs}))


if __name__ == "__main__":
    main()
