"""The outcome reward: right or wrong, at the last token. Knows verdicts, not how they came about."""

from collections.abc import Sequence

from megatron_meds.rewards.form import format_reward
from megatron_meds.rewards.settings import RewardSettings
from megatron_meds.trajectory import RewardLedger, Trajectory


def add_outcome(ledger: RewardLedger, trajectories: Sequence[Trajectory], settings: RewardSettings) -> None:
    """Add `reward.correct` or `reward.wrong` as source `outcome`; with `reward.form.replaces_outcome` not
    where the form is punished.

    Raises:
        ValueError: a trajectory was not graded; names the sample.
    """
    ledger.open("outcome")
    for index, trajectory in enumerate(trajectories):
        if trajectory.correct is None:
            raise ValueError(f"sample {trajectory.key} was not graded, so it has no outcome reward")
        if settings.form.replaces_outcome and format_reward(trajectory.text, settings.form):
            continue
        ledger.add("outcome", index, settings.correct if trajectory.correct else settings.wrong)
