"""Settings of the servers and of sampling."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from megatron_meds.section import Section


class ServerSettings(Section):
    placement: Literal["separate", "external"] = "separate"
    """`separate`: started here, on devices (or cores) of their own; `external`: the servers at `urls`."""
    count: int = Field(default=1, ge=1)
    """Servers to start on each node."""
    urls: list[str] = Field(default=[])
    """Base URLs for `external`, such as http://10.0.0.5:8000. Start these servers with
    VLLM_SERVER_DEV_MODE=1, `--tokens-only` (or `--enable-scale-out`), `--generation-config vllm`,
    `--logprobs-mode processed_logprobs` and `--weight-transfer-config '{"backend": "nccl"}'`."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Tensor-parallel workers of each server."""
    devices: list[int] | None = None
    """GPUs for the servers, `tensor_parallel` each. None: those after the actor's."""
    python: Path | None = None
    """Interpreter that has vLLM; None: the trainer's own."""
    host: str = "127.0.0.1"
    """Address the servers bind to; 0.0.0.0 where other nodes must reach them."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """First port; None: free ones are chosen."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the servers; `auto`: that of the actor."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt plus response; None: `data.max_prompt_tokens` + `rollout.max_tokens`, and with
    `vsrm.enabled` the continuation of a prefix."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences decoded at once by a server."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """KV cache of a CPU server, GiB."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory a server may take."""
    block_size: int | None = Field(default=None, ge=1)
    """Tokens of a KV-cache block; None: vLLM's default (32 on CPU, so that prefixes are reused)."""
    enforce_eager: bool | Literal["auto"] = "auto"
    """No CUDA graphs / compilation; `auto`: on CPU."""
    cpu_cores: str | None = None
    """`VLLM_CPU_OMP_THREADS_BIND` of a CPU server, such as `0-1`; None: vLLM chooses."""
    extra_args: list[str] = Field(default=[])
    """Further arguments of vLLM's api_server."""
    start_timeout_seconds: float = Field(default=600.0, gt=0)
    """A server that is not ready by then fails the run, with the tail of its log."""
    stop_timeout_seconds: float = Field(default=10.0, gt=0)
    """A server that has not ended this long after SIGTERM is killed."""
    restarts: int = Field(default=3, ge=0)
    """Times a dead server is started again before the run stops."""


class DynamicSamplingSettings(Section):
    enabled: bool = False
    """Drop groups whose answers are all right or all wrong and sample others (DAPO)."""
    max_rounds: int = Field(default=10, ge=1)
    """Sampling rounds for one step; afterwards the step goes on with the groups there are."""
    keep_all_wrong: bool = False
    """Keep groups whose answers are all wrong: with `meds.enabled` they learn from the penalties of repeated
    mistakes alone. All-right groups are dropped all the same."""


class RolloutSettings(Section):
    server: ServerSettings = ServerSettings()
    samples_per_prompt: int = Field(default=8, ge=1)
    """Trajectories of each prompt: a group."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer divides its logits by the same."""
    top_p: float = 1.0
    """Must be 1 while training: anything else biases the probability ratio."""
    top_k: int = -1
    """Must be -1 (off) while training."""
    max_tokens: int = Field(default=1024, ge=1)
    """Longest response, tokens."""
    stop_token_ids: list[int] = Field(default=[])
    """Further token ids that end a response; the tokenizer's end-of-text tokens always do."""
    request_timeout_seconds: float = Field(default=1800.0, gt=0)
    """One prompt's samples must arrive within this."""
    retries: int = Field(default=3, ge=0)
    """Times a failed request is sent again."""
    concurrency: int = Field(default=256, ge=1)
    """Requests in flight per replica."""
    dynamic_sampling: DynamicSamplingSettings = DynamicSamplingSettings()

    @field_validator("top_p")
    @classmethod
    def _no_nucleus(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError("training samples need top_p = 1: the probability ratio would be biased")
        return value

    @field_validator("top_k")
    @classmethod
    def _no_top_k(cls, value: int) -> int:
        if value != -1:
            raise ValueError("training samples need top_k = -1 (off): the probability ratio would be biased")
        return value
