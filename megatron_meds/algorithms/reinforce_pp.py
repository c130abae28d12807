"""REINFORCE++ (arXiv 2501.03262): no critic and no group; rewards to go, whitened over the whole step.

    A_t = (G_t - mean) / std          G_t = r_t + gamma G_{t+1}, over all response tokens of the step

The paper's KL penalty on token rewards is `algorithm.kl` with `term: reward` and `estimator: k1`.
"""

from megatron_meds.algorithms.algorithm import Algorithm, complete, whitened_reward_to_go
from megatron_meds.algorithms.settings import AlgorithmSettings


def reinforce_pp(settings: AlgorithmSettings) -> Algorithm:
    """REINFORCE++ with what the settings leave open filled in."""
    return complete(settings, advantages=whitened_reward_to_go(settings.gamma, group_baseline=False))
