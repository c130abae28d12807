"""What the studies on the tiny reasoner have in common: held-out samples, results that are kept, cells."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron_meds.data.settings import TemplateSettings
from megatron_meds.data.templates import Template, end_token_ids, load_tokenizer
from megatron_meds.rollout.client import Client, Request
from megatron_meds.rollout.settings import RolloutSettings

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tiny_reasoner"
SAMPLES = 16
_MAX_RESPONSE = 256
_SEED = 10_000


def problems(name: str) -> list[dict]:
    """Rows of `train` or `heldout`."""
    return [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()]


def held_out_samples(
    urls: Sequence[str], rows: list[dict], version: int | None
) -> list[list[tuple[str, int]]]:
    """SAMPLES responses to each problem from the servers' present weights at temperature 1.

    Args:
        version: the weights' version; None: those the servers were started with.

    Returns:
        Per problem (text, tokens) of each response.
    """
    model = EXAMPLE / "model"
    tokenizer = load_tokenizer(model)
    template = Template(TemplateSettings(), tokenizer)
    prompts = template.token_ids([template.text(row["question"]) for row in rows])
    client = Client(
        urls, RolloutSettings(max_tokens=_MAX_RESPONSE), stop_token_ids=end_token_ids(tokenizer, model)
    )
    client.version = version
    requests = [Request(list(ids), SAMPLES, _SEED + SAMPLES * i) for i, ids in enumerate(prompts)]
    return [
        [(str(tokenizer.decode(s.token_ids, skip_special_tokens=True)), len(s.token_ids)) for s in group]
        for group in client.sample(requests)
    ]


def kept(file: Path, make: Callable[[], dict]) -> dict:
    """What a file holds, or what `make` gives, which is then kept in it."""
    if not file.exists():
        text = json.dumps(make(), indent=1)
        file.write_text(text)
    return json.loads(file.read_text())


def mean(values: Iterable[float | None]) -> float:
    """Of those that are there; NaN without any."""
    there = [v for v in values if v is not None]
    return statistics.mean(there) if there else float("nan")


def share(values: Sequence[float]) -> str:
    """A mean as %, with the standard deviation over seeds where there are several."""
    text = f"{100 * statistics.mean(values):.1f} %"
    return f"{text} ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else text


def number(values: Sequence[float], digits: int = 2) -> str:
    """A mean, with the standard deviation over seeds where there are several."""
    text = f"{statistics.mean(values):.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text
