"""Weights between Hugging Face checkpoints, Megatron shards and vLLM servers."""
