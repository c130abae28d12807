"""Settings of the models that learn: layout, precision, batches, optimizers."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from megatron_meds.section import Section


class ModelSettings(Section):
    path: Path
    """Hugging Face folder (config.json, safetensors, tokenizer) the actor starts from."""
    weights: Literal["load", "random"] = "load"
    """`load` reads the safetensors; `random` initialises from the config alone (seeded)."""
    reference: Path | None = None
    """Hugging Face folder of the frozen reference policy of `algorithm.kl`; None: `path`, the policy's own
    start. With `algorithm.kl.coefficient=0` the divergence from it is measured and nothing else."""
    offload_reference: bool = False
    """Keep the reference in host memory between score passes (GPU)."""
    attention: Literal["auto", "sdpa", "te"] = "auto"
    """`te`: transformer-engine's attention and layers; `sdpa`: megatron's local layers over torch's
    scaled_dot_product_attention; `auto`: `te` where transformer-engine and a GPU are and the precision
    is bf16, else `sdpa`."""


class LayoutSettings(Section):
    tensor: int = Field(default=1, ge=1)
    """Tensor-parallel ranks."""
    pipeline: int = Field(default=1, ge=1)
    """Pipeline stages."""
    virtual: int = Field(default=1, ge=1)
    """Model chunks per pipeline stage (interleaved schedule); 1 is the plain 1F1B schedule."""
    context: int = Field(default=1, ge=1)
    """Context-parallel ranks; only 1: micro-batches are not cut along the sequence."""
    data: int | Literal["auto"] = "auto"
    """Data-parallel replicas; `auto`: world size / (tensor x pipeline x context), 1 when
    `train` starts the ranks itself."""
    sequence: bool = False
    """Sequence parallelism over the tensor-parallel ranks."""
    stages: str | None = None
    """Uneven stages in megatron's layout notation, e.g. `Et*3|t*5L`: E embedding, t layer, L head,
    one part per stage and chunk. None: equal stages."""


class ActorSettings(Section):
    layout: LayoutSettings = LayoutSettings()
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Parameters and activations; gradients and the optimizer are fp32. `auto`: bf16 on GPU, fp32 on CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the actor runs; `auto`: a GPU if torch sees one."""
    batching: Literal["packed", "padded"] = "packed"
    """`packed`: sequences laid end to end in one row (THD); `padded`: rows of like lengths."""
    tokens_per_micro_batch: int = Field(default=8192, ge=1)
    """Token budget of a micro-batch, padding included. A longer sequence gets one of its own."""
    head_chunk: int = Field(default=2048, ge=1)
    """Tokens per chunk of the LM head: at most [head_chunk, vocabulary / tensor] logits exist at once."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the backward pass."""
    distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel replicas."""
    timeout_minutes: float = Field(default=30.0, gt=0)
    """A collective that takes longer ends the run."""


class OptimizerSettings(Section):
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate (AdamW)."""
    min_lr: float = Field(default=0.0, ge=0)
    """Where `cosine` and `linear` end."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=10, ge=0)
    """Steps (not updates) of linear warm-up from 0."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay; norms and biases have none."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's first-moment decay."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Adam's second-moment decay."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam's epsilon."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Global gradient norm is clipped to this; 0 does not clip."""


class CriticOptimizerSettings(OptimizerSettings):
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate (AdamW)."""


class CriticSettings(Section):
    path: Path | None = None
    """Hugging Face folder of a language model whose layers the critic starts from; it must read the policy's
    tokens. None: `model.path`. The value head starts with zeros."""
    value_clip: float = Field(default=0.5, gt=0)
    """A value's update counts up to this distance from the value before it; `.inf`: any."""
    steps_before_policy: int = Field(default=0, ge=0)
    """Steps at the start in which only the critic learns; the policy's schedule begins after them."""
    optimizer: CriticOptimizerSettings = CriticOptimizerSettings()
