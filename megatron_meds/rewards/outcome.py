"""The outcome reward: right or wrong, at the last token. Knows verdicts, not how they came about."""

from collections.abc import Sequence

from megatron_meds.rewards.settings import RewardSettings
from megatron_meds.trajectory import RewardLedger, Trajectory


def add_outcome(ledger: RewardLedger, trajectories: Sequence[Trajectory], settings: RewardSettings) -> None:
    """Add `reward.correct` or `reward.wrong` as source `outcome`.

    Raises:
        ValueError: a trajectory was not graded; names the sample.
    """
    ledger.open("outcome")
    for index, trajectory in enumerate(trajectories):
        if trajectory.correct is None:
            raise ValueError(f"sample {trajectory.key} was not graded, so it has no outcome reward")
        ledger.add("outcome", index, settings.correct if trajectory.correct else settings.wrong)
