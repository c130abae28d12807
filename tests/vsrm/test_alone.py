"""Step rewards work where nothing but numpy is installed."""

import subprocess
import sys

PROGRAM = """
import sys

ABSENT = "torch sklearn pyarrow transformers megatron vllm pydantic rich typer pandas yaml".split()

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block())
from megatron_meds.vsrm import StepRules, plan_prefixes, reward_steps, split_steps, step_rewards

text = "<think>Two and two. Wait, is it four? So it is.</think>4"
print(split_steps(text, StepRules(skip=5, gap=5)), split_steps(text, StepRules.released()))
print(step_rewards([0, 0.2, 0.6, 0.4, 1], gamma=0.7, window=4).round(3).tolist())
print(reward_steps(text, lambda prefixes: [len(p) / 100 for p in prefixes], StepRules(skip=5, gap=5)).offsets)
decode = lambda ids: "".join(map(chr, ids))
close = [*map(ord, "</think>")]
print(len(plan_prefixes([1], [*map(ord, text)], text, decode, close, StepRules(skip=5, gap=5))))
print(sorted(name for name in ABSENT if name in sys.modules))
"""


def test_they_need_neither_torch_nor_scikit_learn_nor_pydantic():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[19, 37] []", "[0.2, 0.4, -0.2, 0.6]", "[19, 37]", "2", "[]"]
