"""RLOO (arXiv 2402.14740): each reward against the mean of its siblings', the whole response one action.

The log-probability of a response is the sum over its tokens, which `seq-mean-token-sum` gives. The
paper's KL term is `algorithm.kl` with `term: reward` and `estimator: k1`. Several updates of one step
are kept near by PPO's clip, which the paper leaves out; the first one has ratio 1.
"""

from collections.abc import Sequence

import numpy as np

from megatron_meds.algorithms.advantages import AddUp, rloo_advantages
from megatron_meds.algorithms.algorithm import Algorithm, complete, prompts_of, spread
from megatron_meds.algorithms.settings import AlgorithmSettings
from megatron_meds.trajectory import RewardLedger, Trajectory


def rloo(settings: AlgorithmSettings) -> Algorithm:
    """RLOO with what the settings leave open filled in."""
    return complete(settings, advantages=_advantages, aggregation="seq-mean-token-sum")


def _advantages(
    ledger: RewardLedger, trajectories: Sequence[Trajectory], whole: AddUp = np.asarray
) -> list[np.ndarray]:
    per_sequence = np.asarray(rloo_advantages(ledger.totals(), prompts_of(trajectories)))
    return spread(per_sequence, [len(t) for t in trajectories])
