"""GRPO (arXiv 2402.03300): group-relative advantages, symmetric clip, mean over sequences of token means.

Left out of the paper's form: the KL term to a reference policy. `algorithm.scale_by_std=false` with
`algorithm.aggregation=seq-mean-token-sum-norm` is Dr. GRPO (arXiv 2503.20783).
"""

from megatron_meds.algorithms.algorithm import Algorithm, group_relative
from megatron_meds.algorithms.settings import AlgorithmSettings


def grpo(settings: AlgorithmSettings) -> Algorithm:
    """GRPO with what the settings leave open filled in."""
    return Algorithm(
        name="grpo",
        advantages=group_relative(settings.scale_by_std),
        clip_low=0.2 if settings.clip_low is None else settings.clip_low,
        clip_high=0.2 if settings.clip_high is None else settings.clip_high,
        dual_clip=settings.dual_clip,
        aggregation=settings.aggregation or "seq-mean-token-mean",
        entropy_bonus=settings.entropy_bonus,
    )
