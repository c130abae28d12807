"""The memory works where nothing but numpy and scikit-learn is installed."""

import subprocess
import sys

PROGRAM = """
import sys

ABSENT = "torch pyarrow transformers megatron vllm pydantic rich typer pandas yaml".split()

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block())
import numpy as np
from megatron_meds.meds import Meds, MistakeMemory, penalty, select_layers, top1_eigen_ratio

memory = MistakeMemory(noise="cluster", neighbours=3, max_per_prompt=None, backend="auto")
logits = np.random.default_rng(0).normal(size=(16, 28))
for step in range(2):
    features = select_layers(logits, last=14, difference=False)
    sizes = memory.visit("prompt", features, step=step)
print(sizes.min() > 0, penalty(sizes, alpha=0.1, beta=0.2).max() <= 0.2, 0 < top1_eigen_ratio(features) < 1)
print(sorted(name for name in ABSENT if name in sys.modules))
"""


def test_it_needs_neither_torch_nor_pyarrow_nor_pydantic():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True True True", "[]"]
