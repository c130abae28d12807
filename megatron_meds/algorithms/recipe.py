"""From settings to an algorithm: the one place that lists the algorithms by name."""

from megatron_meds.algorithms.algorithm import Algorithm
from megatron_meds.algorithms.dapo import dapo
from megatron_meds.algorithms.dr_grpo import dr_grpo
from megatron_meds.algorithms.grpo import grpo
from megatron_meds.algorithms.grpo_entropy import grpo_entropy
from megatron_meds.algorithms.gspo import gspo
from megatron_meds.algorithms.ppo import ppo
from megatron_meds.algorithms.reinforce_pp import reinforce_pp
from megatron_meds.algorithms.reinforce_pp_baseline import reinforce_pp_baseline
from megatron_meds.algorithms.rloo import rloo
from megatron_meds.algorithms.settings import AlgorithmSettings

_ALGORITHMS = {
    function.__name__: function
    for function in (grpo, dapo, dr_grpo, gspo, grpo_entropy, rloo, reinforce_pp, reinforce_pp_baseline, ppo)
}

NAMES = tuple(_ALGORITHMS)
"""Algorithms that learn from rewards."""


def resolve(settings: AlgorithmSettings) -> Algorithm:
    """The algorithm the settings name, with its own values where they leave one open.

    Raises:
        ValueError: `sft`, which learns from given responses and has no rewards.
    """
    if settings.name not in _ALGORITHMS:
        raise ValueError(
            f"algorithm.name={settings.name} has no advantages and no policy loss; "
            f"algorithms that learn from rewards: {', '.join(NAMES)}"
        )
    return _ALGORITHMS[settings.name](settings)
