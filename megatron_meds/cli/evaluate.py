"""`megatron-meds evaluate`: models on benchmarks, with intervals, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PAPER = "aime24,amc23,math500,minerva,olympiadbench"


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Hugging Face folders, run folders or checkpoints; the first is what others are compared "
            "with. Settings go among them: rollout.server.tensor_parallel=2",
            show_default=False,
        ),
    ],
    sets: Annotated[
        str, typer.Option(help="Known sets (`megatron-meds data list` does) and files, by comma.")
    ] = PAPER,
    samples: Annotated[int, typer.Option(help="Responses to each problem.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy.", min=0.0)] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.001, max=1.0)] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Longest response.", min=1)] = 8192,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    out: Annotated[Path, typer.Option(help="Where answers and tables go; the same to go on.")] = Path(
        "evaluation"
    ),
    url: Annotated[
        list[str] | None, typer.Option(help="Servers that run the model already, instead of starting some.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="First problems of each set only.", min=1)] = None,
    responses: Annotated[bool, typer.Option("--responses", help="Also write the texts.")] = False,
) -> None:
    """Sample every problem N times and print unbiased pass@k with 95 % intervals.

    Writes OUT/MODEL/SET.jsonl (a line for each problem's graded samples, as they come), OUT/results.json,
    OUT/table.md and OUT/table.tex. Started again with the same --out, it goes on where it was; more --samples
    are added to those that are there.
    """
    from megatron_meds.evaluate.command import Wanted, run

    run(
        Wanted(
            models=[m for m in models if not _is_setting(m)],
            overrides=[m for m in models if _is_setting(m)],
            sets=[name.strip() for name in sets.split(",") if name.strip()],
            samples=samples,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            seed=seed,
            out=out,
            urls=url or [],
            limit=limit,
            responses=responses,
        )
    )


def _is_setting(text: str) -> bool:
    """`a.b=value`, rather than a path."""
    key, equals, _ = text.partition("=")
    return bool(equals) and "/" not in key and not Path(text).exists()
