"""Rewards of a trajectory and the order in which they enter the ledger.

Names are imported when they are first asked for, so that the settings can be read alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_meds.rewards.compose import compose
    from megatron_meds.rewards.form import in_loss

_HOME = {"compose": "compose", "in_loss": "form"}

__all__ = ["compose", "in_loss"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
