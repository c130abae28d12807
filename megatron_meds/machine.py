"""What this machine has: cores, memory, GPUs. Reads the kernel's files; knows neither torch nor settings."""

from __future__ import annotations

import os
from pathlib import Path

_NVIDIA = Path("/proc/driver/nvidia/gpus")


def cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0))


def memory_gib() -> float:
    """Physical memory, GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def gpus() -> int:
    """NVIDIA GPUs that this process may use, CUDA_VISIBLE_DEVICES respected."""
    present = len(list(_NVIDIA.iterdir())) if _NVIDIA.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [d for d in visible.split(",") if d.strip() and d.strip() != "-1"]
    return min(present, len(named))
