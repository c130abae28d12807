"""Questions to token ids: the tokenizer's chat template, Qwen-Math's, or the text as it is.

Ids are made once and travel from here on: nothing is ever decoded and tokenised again. Knows
tokenizers, not data sets. transformers is imported only when a tokenizer is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron_meds.data.settings import TemplateSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QWEN_MATH_SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."
"""System message of Qwen2.5-Math's template."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face model folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def end_token_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[int]:
    """Ids that end a response: the tokenizer's, and those that generation_config.json and
    config.json name (chat models often have more than one)."""
    found: list[int | None] = [cast("int | None", tokenizer.eos_token_id)]
    for file in ("generation_config.json", "config.json"):
        if (folder / file).is_file():
            named = json.loads((folder / file).read_text()).get("eos_token_id")
            found += named if isinstance(named, list) else [named]
    return list(dict.fromkeys(i for i in found if i is not None))


class Template:
    """Turns questions into prompts for one tokenizer.

    Raises:
        ValueError: settings that this template or tokenizer has no use for, naming the setting.
    """

    def __init__(self, settings: TemplateSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        if settings.name == "chat":
            _check_chat(settings, tokenizer)
        elif settings.options:
            raise ValueError(
                f"data.template.options: template {settings.name} has none; they belong to `chat`"
            )
        if settings.name == "qwen-math":
            _check_qwen_math(tokenizer)
        if settings.name == "raw" and settings.system is not None:
            raise ValueError(
                "data.template.system: template raw has no system message; use data.template.prefix"
            )
        if settings.name != "raw" and (settings.prefix or settings.suffix):
            raise ValueError(
                f"data.template.prefix and suffix: template {settings.name} has none; they belong to `raw`"
            )

    def text(self, question: str, system: str | None = None) -> str:
        """The prompt as text, special tokens written out (raw: without a beginning-of-text token).

        Args:
            system: the row's own system message; wins over the setting's.
        """
        system = system if system is not None else self.settings.system
        if self.settings.name == "raw":
            if system is not None:
                raise ValueError(
                    "a row has a system message, for which template raw has no place; "
                    "use data.template.name=chat, or leave fields.system out"
                )
            return f"{self.settings.prefix}{question}{self.settings.suffix}"
        if self.settings.name == "qwen-math":
            return (
                f"<|im_start|>system\n{QWEN_MATH_SYSTEM if system is None else system}<|im_end|>\n"
                f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            )
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": question})
        options: dict[str, Any] = dict(self.settings.options)
        return str(
            self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options
            )
        )

    def token_ids(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of prompts that `text` made. Chat templates write their special tokens themselves, so
        none is added; raw text begins with the tokenizer's beginning-of-text token, if it uses one, once."""
        start = self._start() if self.settings.name == "raw" else []
        return [tuple(row if row[:1] == start else start + row) for row in self._encode(texts)]

    def response_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of responses to learn: the text and the end-of-text token.

        Raises:
            ValueError: the tokenizer has no end-of-text token.
        """
        end = cast("int | None", self.tokenizer.eos_token_id)
        if end is None:
            raise ValueError("the tokenizer has no eos_token: a response that is learnt could not end")
        return [[*row, end] for row in self._encode(texts)]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, no special token added."""
        if not texts:
            return []
        encoded: dict[str, Any] = self.tokenizer(list(texts), add_special_tokens=False)  # type: ignore[assignment]
        return encoded["input_ids"]

    def _start(self) -> list[int]:
        """The beginning-of-text id, if the tokenizer puts it before plain text."""
        begin = cast("int | None", self.tokenizer.bos_token_id)
        plain: dict[str, Any] = self.tokenizer("")  # type: ignore[assignment]
        return [begin] if begin is not None and begin in plain["input_ids"] else []


def _check_chat(settings: TemplateSettings, tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.chat_template is None:
        raise ValueError(
            "data.template.name = chat: the tokenizer has no chat template; take qwen-math or raw"
        )
    template = tokenizer.get_chat_template()
    for option in settings.options:
        if not re.search(rf"\b{re.escape(option)}\b", template):
            raise ValueError(
                f"data.template.options.{option}: the tokenizer's chat template does not mention it"
            )


def _check_qwen_math(tokenizer: PreTrainedTokenizerBase) -> None:
    known = tokenizer.get_vocab()
    for token in ("<|im_start|>", "<|im_end|>"):
        if token not in known:
            raise ValueError(
                f"data.template.name = qwen-math: the tokenizer has no token {token}; take chat or raw"
            )
