"""A piece of memory that two processes of one machine see.

It is an anonymous file (memfd): it has no name that could stay behind, whatever ends the processes,
and it does not count against the size of /dev/shm, which containers keep small. Another process of
the same user maps it through /proc. Knows nothing of tensors but bytes.
"""

from __future__ import annotations

import mmap
import os

import torch


class SharedMemory:
    """`bytes` is the memory as a torch tensor [size] uint8; `path` is where others open it."""

    def __init__(self, descriptor: int, size: int, path: str) -> None:
        self.path = path
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, size)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """Memory of `size` bytes, all zero; freed when the last process that maps it has closed it."""
        descriptor = os.memfd_create("megatron_meds_weights")
        os.ftruncate(descriptor, size)
        return cls(descriptor, size, f"/proc/{os.getpid()}/fd/{descriptor}")

    @classmethod
    def attach(cls, path: str, size: int) -> SharedMemory:
        """Map what another process created.

        Raises:
            OSError: there is nothing at `path`: the other process is gone, or on another machine.
            ValueError: it has another size.
        """
        descriptor = os.open(path, os.O_RDWR)
        found = os.fstat(descriptor).st_size
        if found != size:
            os.close(descriptor)
            raise ValueError(f"the shared memory at {path} has {found} bytes, {size} were announced")
        return cls(descriptor, size, path)

    def close(self) -> None:
        """Unmap it here. No view of `bytes` may be used afterwards."""
        del self.bytes
        self._map.close()
        os.close(self._descriptor)
