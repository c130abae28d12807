"""Data sets to prompts, and to examples for supervised training.

Joins sets, drops questions asked before, and leaves out what is too long; everything left out is
counted. Knows nothing of steps or replicas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from megatron_meds.data.datasets import Counts, DataError, Row, load_rows, unique_rows
from megatron_meds.data.known import Places
from megatron_meds.data.settings import DatasetSettings, DataSettings
from megatron_meds.data.templates import Template
from megatron_meds.trajectory import Prompt, Trajectory, prompt_id


def places_of(settings: DataSettings) -> Places:
    """Where these settings have sets looked for."""
    return Places(settings.folder, settings.cache)


def load_training_prompts(
    sets: Sequence[DatasetSettings],
    template: Template,
    max_prompt_tokens: int,
    places: Places | None = None,
) -> tuple[list[Prompt], Counts]:
    """The questions of all sets, each once, in the order of the sets; those whose prompt has more
    than `max_prompt_tokens` tokens are left out.

    Raises:
        DataError: a set cannot be read, or nothing is left.
    """
    counts = Counts()
    rows = unique_rows((row for one in sets for row in load_rows(one, counts, places)), counts)
    prompts = _prompts(rows, template)
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    counts.too_long = len(prompts) - len(kept)
    if not kept:
        raise DataError(f"data.train: {counts}, and none is left; raise data.max_prompt_tokens")
    return kept, counts


def load_evaluation_prompts(
    sets: Sequence[DatasetSettings],
    template: Template,
    max_prompt_tokens: int,
    places: Places | None = None,
) -> dict[str, list[Prompt]]:
    """Every row of every set, by the set's label. Nothing is left out, since the measure would change.

    Raises:
        DataError: a set cannot be read, two share a label, or a prompt is too long.
    """
    found: dict[str, list[Prompt]] = {}
    for one in sets:
        if one.label in found:
            raise DataError(f"data.evaluation: two sets are called {one.label!r}; give each a `name`")
        rows = load_rows(one, places=places)
        found[one.label] = _prompts(rows, template)
        for row, prompt in zip(rows, found[one.label], strict=True):
            if len(prompt.token_ids) > max_prompt_tokens:
                raise DataError(
                    f"{row.place}: the prompt has {len(prompt.token_ids)} tokens, "
                    f"data.max_prompt_tokens is {max_prompt_tokens}; raise it"
                )
    return found


def load_examples(
    sets: Sequence[DatasetSettings],
    template: Template,
    max_prompt_tokens: int,
    max_response_tokens: int,
    places: Places | None = None,
) -> tuple[list[Trajectory], Counts]:
    """Rows with a response as trajectories nobody sampled: end-of-text included, sampler
    log-probabilities NaN. A question may come with many responses; `sample` numbers them.
    Examples with a longer prompt or response (tokens, end-of-text included) are left out.

    Raises:
        DataError: a set cannot be read, names no response column, or nothing is left.
    """
    counts = Counts()
    rows = [row for one in sets for row in load_rows(one, counts, places)]
    if any(row.response is None for row in rows):
        raise DataError("data.train: sft needs fields.response, the column that holds the response to learn")
    prompts = _prompts(rows, template)
    responses = [row.response or "" for row in rows]
    numbers: Counter[str] = Counter()
    examples = []
    for prompt, text, ids in zip(prompts, responses, template.response_ids(responses), strict=True):
        if len(prompt.token_ids) > max_prompt_tokens or len(ids) > max_response_tokens:
            counts.too_long += 1
            continue
        examples.append(
            Trajectory(
                prompt=prompt,
                sample=numbers[prompt.id],
                response_ids=ids,
                text=text,
                rollout_logprobs=[math.nan] * len(ids),
                finish_reason="stop",
                weight_version=0,
            )
        )
        numbers[prompt.id] += 1
    if not examples:
        raise DataError(
            f"data.train: {counts}, and none is left; raise data.max_prompt_tokens or rollout.max_tokens"
        )
    return examples, counts


def _prompts(rows: Sequence[Row], template: Template) -> list[Prompt]:
    ids = template.token_ids([template.text(row.question, row.system) for row in rows])
    return [
        Prompt(
            id=prompt_id(row.question),
            question=row.question,
            token_ids=token_ids,
            answer=row.answer,
            source=row.source,
            extra=row.extra,
        )
        for row, token_ids in zip(rows, ids, strict=True)
    ]
