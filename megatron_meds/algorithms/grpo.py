"""GRPO (arXiv 2402.03300): group-relative advantages, symmetric clip, mean over sequences of token means.

The paper's KL term to the reference policy is `algorithm.kl` (k3, in the loss).
"""

from megatron_meds.algorithms.algorithm import Algorithm, complete, group_relative
from megatron_meds.algorithms.settings import AlgorithmSettings


def grpo(settings: AlgorithmSettings) -> Algorithm:
    """GRPO with what the settings leave open filled in."""
    return complete(settings, advantages=group_relative(settings.scale_by_std is not False))
