"""What a run would need: memory of a GPU by part, seconds of a step by phase. Needs no torch and no GPU."""
