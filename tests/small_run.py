"""A run's settings file with all that it names, written into a folder; nothing that needs torch."""

import json
from pathlib import Path
from typing import Any

import yaml

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 151,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}


def write_run(folder: Path, changes: dict[str, Any] | None = None, **model: Any) -> Path:
    """Write folder/run.yaml, a model's config beside it and a problem; return the YAML's path.

    `changes` are sections of the YAML that replace the plain ones, `model` keys of config.json.
    """
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps({**MODEL, **model}))
    (folder / "model" / "tokenizer.json").write_text("{}")
    (folder / "problems.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    tree = {
        "run": {"folder": "out", "steps": 3},
        "model": {"path": "model", "weights": "random"},
        "actor": {"device": "cpu"},
        "rollout": {"max_tokens": 64},
        "data": {"train": [{"path": "problems.jsonl"}], "max_prompt_tokens": 64, "prompts_per_step": 8},
        **(changes or {}),
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
