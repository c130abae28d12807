"""The prefixes of a response whose accuracies reward its steps, cut from its own token ids.

Knows ids, text and a function that decodes; knows neither a tokenizer nor who continues the prefixes.
Letters: P steps, and so P + 1 prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_meds.tokens import Decode, TokenMap
from megatron_meds.vsrm.steps import Region, StepRules, find_region, split_steps


@dataclass(frozen=True)
class StepPlan:
    """The steps of one response and the prefixes to be continued. No steps: all lists are empty."""

    offsets: list[int] = field(default_factory=list)
    """[P] characters at which the steps begin."""
    bounds: list[int] = field(default_factory=list)
    """[P + 1] step j is the response tokens bounds[j] to bounds[j + 1] - 1; the last one ends with the
    closing tag, where there is one."""
    prefixes: list[tuple[int, ...]] = field(default_factory=list)
    """[P + 1] ids to be continued: the prompt, the response up to the step, the closing tag."""
    thinned: int = 0
    """Prefixes left out to keep to `most`."""
    dropped: int = 0
    """Prefixes left out because an answer would have no room behind them."""

    def __len__(self) -> int:
        return len(self.offsets)


def plan_prefixes(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    text: str,
    decode: Decode,
    close_ids: Sequence[int],
    rules: StepRules | None = None,
    *,
    opened: bool = False,
    truncated: Literal["close", "opening"] = "close",
    most: int | None = None,
    longest: int | None = None,
) -> StepPlan:
    """Cut a response at its steps: P prefixes that end before a step, and the whole reasoning.

    A cut falls before the token that holds the first character of a step, so that two splits within
    one token are one. Prefixes that are too long are left out first, then the rest is thinned evenly;
    steps between neighbours that are left become one.

    Args:
        text: `decode` of the response ids.
        close_ids: the closing tag; whole reasoning that is closed keeps its own.
        opened: the prompt ends with the opening tag.
        truncated: the last prefix of reasoning that was never closed: all of it, closed (`close`), or
            nothing but the opening tag, closed (`opening`, as released).
        most: prefixes of a response, 2 or more; None: no limit.
        longest: tokens of a prefix that leave room for an answer; None: no limit.

    Raises:
        ValueError: `text` is not what the ids decode to, `most` is below 2, or there are no `close_ids`.
    """
    if most is not None and most < 2:
        raise ValueError(f"most = {most}: a step lies between two prefixes")
    if not close_ids:
        raise ValueError("close_ids: the closing tag must have one id or more")
    rules = rules or StepRules.sound()
    region = find_region(text, rules, opened)
    if region is None or region.start == region.end:
        return StepPlan()
    tokens = TokenMap(response_ids, text, decode)
    splits = split_steps(text, rules, opened=opened, token_at=tokens.at)
    first = tokens.at(region.start - 1) + 1 if region.start else 0
    end = tokens.at(_last_character(region, rules)) + 1
    cuts: dict[int, int] = {}
    for split in splits:
        cut = max(tokens.at(split), first)
        if cut < end:
            cuts.setdefault(cut, split)
    if not cuts:
        return StepPlan()
    prompt, response, close = tuple(prompt_ids), tuple(response_ids), tuple(close_ids)
    prefixes = [prompt + response[:cut] + close for cut in cuts]
    if region.closed:
        prefixes.append(prompt + response[:end])
    else:
        prefixes.append(prompt + response[: end if truncated == "close" else first] + close)
    fitting = [j for j, p in enumerate(prefixes) if longest is None or len(p) <= longest]
    kept = thin_evenly(fitting, most)
    dropped, thinned = len(prefixes) - len(fitting), len(fitting) - len(kept)
    if len(kept) < 2:
        return StepPlan(dropped=dropped, thinned=thinned)
    bounds, offsets = [*cuts, end], [*cuts.values()]
    return StepPlan(
        offsets=[offsets[j] for j in kept[:-1]],
        bounds=[bounds[j] for j in kept],
        prefixes=[prefixes[j] for j in kept],
        thinned=thinned,
        dropped=dropped,
    )


def thin_evenly(items: Sequence[int], most: int | None) -> list[int]:
    """At most `most` (2 or more) of the items in their order, evenly spread, the first and the last among
    them."""
    if most is None or len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[(2 * i * last + most - 1) // (2 * (most - 1))] for i in range(most)]


def _last_character(region: Region, rules: StepRules) -> int:
    """Of the reasoning with its closing tag, where it has one."""
    return region.end - 1 + (len(rules.close_tag) if region.closed else 0)
