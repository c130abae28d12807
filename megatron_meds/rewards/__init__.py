"""Rewards of a trajectory and the order in which they enter the ledger."""
