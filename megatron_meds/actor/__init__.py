"""The policy that learns: Megatron-Core model, score pass and update. Imports nothing on its own."""
