"""vLLM servers and what is asked of them."""
