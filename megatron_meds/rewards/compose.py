"""Who writes what into the ledger, in which order: outcome, format, overlong, length, custom.

The one place that knows all sources of a sample's own reward. What depends on other samples of the
run (penalties from a memory, step rewards) comes after, from those who compute it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from megatron_meds.imports import load_function
from megatron_meds.rewards.form import add_format, add_length, add_overlong
from megatron_meds.rewards.outcome import add_outcome
from megatron_meds.rewards.settings import RewardSettings
from megatron_meds.trajectory import RewardLedger, Trajectory


def compose(trajectories: Sequence[Trajectory], settings: RewardSettings, max_tokens: int) -> RewardLedger:
    """The ledger of graded trajectories: every source the settings ask for, each at the last token.

    Args:
        trajectories: graded; all of this replica's, since a user's function sees them in one list.
        settings: which sources, and how much.
        max_tokens: longest response the sampler may give, tokens (overlong punishment, length penalty).

    Returns:
        A ledger over `trajectories`, with the sources in use opened in the order above.

    Raises:
        FunctionError: `reward.function` leads to no function.
        ValueError: a trajectory was not graded, or the function gave an infinite number (the sample
            is named) or the wrong count of numbers.
    """
    ledger = RewardLedger(trajectories)
    if not settings.function_replaces_outcome:
        add_outcome(ledger, trajectories, settings)
    if settings.form.no_box or settings.form.unclosed:
        add_format(ledger, trajectories, settings.form)
    if settings.overlong.buffer:
        add_overlong(ledger, trajectories, settings.overlong, max_tokens)
    if settings.length.penalty:
        add_length(ledger, trajectories, settings.length, max_tokens)
    if settings.function is not None:
        add_custom(ledger, trajectories, load_function(settings.function, "reward.function"))
    return ledger


def add_custom(
    ledger: RewardLedger,
    trajectories: Sequence[Trajectory],
    function: Callable[[list[Trajectory]], Sequence[float]],
) -> None:
    """Add what a user's function says, as source `custom`.

    A NaN says that the sample cannot be scored: it is marked so in the ledger, its group does without
    it, and it gets advantage 0.

    Raises:
        ValueError: infinite, or not one number per trajectory.
        TypeError: not a number; names the sample.
    """
    ledger.open("custom")
    values = list(function(list(trajectories)))
    if len(values) != len(trajectories):
        raise ValueError(f"reward.function gave {len(values)} numbers for {len(trajectories)} trajectories")
    for index, (trajectory, value) in enumerate(zip(trajectories, values, strict=True)):
        number = _number(value, trajectory)
        if math.isnan(number):
            ledger.mark_unscored("custom", index)
        else:
            ledger.add("custom", index, number)  # refuses an infinite one, by name


def _number(value: Any, trajectory: Trajectory) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"reward.function gave {value!r:.80} for sample {trajectory.key}") from error
