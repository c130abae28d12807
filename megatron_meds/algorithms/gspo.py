"""GSPO (arXiv 2507.18071): GRPO's advantages on a ratio of whole sequences, and clip ranges to match.

    s_i = (p(y_i) / p_old(y_i)) ^ (1 / |y_i|)        loss_i = max(-A_i s_i, -A_i clamp(s_i))

The loss of a sequence stands at each of its tokens, so that the mean over tokens is the paper's.
"""

from megatron_meds.algorithms.algorithm import Algorithm, complete, group_relative
from megatron_meds.algorithms.settings import AlgorithmSettings


def gspo(settings: AlgorithmSettings) -> Algorithm:
    """GSPO with what the settings leave open filled in."""
    return complete(
        settings,
        advantages=group_relative(settings.scale_by_std is not False),
        clip_low=3e-4,
        clip_high=4e-4,
        ratio="sequence",
    )
