"""Rewards for the form of a response: is there a box, was the reasoning closed, is it too long.

Knows text and lengths; knows nothing of right and wrong.
"""

from collections.abc import Sequence

from megatron_meds.rewards.settings import FormatSettings, LengthSettings, OverlongSettings
from megatron_meds.trajectory import RewardLedger, Trajectory
from megatron_meds.verify import last_boxed


def add_format(ledger: RewardLedger, trajectories: Sequence[Trajectory], settings: FormatSettings) -> None:
    """Add what a missing close of the reasoning, or else a missing box, costs, as source `format`."""
    ledger.open("format")
    for index, trajectory in enumerate(trajectories):
        if value := format_reward(trajectory.text, settings):
            ledger.add("format", index, value)


def format_reward(text: str, settings: FormatSettings) -> float:
    """`unclosed` if the reasoning is to be closed and never was; else `no_box` if the last box is
    missing, empty or unterminated; else 0."""
    if settings.think_close is not None and settings.think_close not in text:
        return settings.unclosed
    return settings.no_box if last_boxed(text) is None else 0.0


def add_overlong(
    ledger: RewardLedger, trajectories: Sequence[Trajectory], settings: OverlongSettings, max_tokens: int
) -> None:
    """Add the soft overlong punishment at the last token, as source `overlong`.

    Args:
        max_tokens: longest response the sampler may give, tokens.

    Raises:
        ValueError: the buffer is longer than that.
    """
    if settings.buffer > max_tokens:
        raise ValueError(f"reward.overlong.buffer = {settings.buffer}: larger than the limit of {max_tokens}")
    ledger.open("overlong")
    for index, trajectory in enumerate(trajectories):
        if value := overlong_reward(len(trajectory), settings, max_tokens):
            ledger.add("overlong", index, value)


def overlong_reward(length: int, settings: OverlongSettings, max_tokens: int) -> float:
    """0 up to `max_tokens - buffer` tokens, from there linear to -factor at `max_tokens`, then constant.

    Source: DAPO (arXiv 2503.14476), equation 13.
    """
    if settings.buffer == 0:
        return 0.0
    over = length - (max_tokens - settings.buffer)
    return -settings.factor * min(max(over / settings.buffer, 0.0), 1.0)


def add_length(
    ledger: RewardLedger, trajectories: Sequence[Trajectory], settings: LengthSettings, max_tokens: int
) -> None:
    """Take off what the length of each response costs, at the last token, as source `length`."""
    ledger.open("length")
    for index, trajectory in enumerate(trajectories):
        ledger.add("length", index, -settings.penalty * len(trajectory) / max_tokens)


def in_loss(trajectories: Sequence[Trajectory], settings: OverlongSettings) -> list[bool]:
    """Which trajectories the loss learns from: all, or with overlong filtering those that ended by
    themselves. Rewards and group statistics see every trajectory."""
    return [not (settings.filter and t.truncated) for t in trajectories]
