"""Settings of the algorithm: advantages and loss."""

from typing import Literal

from pydantic import Field

from megatron_meds.section import Section


class AlgorithmSettings(Section):
    name: Literal["sft", "grpo", "dapo"] = "dapo"
    """`sft` is supervised training on `data.train` rows that hold a response."""
    mini_batch_prompts: int | None = Field(default=None, ge=1)
    """Prompts per optimizer update; None: all of a step, one update."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's trajectories."""
    clip_low: float | None = Field(default=None, ge=0)
    """Lower clip range of the ratio; None: the algorithm's own (grpo 0.2, dapo 0.2)."""
    clip_high: float | None = Field(default=None, ge=0)
    """Upper clip range; None: the algorithm's own (grpo 0.2, dapo 0.28)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound c of the dual clip for negative advantages; None: the algorithm's own (dapo 10, grpo none);
    `.inf`: no dual clip."""
    aggregation: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = None
    """How token losses become one number; None: the algorithm's own (grpo seq-mean-token-mean, dapo
    token-mean). `seq-mean-token-sum-norm` divides by `rollout.max_tokens`."""
    scale_by_std: bool = True
    """Divide group advantages by the group's standard deviation; false is Dr. GRPO."""
    entropy_bonus: float = 0.0
    """Coefficient of the mean token entropy, added to the objective."""
