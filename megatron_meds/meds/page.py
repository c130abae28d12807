"""A self-contained HTML page of remembered answers: clusters, examples, and the heat map of layer logits.

Layers across, responses down, grouped by cluster: the same wrong answer reached by different reasoning
falls apart in the deep layers. Blue to orange, which most colour-blind readers tell apart; light and
dark. No scripts, nothing loaded from elsewhere.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from megatron_meds.meds.show import Cluster, PromptView, layers_of

_BINS = 21
_LEGEND = _BINS * 9 + 64
_ROWS_PER_CLUSTER = 40
_CLUSTERS = 24
_CELL = (18, 9)
_LEFT, _TOP = 190, 24
_BLUE, _ORANGE = (5, 80, 160), (190, 75, 0)
_LIGHT_BLUE, _LIGHT_ORANGE = (110, 185, 255), (255, 165, 75)


def page(prompts: Sequence[PromptView], title: str) -> str:
    """HTML of one prompt or several, in the order given."""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(title)}</title><style>{_style()}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        "<p>Each row of a map is one remembered response, each column a decoder layer, from the first to "
        "the last. The number is the logit of the answer's first token, read from that layer. "
        "<b>Deviation</b> takes off the mean over the prompt's responses at each layer.</p>",
    ]
    parts += [_prompt(number, prompt) for number, prompt in enumerate(prompts)]
    return "".join([*parts, "</body></html>\n"])


def _prompt(number: int, prompt: PromptView) -> str:
    kind = "right" if prompt.key[1] else "wrong"
    question = html.escape(prompt.remembered.question)
    groups = [(c, c.rows[:_ROWS_PER_CLUSTER]) for c in prompt.clusters[:_CLUSTERS]]
    shown, total = sum(len(rows) for _, rows in groups), len(prompt.remembered)
    left_out = f"; the map shows the newest {shown}" if shown < total else ""
    values, name = layers_of(prompt)
    with np.errstate(invalid="ignore"):
        deviation = values - np.nanmean(values, axis=0) if np.isfinite(values).any() else values
    return (
        f"<section><h2><code>{html.escape(prompt.prompt_id[:12])}</code></h2><p class=q>{question}</p>"
        f"<p>{total} {kind} answers remembered in {len(prompt.clusters)} groups, the largest cluster has "
        f"{prompt.largest}{left_out}.</p>"
        f"<div class=maps><input type=radio name=m{number} id=d{number} class=d checked>"
        f"<label for=d{number}>deviation</label>"
        f"<input type=radio name=m{number} id=r{number} class=r><label for=r{number}>{name}</label>"
        f"<div class=dev>{heat_map(deviation, prompt, groups, f'deviation of the {name}')}</div>"
        f"<div class=raw>{heat_map(values, prompt, groups, name)}</div></div>"
        f"{_table(prompt)}</section>"
    )


def heat_map(
    values: np.ndarray, prompt: PromptView, groups: Sequence[tuple[Cluster, np.ndarray]], name: str
) -> str:
    """SVG of the rows of each group, groups one below the other.

    Args:
        values: [m, L]; colours run from blue (low) over neutral to orange (high), symmetrically about 0
            where both signs occur, else about the middle; the extreme 1 % saturate.
        groups: (cluster, numbers of the rows to show).
    """
    wide, high = _CELL
    rows = [i for _, part in groups for i in part.tolist()]
    finite = values[rows][np.isfinite(values[rows])]
    if not finite.size:
        return "<p>Nothing was kept to draw.</p>"
    low, top = np.percentile(finite, [1, 99]).tolist()
    middle = 0.0 if low < 0 < top else (low + top) / 2
    half = max(top - middle, middle - low, 1e-9)
    layers, y, drawn = values.shape[1], _TOP, []
    for place in range(0, layers, 4 if layers > 8 else 1):
        x = _LEFT + (place + 0.5) * wide
        drawn.append(f"<text x={x} y={_TOP - 8} class=t text-anchor=middle>{place + 1}</text>")
    for cluster, part in groups:
        lines = max(len(part) * high, 14)
        label = f"{cluster.name} ({len(cluster)})"
        drawn.append(f"<text x={_LEFT - 8} y={y + 10} class=t text-anchor=end>{label}</text>")
        if len(part) * high >= 26:
            answer = cluster.answers[0][0] or "(no text)"
            short = html.escape(answer if len(answer) <= 26 else answer[:25] + "…")
            drawn.append(f"<text x={_LEFT - 8} y={y + 23} class=a text-anchor=end>{short}</text>")
        for line, row in enumerate(part.tolist()):
            drawn.append(_line(values[row], prompt, row, y + line * high, middle, half))
        y += lines + 6
    width, height = _LEFT + max(layers * wide + 10, _LEGEND), y + 30
    drawn.append(_legend(middle - half, middle + half, y + 8))
    return (
        f"<svg viewBox='0 0 {width} {height}' width={width} height={height} role=img "
        f"aria-label='{html.escape(name)}: layers across, responses down, grouped by cluster'>"
        f"{''.join(drawn)}</svg>"
    )


def _line(values: np.ndarray, prompt: PromptView, row: int, y: int, middle: float, half: float) -> str:
    """One response: a rectangle per layer, with its number to be read by hovering."""
    wide, high = _CELL
    kept = prompt.remembered
    who = f"step {kept.steps[row]}, sample {kept.samples[row]}: {html.escape(kept.notes[row].answer)}"
    cells = []
    for place, value in enumerate(values.tolist()):
        if np.isfinite(value):
            bin_ = round((min(max((value - middle) / half, -1.0), 1.0) + 1) / 2 * (_BINS - 1))
            x = _LEFT + place * wide
            cells.append(
                f"<rect x={x} y={y} width={wide} height={high} class=b{bin_}>"
                f"<title>layer {place + 1}: {value:.2f}, {who}</title></rect>"
            )
    return "".join(cells)


def _legend(low: float, high: float, y: int) -> str:
    cells = "".join(
        f"<rect x={_LEFT + i * 9} y={y} width=9 height=9 class=b{i}></rect>" for i in range(_BINS)
    )
    end = _LEFT + _BINS * 9 + 8  # the number behind it ends within _LEGEND
    return (
        f"<text x={_LEFT - 8} y={y + 9} class=t text-anchor=end>{low:.1f}</text>{cells}"
        f"<text x={end} y={y + 9} class=t>{high:.1f}</text>"
    )


def _table(prompt: PromptView) -> str:
    rows = []
    for cluster in prompt.clusters[:_CLUSTERS]:
        answers = ", ".join(f"{html.escape(a or '(no text)')} &times;{n}" for a, n in cluster.answers[:5])
        more = f", {len(cluster.answers) - 5} more" if len(cluster.answers) > 5 else ""
        examples = "".join(
            f"<details><summary>step {prompt.remembered.steps[i]}, sample {prompt.remembered.samples[i]}"
            f"</summary><pre>{html.escape(prompt.remembered.notes[i].response)}</pre></details>"
            for i in cluster.rows[:3].tolist()
            if prompt.remembered.notes[i].response
        )
        rows.append(
            f"<tr><td>{cluster.name}</td><td class=n>{len(cluster)}</td>"
            f"<td class=n>{cluster.first_step}&ndash;{cluster.last_step}</td>"
            f"<td>{answers}{more}</td><td>{examples}</td></tr>"
        )
    return (
        "<table><thead><tr><th>group<th class=n>answers<th class=n>steps<th>what was answered"
        f"<th>ends of responses</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _style() -> str:
    light = _scale(_BLUE, (245, 245, 242), _ORANGE)
    dark = _scale(_LIGHT_BLUE, (38, 38, 42), _LIGHT_ORANGE)
    return (
        ":root{color-scheme:light dark;--bg:#fcfcfa;--fg:#1d1d1f;--dim:#5c5c62;--line:#d9d9d4}"
        "body{font:15px/1.5 system-ui,sans-serif;background:var(--bg);color:var(--fg);margin:2rem auto;"
        "max-width:70rem;padding:0 1rem}h1{font-size:1.4rem}h2{font-size:1.1rem;margin:2.5rem 0 .2rem}"
        ".q{white-space:pre-wrap}.t,.a{font:11px system-ui,sans-serif;fill:var(--fg)}.a{fill:var(--dim)}"
        "table{border-collapse:collapse;margin:1rem 0;width:100%}td,th{text-align:left;vertical-align:top;"
        "padding:.3rem .7rem .3rem 0;border-bottom:1px solid var(--line)}.n{text-align:right;"
        "font-variant-numeric:tabular-nums}pre{white-space:pre-wrap;font-size:12px;margin:.3rem 0}"
        "summary{cursor:pointer;color:var(--dim)}.maps{overflow-x:auto}.maps label{margin:0 1rem 0 .3rem}"
        ".dev,.raw{display:none;margin-top:.6rem}.d:checked~.dev,.r:checked~.raw{display:block}"
        + "".join(f".b{i}{{fill:{colour}}}" for i, colour in enumerate(light))
        + "@media(prefers-color-scheme:dark){:root{--bg:#161618;--fg:#ececee;--dim:#a2a2aa;--line:#35353a}"
        + "".join(f".b{i}{{fill:{colour}}}" for i, colour in enumerate(dark))
        + "}"
    )


def _scale(low: tuple[int, ...], middle: tuple[int, ...], high: tuple[int, ...]) -> list[str]:
    """_BINS colours from low over middle to high."""
    found = []
    for place in np.linspace(-1.0, 1.0, _BINS):
        end = low if place < 0 else high
        mixed = [round(m + (e - m) * abs(float(place))) for m, e in zip(middle, end, strict=True)]
        found.append("#{:02x}{:02x}{:02x}".format(*mixed))
    return found
