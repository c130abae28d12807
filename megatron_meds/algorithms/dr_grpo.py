"""Dr. GRPO (arXiv 2503.20783): GRPO without its two biases: no division by the group's standard
deviation, and none by a response's own length but by the longest allowed.
"""

from megatron_meds.algorithms.algorithm import Algorithm, complete, group_relative
from megatron_meds.algorithms.settings import AlgorithmSettings


def dr_grpo(settings: AlgorithmSettings) -> Algorithm:
    """Dr. GRPO with what the settings leave open filled in."""
    return complete(
        settings,
        advantages=group_relative(settings.scale_by_std is True),
        aggregation="seq-mean-token-sum-norm",
    )
