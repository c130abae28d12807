"""Settings of what a run writes down about itself."""

from pydantic import Field

from megatron_meds.section import Section


class TrackingSettings(Section):
    tensorboard: bool = True
    """Write TensorBoard event files next to metrics.jsonl."""
    wandb_project: str | None = None
    """Weights & Biases project; None: not used."""
    trajectories_every: int = Field(default=1, ge=0)
    """Steps between trajectory files (Parquet); 0: none."""
