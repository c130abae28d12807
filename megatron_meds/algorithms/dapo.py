"""DAPO (arXiv 2503.14476): GRPO's advantages, a higher upper clip, every token of equal weight.

Its dynamic sampling is `rollout.dynamic_sampling` (the predicate is `filtering.mixed`), its soft
overlong punishment and overlong filtering are `reward.overlong`. The dual clip for negative
advantages is not in the paper.
"""

from megatron_meds.algorithms.algorithm import Algorithm, group_relative
from megatron_meds.algorithms.settings import AlgorithmSettings


def dapo(settings: AlgorithmSettings) -> Algorithm:
    """DAPO with what the settings leave open filled in."""
    return Algorithm(
        name="dapo",
        advantages=group_relative(settings.scale_by_std),
        clip_low=0.2 if settings.clip_low is None else settings.clip_low,
        clip_high=0.28 if settings.clip_high is None else settings.clip_high,
        dual_clip=10.0 if settings.dual_clip is None else settings.dual_clip,
        aggregation=settings.aggregation or "token-mean",
        entropy_bonus=settings.entropy_bonus,
    )
