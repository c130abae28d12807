import subprocess
import sys

import pytest
import torch

from megatron_meds.weights.shm.memory import SharedMemory

READER = """
import sys
from megatron_meds.weights.shm.memory import SharedMemory
memory = SharedMemory.attach(sys.argv[1], int(sys.argv[2]))
print(int(memory.bytes.sum()))
memory.bytes[0] = 99
memory.close()
"""

OWNER = """
import time
from megatron_meds.weights.shm.memory import SharedMemory
print(SharedMemory.create(2**20).path, flush=True)
time.sleep(60)
"""


def test_another_process_sees_what_is_written_and_writes_what_is_seen():
    memory = SharedMemory.create(1000)
    memory.bytes.copy_(torch.arange(1000) % 7)
    read = subprocess.run(
        [sys.executable, "-c", READER, memory.path, "1000"], capture_output=True, text=True, check=True
    )
    assert int(read.stdout) == int((torch.arange(1000) % 7).sum())
    assert memory.bytes[0] == 99
    memory.close()


def test_nothing_is_left_when_its_owner_is_killed():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    path = owner.stdout.readline().strip()
    attached = SharedMemory.attach(path, 2**20)
    owner.kill()
    owner.wait()
    with pytest.raises(OSError):
        SharedMemory.attach(path, 2**20)
    assert int(attached.bytes.sum()) == 0  # who has it mapped keeps it
    attached.close()


def test_memory_of_another_size_is_refused():
    memory = SharedMemory.create(100)
    with pytest.raises(ValueError, match="has 100 bytes, 200 were announced"):
        SharedMemory.attach(memory.path, 200)
    memory.close()
