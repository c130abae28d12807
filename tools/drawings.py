"""Draw docs/house.svg and docs/step.svg: `python tools/drawings.py` (`--check` compares only).

Plain SVG without a background: boxes carry their own fill, and colours follow the reader's light or dark
scheme.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
STYLE = """
text { font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 12.5px; fill: #1c2430 }
.title { font-weight: 600; font-size: 13.5px }
.small { font-size: 11.5px; fill: #4d5866 }
.plain { fill: #f4f6f8; stroke: #8a95a3 }
.actor { fill: #dcebfb; stroke: #3b78b5 }
.vllm { fill: #fde9d3; stroke: #c1772a }
.both { fill: #e6e2f5; stroke: #6f5fae }
.free { fill: #ddf3e2; stroke: #3c8f55 }
.frame { fill: none; stroke-width: 1.5; stroke-dasharray: 5 4 }
.megatron-frame { stroke: #3b78b5 }
.vllm-frame { stroke: #c1772a }
.lane { fill: #8a95a3; fill-opacity: 0.10; stroke: none }
.arrow { fill: none; stroke: #6d7886; stroke-width: 1.6; marker-end: url(#head) }
#head path { fill: #6d7886 }
@media (prefers-color-scheme: dark) {
  text { fill: #e8edf3 }
  .small { fill: #aeb9c6 }
  .plain { fill: #2a313a; stroke: #7c8794 }
  .actor { fill: #1d3a57; stroke: #6aa6e0 }
  .vllm { fill: #4c3218; stroke: #e0a05a }
  .both { fill: #352f55; stroke: #a598e0 }
  .free { fill: #1d402a; stroke: #6cc386 }
  .megatron-frame { stroke: #6aa6e0 }
  .vllm-frame { stroke: #e0a05a }
  .arrow { stroke: #9aa6b4 }
  #head path { fill: #9aa6b4 }
}
"""


def box(x: float, y: float, w: float, h: float, kind: str, title: str, lines: Sequence[str] = ()) -> str:
    """A filled box: a title and lines of text from its top left."""
    parts = [f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="6"/>']
    parts.append(text(x + 10, y + 20, title, "title"))
    parts += [text(x + 10, y + 39 + 16 * i, line, "small") for i, line in enumerate(lines)]
    return "\n".join(parts)


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def frame(x: float, y: float, w: float, h: float, kind: str) -> str:
    return f'<rect class="frame {kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="10"/>'


def arrow(*points: tuple[float, float]) -> str:
    path = " L".join(f"{x} {y}" for x, y in points)
    return f'<path class="arrow" d="M{path}"/>'


def drawing(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>'
    )
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">'
    )
    return "\n".join([opening, f"<style>{STYLE}</style>", head, *parts, "</svg>"]) + "\n"


def house() -> str:
    """Folders, and who knows what."""
    parts = [
        box(
            20,
            16,
            900,
            48,
            "plain",
            "cli/",
            ["train, check-sync, convert, data, memory, doctor: arguments in, messages out"],
        ),
        arrow((470, 64), (470, 84)),
        box(
            20,
            86,
            900,
            66,
            "plain",
            "train.py",
            [
                "the loop; run.py and supervised.py do its lines, workspace.py has what both need",
                "imported by cli only",
            ],
        ),
        arrow((160, 152), (160, 194)),
        arrow((470, 152), (470, 194)),
        arrow((770, 152), (770, 194)),
        frame(12, 174, 612, 168, "megatron-frame"),
        frame(318, 186, 610, 168, "vllm-frame"),
        text(22, 334, "may import Megatron-Core", "small"),
        text(918, 346, "may import vLLM (weights: its transports)", "small", "end"),
        box(
            24,
            196,
            280,
            118,
            "actor",
            "actor/",
            [
                "mesh: ranks, replicas, heads",
                "model, batches, pipeline",
                "scoring: the pass for log-probs",
                "learning: backward, optimizer",
                "state: checkpoints for any layout",
            ],
        ),
        box(
            330,
            196,
            284,
            118,
            "both",
            "weights/",
            [
                "families: one table per model family",
                "reshard: cut and join by that table",
                "huggingface, export: to and from a live actor",
                "shm, sync: to the servers",
            ],
        ),
        box(
            640,
            196,
            278,
            118,
            "vllm",
            "rollout/",
            [
                "server: start, watch, restart vLLM",
                "client: token ids in and out, HTTP",
                "sampler: prompts to trajectories",
                "dealing: which replica learns what",
            ],
        ),
        box(
            20,
            370,
            440,
            86,
            "free",
            "algorithms/, meds/, verify/",
            [
                "losses, one file an algorithm; memory of mistakes; grading",
                "import nothing of ours but trajectory, section, imports:",
                "any trainer can use them",
            ],
        ),
        box(
            480,
            370,
            440,
            86,
            "plain",
            "rewards/, data/, tracking/",
            [
                "who writes what into the ledger; prompts; metrics",
                "rewards and tracking know no model,",
                "data knows tokenizers",
            ],
        ),
        box(
            20,
            476,
            900,
            66,
            "plain",
            "trajectory.py, config.py, checks.py, every settings.py, errors.py, agreement.py",
            [
                "what flows, what a run is told, how it fails: no torch, no Megatron-Core, no vLLM",
                "known to all",
            ],
        ),
    ]
    return drawing(940, 556, "The folders of megatron_meds and who may import whom", parts)


def step() -> str:
    """One step over servers, heads and ranks."""
    lanes = (("servers", 40), ("heads", 180), ("every rank", 320))
    parts = []
    for name, y in lanes:
        parts.append(f'<rect class="lane" x="8" y="{y - 12}" width="1064" height="112" rx="8"/>')
        parts.append(text(18, y + 8, name, "title"))
    columns = {"sync": 110, "sample": 300, "score": 500, "reward": 690, "update": 880}
    parts += [text(x, 20, f"{i}  {name}", "title") for i, (name, x) in enumerate(columns.items(), 1)]
    sync, sample, score, reward, update = columns.values()
    parts += [
        box(
            sync,
            320,
            165,
            88,
            "actor",
            "live shards",
            ["joined over tensor ranks,", "sent to the last stage:", "Hugging Face tensors"],
        ),
        box(sync, 184, 165, 84, "both", "the sender", ["buckets by shared", "memory or NCCL"]),
        box(sync, 44, 165, 84, "vllm", "load", ["new version,", "old prefixes dropped"]),
        arrow((sync + 82, 320), (sync + 82, 270)),
        arrow((sync + 82, 184), (sync + 82, 130)),
        box(sample, 44, 175, 84, "vllm", "sample", ["token ids, log-probs,", "weight version"]),
        box(
            sample,
            184,
            175,
            88,
            "plain",
            "ask, grade, deal",
            ["groups kept or asked anew,", "whole groups to the", "replica with fewest tokens"],
        ),
        arrow((sample + 60, 184), (sample + 60, 130)),
        arrow((sample + 115, 128), (sample + 115, 182)),
        arrow((sync + 165, 86), (sample - 2, 86)),
        box(
            score,
            320,
            170,
            88,
            "actor",
            "one pipeline pass",
            ["forward only: log-probs", "and entropies of the", "response tokens"],
        ),
        arrow((sample + 175, 228), (score + 85, 228), (score + 85, 318)),
        box(
            reward,
            184,
            170,
            84,
            "free",
            "ledger, advantages",
            ["each source by name,", "each reward at its token"],
        ),
        arrow((score + 170, 364), (reward + 85, 364), (reward + 85, 270)),
        box(
            update,
            320,
            180,
            88,
            "actor",
            "backward, step",
            ["per mini-batch: gradients", "reduced over replicas,", "then AdamW"],
        ),
        arrow((reward + 170, 226), (update + 90, 226), (update + 90, 318)),
        arrow((update + 90, 408), (update + 90, 446), (sync + 82, 446), (sync + 82, 410)),
        text(540, 440, "next step", "small", "middle"),
    ]
    return drawing(1080, 456, "One step: sync, sample, score, reward, update", parts)


def main() -> int:
    """Write the drawings; with --check, 1 if the files differ from them."""
    drawings = {DOCS / "house.svg": house(), DOCS / "step.svg": step()}
    if "--check" in sys.argv[1:]:
        stale = [path for path, content in drawings.items() if path.read_text() != content]
        for path in stale:
            print(f"{path} is not what tools/drawings.py draws: run it")
        return int(bool(stale))
    for path, content in drawings.items():
        path.write_text(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
