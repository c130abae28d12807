"""What is minimised: advantages from rewards, losses from advantages, and one short file per algorithm.

Knows trajectories and their ledger; knows neither how a model is run nor how a reward comes about.
Names are imported when they are first asked for, so that the settings can be read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_meds.algorithms.advantages import (
        gae,
        group_advantages,
        reward_to_go,
        rloo_advantages,
        whiten,
    )
    from megatron_meds.algorithms.algorithm import Algorithm
    from megatron_meds.algorithms.filtering import mixed
    from megatron_meds.algorithms.losses import (
        aggregate,
        clipped_surrogate,
        entropy,
        entropy_advantages,
        kl_k1,
        kl_k3,
        policy_loss,
        sequence_means,
        token_policy_loss,
        token_value_loss,
        token_weights,
        truncated_importance_weights,
        value_loss,
    )
    from megatron_meds.algorithms.recipe import resolve

_HOME = {
    "gae": "advantages",
    "group_advantages": "advantages",
    "reward_to_go": "advantages",
    "rloo_advantages": "advantages",
    "whiten": "advantages",
    "Algorithm": "algorithm",
    "mixed": "filtering",
    "aggregate": "losses",
    "clipped_surrogate": "losses",
    "entropy": "losses",
    "entropy_advantages": "losses",
    "kl_k1": "losses",
    "kl_k3": "losses",
    "policy_loss": "losses",
    "sequence_means": "losses",
    "token_policy_loss": "losses",
    "token_value_loss": "losses",
    "token_weights": "losses",
    "truncated_importance_weights": "losses",
    "value_loss": "losses",
    "resolve": "recipe",
}

__all__ = [
    "Algorithm",
    "aggregate",
    "clipped_surrogate",
    "entropy",
    "entropy_advantages",
    "gae",
    "group_advantages",
    "kl_k1",
    "kl_k3",
    "mixed",
    "policy_loss",
    "resolve",
    "reward_to_go",
    "rloo_advantages",
    "sequence_means",
    "token_policy_loss",
    "token_value_loss",
    "token_weights",
    "truncated_importance_weights",
    "value_loss",
    "whiten",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
