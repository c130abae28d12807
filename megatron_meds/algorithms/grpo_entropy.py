"""GRPO with an entropy advantage (arXiv 2506.14758): tokens where the policy was undecided count more.

A_t += min(alpha H_t, |A_t| / kappa)             H_t: token entropy of the policy, no gradient
"""

from megatron_meds.algorithms.algorithm import Algorithm, complete, group_relative
from megatron_meds.algorithms.settings import AlgorithmSettings


def grpo_entropy(settings: AlgorithmSettings) -> Algorithm:
    """GRPO with entropy advantage, with what the settings leave open filled in."""
    return complete(
        settings,
        advantages=group_relative(settings.scale_by_std is not False),
        entropy_advantage=settings.entropy_advantage,
    )
