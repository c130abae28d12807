"""Settings of the way from the actor to the servers."""

from typing import Literal

from pydantic import Field

from megatron_meds.section import Section


class WeightsSettings(Section):
    transport: Literal["auto", "shm", "nccl"] = "auto"
    """`shm`: shared memory of one machine (CPU); `nccl`: vLLM's NCCL engine (GPU); `auto`: by the device."""
    bucket_mib: float = Field(default=256, gt=0)
    """Tensors travel in buffers of this size; a larger tensor gets a buffer of its own."""
    timeout_seconds: float = Field(default=300.0, gt=0)
    """A sync that takes longer fails, naming the server."""
