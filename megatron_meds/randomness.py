"""The state of every random generator of a process: Python's, NumPy's, torch's.

Restore it last: a seed set afterwards would undo it. Knows nothing of what draws from them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def save_random_state(path: Path) -> None:
    """Write the states of this process to `path` (tensors and numbers in torch's format)."""
    algorithm, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (algorithm, torch.from_numpy(np.array(keys)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    torch.save(state, path)


def load_random_state(path: Path) -> None:
    """Set the generators of this process to what `save_random_state` wrote.

    A GPU's state is set where there is a GPU and the file has one.
    """
    state = torch.load(path, weights_only=True)
    random.setstate(state["python"])
    algorithm, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((algorithm, keys.numpy(), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
