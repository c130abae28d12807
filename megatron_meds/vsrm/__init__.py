"""VSRM: every step of a chain of thought rewarded by the accuracy it gained.

Needs numpy only; knows trajectories and their ledger, and neither a model nor who continues a prefix.
Names are imported when they are first asked for, so that the settings can be read without the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_meds.vsrm.alone import RewardedSteps, reward_steps
    from megatron_meds.vsrm.prefixes import StepPlan, plan_prefixes, thin_evenly
    from megatron_meds.vsrm.rewards import enter_steps, least_change, step_rewards
    from megatron_meds.vsrm.steps import Region, StepRules, find_region, split_steps

_HOME = {
    "Region": "steps",
    "RewardedSteps": "alone",
    "StepPlan": "prefixes",
    "StepRules": "steps",
    "enter_steps": "rewards",
    "find_region": "steps",
    "least_change": "rewards",
    "plan_prefixes": "prefixes",
    "reward_steps": "alone",
    "split_steps": "steps",
    "step_rewards": "rewards",
    "thin_evenly": "prefixes",
}

__all__ = [
    "Region",
    "RewardedSteps",
    "StepPlan",
    "StepRules",
    "enter_steps",
    "find_region",
    "least_change",
    "plan_prefixes",
    "reward_steps",
    "split_steps",
    "step_rewards",
    "thin_evenly",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
