"""All that Megatron-Core needs to run without CUDA. Knows nothing of models, layouts or data.

Megatron-Core asks torch.cuda for devices, streams and random states even where every tensor is on
the CPU. `enable()` answers those questions for a process whose actor runs on the CPU; it changes
attributes of torch for the whole process, so it refuses to run beside CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable

import torch
import torch._dynamo
from megatron.core.tensor_parallel import random as megatron_random
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_enabled = False


class _Stream:
    """A stand-in for torch.cuda.Stream (a class: Megatron-Core uses it in annotations and
    isinstance checks). The CPU runs operations in order, so that waiting is done already."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same factory function, with a CUDA device read as the CPU."""

    @functools.wraps(factory)
    def make(*args: object, **kwargs: object) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":  # type: ignore[arg-type]
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return make


def _type_name(original: Callable[..., object]) -> Callable[..., object]:
    """Tensor.type that gives the CUDA name of a tensor's type, and still converts when asked to."""

    @functools.wraps(original)
    def type_of(self: torch.Tensor, dtype: object = None, *args: object, **kwargs: object) -> object:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return str(original(self)).replace("torch.", "torch.cuda.", 1)

    return type_of


def _rng_state(*args: object, **kwargs: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: object, **kwargs: object) -> None:
    torch.set_rng_state(state)


def enable() -> None:
    """Make Megatron-Core run on the CPU in this process. May be called again.

    Raises:
        RuntimeError: CUDA is in use in this process.
    """
    global _enabled
    if _enabled:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "the actor cannot run on the CPU in a process that uses CUDA: set actor.device=cuda"
        )
    _enabled = True

    # Megatron-Core's fused functions are compiled by torch.compile at their first call, for minutes.
    torch._dynamo.config.disable = True

    cuda = torch.cuda
    # Parameters, pipeline buffers and gradient buffers are allocated on the "current device".
    cuda.current_device = lambda: _CPU  # type: ignore[assignment]
    # Gradient reduction and the schedules order their work by streams.
    cuda.Stream = _Stream  # type: ignore[assignment,misc]
    cuda.current_stream = lambda *args, **kwargs: _Stream()  # type: ignore[assignment]
    cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    # The shape exchange between stages, and checkpointing, wait for the device.
    cuda.synchronize = lambda *args, **kwargs: None  # type: ignore[assignment]
    # Profiler ranges go to a CUDA library.
    cuda.nvtx.range_push = lambda *args, **kwargs: None  # type: ignore[assignment]
    cuda.nvtx.range_pop = lambda *args, **kwargs: None  # type: ignore[assignment]
    # One generator, the CPU's, takes the place of the device's in seeding, forking, recomputation.
    cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    cuda.get_rng_state = _rng_state  # type: ignore[assignment]
    cuda.set_rng_state = _set_rng_state  # type: ignore[assignment]
    megatron_random._get_cuda_rng_state = _rng_state
    megatron_random._set_cuda_rng_state = _set_rng_state
    # Megatron-Core finds it strange that the CPU's generator moves while the device's is in use.
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    # Advice for the order of CUDA kernels, given whenever sequence parallelism is on.
    warnings.filterwarnings("ignore", message=r".*CUDA_DEVICE_MAX_CONNECTIONS", category=UserWarning)

    # `with torch.device(...)` knows the factories by what they are at its first use. Asked before they
    # are replaced, it goes on to work, and with it models that transformers builds on "meta".
    _device_constructors()
    # Token counts, gradient norms, overflow flags are made with device="cuda".
    for name in ("empty", "empty_like", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # The shared embedding and loaded optimizer states are moved with Tensor.cuda.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    # The optimizers sort parameters by the name of their CUDA type and refuse all others.
    torch.Tensor.type = _type_name(torch.Tensor.type)  # type: ignore[assignment]
