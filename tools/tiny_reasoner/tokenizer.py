"""The tiny reasoner's tokenizer and architecture, as a Hugging Face folder without weights.

One token per printable ASCII character and newline. `<think>` and `</think>` are single tokens
that stay in decoded text, as in Qwen3. Knows nothing of arithmetic.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config

PAD, END, UNKNOWN, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|unknown|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, END, UNKNOWN, USER, ASSISTANT)
"""Control tokens, ids 0 to 4: left out of decoded text."""
THINK = ("<think>", "</think>")
CHARACTERS = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))
MAX_POSITIONS = 512

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}<|user|>{{ message.content }}
{%- elif message.role == 'assistant' -%}<|assistant|>{{ message.content }}<|end|>
{%- else -%}{{ raise_exception('the tiny reasoner knows user and assistant messages only') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, chat template included; `<|end|>` ends a text and nothing begins one."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *THINK, *CHARACTERS))}
    # Byte-pair encoding without merges is one token per character.
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in THINK])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        extra_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """The architecture: Qwen3 with tied embeddings, 2.7 million parameters."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=160,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=448,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )


def write_model_folder(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    build_config(tokenizer).save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
