"""Settings of what a run writes down about itself."""

from typing import Literal

from pydantic import Field

from megatron_meds.section import Section


class TrackingSettings(Section):
    tensorboard: bool = True
    """Write TensorBoard event files next to metrics.jsonl."""
    wandb_project: str | None = None
    """Weights & Biases project; None: not used."""
    trajectories_every: int = Field(default=1, ge=0)
    """Steps between trajectory files (Parquet); 0: none."""
    trajectories_per_step: int = Field(default=1024, ge=1)
    """Rows of a trajectory file at most: whole groups, evenly over the step's prompts."""
    view: Literal["auto", "live", "lines", "none"] = "auto"
    """`live`: a table that stays in place; `lines`: a line per step; `auto`: live on a terminal."""
