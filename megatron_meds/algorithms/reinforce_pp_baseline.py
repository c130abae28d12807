"""REINFORCE++ with a baseline (arXiv 2501.03262): a prompt's mean reward comes off before whitening.

    A_t = (G_t - mean) / std          G_t of rewards whose last token has the group's mean total taken off

With a reward at the last token only and gamma 1, G_t is reward minus group mean at every token.
"""

from megatron_meds.algorithms.algorithm import Algorithm, complete, whitened_reward_to_go
from megatron_meds.algorithms.settings import AlgorithmSettings


def reinforce_pp_baseline(settings: AlgorithmSettings) -> Algorithm:
    """REINFORCE++ baseline with what the settings leave open filled in."""
    return complete(settings, advantages=whitened_reward_to_go(settings.gamma, group_baseline=True))
