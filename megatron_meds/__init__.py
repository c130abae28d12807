"""Reinforcement-learning post-training of reasoning models on Megatron-Core and vLLM."""

__version__ = "0.1.0"
