"""Digests of the weights that a CPU server computes with.

On CPU, vLLM packs the weight of a linear layer for its kernels and leaves an empty parameter
behind, whose digest says nothing: servers with quite different weights would look alike in
`/weight_checker`. Here a packed layer's weight is read back through the layer itself: its product
with the identity matrix is the weight, exactly. Knows vLLM's layers on CPU; nothing of who compares.
"""

from __future__ import annotations

import hashlib

import torch
from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests
from vllm.v1.worker import gpu_worker

PACKED = " as packed"
"""Ends the name of a weight that a layer holds packed beside its parameter (an output layer's)."""
_ROWS = 1024
"""Rows of the identity matrix at a time."""


def install() -> None:
    """Let this process's `/weight_checker` answer with `digests`."""
    gpu_worker.compute_tensor_digests = digests


@torch.no_grad()
def digests(model: torch.nn.Module) -> dict[str, str]:
    """SHA-256 of every parameter, and of every packed weight, by name."""
    found = compute_tensor_digests(model)
    for name, layer in model.named_modules():
        if "cpu_linear" not in layer.__dict__:
            continue
        weight = layer.get_parameter("weight")
        key = f"{name}.weight"
        found[key if weight.numel() == 0 else key + PACKED] = _digest_of_packed(layer, weight)
    return found


def _digest_of_packed(layer: torch.nn.Module, weight: torch.Tensor) -> str:
    columns = _columns(layer, weight)
    digest = hashlib.sha256()
    for start in range(0, columns, _ROWS):
        rows = torch.zeros(min(_ROWS, columns - start), columns, dtype=weight.dtype)
        rows[:, start : start + len(rows)].fill_diagonal_(1)
        product = layer.cpu_linear(rows, weight, None)  # type: ignore[operator]
        digest.update(product.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _columns(layer: torch.nn.Module, weight: torch.Tensor) -> int:
    """Width of the layer's input on this worker."""
    if weight.numel():
        return weight.shape[1]
    cut = "input_size_per_partition" in layer.__dict__  # a replicated layer is not
    return layer.__dict__["input_size_per_partition" if cut else "input_size"]
