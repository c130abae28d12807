"""DAPO (arXiv 2503.14476): GRPO's advantages, a higher upper clip, every token of equal weight.

Its dynamic sampling is `rollout.dynamic_sampling` (the predicate is `filtering.mixed`), its soft
overlong punishment and overlong filtering are `reward.overlong`. The dual clip for negative
advantages is not in the paper.
"""

from megatron_meds.algorithms.algorithm import Algorithm, complete, group_relative
from megatron_meds.algorithms.settings import AlgorithmSettings


def dapo(settings: AlgorithmSettings) -> Algorithm:
    """DAPO with what the settings leave open filled in."""
    return complete(
        settings,
        advantages=group_relative(settings.scale_by_std is not False),
        clip_high=0.28,
        dual_clip=10.0,
        aggregation="token-mean",
    )
