"""TRL's half of against_trl.py: GRPOTrainer on the CPU, timed step by step.

Run in the environment that against_trl.py makes. A step is one generation of all samples and the
updates that learn from them; the first one warms up. Writes seconds and tokens of each step as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megatron_meds.verify import last_boxed


def main() -> None:
    """Train by the JSON object that the first argument holds; write to the file of the second."""
    task, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(task["threads"])
    rows = [json.loads(line) for line in Path(task["train"]).read_text().splitlines()]
    wanted = task["prompts"] * task["steps"]
    data = [{"prompt": _ask(row["question"]), "answer": row["answer"]} for row in rows[:wanted]]
    tokenizer = AutoTokenizer.from_pretrained(task["model"], padding_side="left")
    tokens: list[int] = []

    def reward(prompts, completions, completion_ids, answer, **_):
        asked = [
            tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts
        ]
        lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in asked]
        tokens.append(sum(lengths) + sum(map(len, completion_ids)))
        texts = [messages[0]["content"] for messages in completions]
        return [float(last_boxed(text) == gold) for text, gold in zip(texts, answer, strict=True)]

    samples, updates = task["prompts"] * task["samples"], task["updates"]
    trainer = GRPOTrainer(
        model=task["model"],
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(out.parent / "trl"),
            use_cpu=True,
            bf16=False,
            seed=task["seed"],
            max_steps=updates * task["steps"],
            per_device_train_batch_size=task["micro_batch"],
            gradient_accumulation_steps=samples // updates // task["micro_batch"],
            generation_batch_size=samples,
            num_generations=task["samples"],
            max_completion_length=task["max_tokens"],
            temperature=1.0,
            learning_rate=task["lr"],
            lr_scheduler_type="constant",
            weight_decay=0.1,
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            gradient_checkpointing=False,
            shuffle_dataset=False,
            model_init_kwargs={"dtype": "float32"},
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
        callbacks=[clock := Clock()],
    )
    trainer.train()
    ends = clock.ends[updates - 1 :: updates]
    starts = [clock.began, *ends[:-1]]
    found = {
        "seconds": [end - start for start, end in zip(starts, ends, strict=True)],
        "tokens": tokens,
        "version": f"TRL {trl.__version__}, transformers {transformers.__version__}",
    }
    out.write_text(json.dumps(found))


class Clock(TrainerCallback):
    """When training began and each update ended."""

    def __init__(self) -> None:
        self.began = 0.0
        self.ends: list[float] = []

    def on_train_begin(self, args, state, control, **_):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        self.ends.append(time.perf_counter())


def _ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


if __name__ == "__main__":
    main()
