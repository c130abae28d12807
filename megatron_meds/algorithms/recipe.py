"""From settings to an algorithm: the one place that lists the algorithms by name."""

from megatron_meds.algorithms.algorithm import Algorithm
from megatron_meds.algorithms.dapo import dapo
from megatron_meds.algorithms.grpo import grpo
from megatron_meds.algorithms.settings import AlgorithmSettings

_ALGORITHMS = {"grpo": grpo, "dapo": dapo}


def resolve(settings: AlgorithmSettings) -> Algorithm:
    """The algorithm the settings name, with its own values where they leave one open.

    Raises:
        ValueError: `sft`, which learns from given responses and has no rewards.
    """
    if settings.name not in _ALGORITHMS:
        raise ValueError(
            f"algorithm.name={settings.name} has no advantages and no policy loss; "
            f"algorithms that learn from rewards: {', '.join(_ALGORITHMS)}"
        )
    return _ALGORITHMS[settings.name](settings)
