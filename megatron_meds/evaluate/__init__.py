"""Accuracy of models on benchmarks: unbiased pass@k, intervals, tables, evaluations that can be stopped."""

from megatron_meds.evaluate.pass_at_k import (
    Interval,
    bootstrap,
    paired_difference,
    pass_at_k,
    powers_of_two,
)

__all__ = ["Interval", "bootstrap", "paired_difference", "pass_at_k", "powers_of_two"]
