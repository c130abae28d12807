"""Rewards of a trajectory and the order in which they enter the ledger. Needs no torch."""

from megatron_meds.rewards.compose import compose
from megatron_meds.rewards.form import in_loss

__all__ = ["compose", "in_loss"]
