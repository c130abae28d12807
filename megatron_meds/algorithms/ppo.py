"""PPO (arXiv 1707.06347) with a critic: advantages by GAE over token rewards, whitened over the whole step.

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        returns_t = A_t + V_t

V_t is the value before token t is chosen. Behind the last token V and A are 0, also where the length
limit ended a response: nothing is guessed of what would have followed. The critic learns the
returns, the policy the whitened advantages.
"""

from collections.abc import Sequence

import numpy as np

from megatron_meds.algorithms.advantages import AddUp
from megatron_meds.algorithms.algorithm import Algorithm, complete, estimate, known, whitened
from megatron_meds.algorithms.settings import AlgorithmSettings
from megatron_meds.trajectory import RewardLedger, Trajectory


def ppo(settings: AlgorithmSettings) -> Algorithm:
    """PPO with what the settings leave open filled in."""
    gamma, lam = settings.gamma, settings.lam

    def of_step(
        ledger: RewardLedger, trajectories: Sequence[Trajectory]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        values = [known(t.values, "values", t).astype(np.float64) for t in trajectories]
        return estimate(ledger.token_rewards(), values, gamma, lam)

    def advantages(
        ledger: RewardLedger, trajectories: Sequence[Trajectory], whole: AddUp = np.asarray
    ) -> list[np.ndarray]:
        plain, _ = of_step(ledger, trajectories)
        return whitened(plain, ledger.totals(), whole)

    def returns(ledger: RewardLedger, trajectories: Sequence[Trajectory]) -> list[np.ndarray | None]:
        _, found = of_step(ledger, trajectories)
        return [
            targets.astype(np.float32) if np.isfinite(total) else None
            for targets, total in zip(found, ledger.totals(), strict=True)
        ]

    return complete(settings, advantages=advantages, dual_clip=3.0, aggregation="token-mean", returns=returns)
