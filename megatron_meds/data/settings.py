"""Settings of the data."""

from typing import Literal

from pydantic import Field

from megatron_meds.section import Section


class FieldMap(Section):
    question: str = "question"
    """Column of the problem's text."""
    answer: str | None = "answer"
    """Column of the reference answer. `last_box(column)` takes the last box of a solution text,
    `first(column)` the first entry of a list. None: rows without an answer (sft)."""
    id: str | None = None
    """Column of an id to show; the prompt id itself is the sha256 of the normalised question."""
    system: str | None = None
    """Column of a system message."""
    response: str | None = None
    """Column of the response to learn (sft)."""


class DatasetSettings(Section):
    path: str
    """A .jsonl or .parquet file, a folder of them, or the name of a Hugging Face data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    name: str | None = None
    """Configuration of a Hugging Face data set; for an evaluation set: what to call it in metrics."""
    fields: FieldMap = FieldMap()
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many rows."""


class TemplateSettings(Section):
    name: Literal["chat", "qwen-math", "raw"] = "chat"
    """`chat`: the tokenizer's chat template; `qwen-math`: Qwen2.5-Math's; `raw`: the question as it is."""
    system: str | None = None
    """System message; None: the template's own (qwen-math: the paper's step-by-step instruction)."""
    options: dict[str, bool | int | str] = {}
    """Options of the chat template, such as `enable_thinking`."""
    prefix: str = ""
    """Text before the question (raw)."""
    suffix: str = ""
    """Text after the question (raw)."""


class DataSettings(Section):
    train: list[DatasetSettings] = []
    """Training sets, joined; questions that appear twice are asked once."""
    evaluation: list[DatasetSettings] = []
    """Held-out sets."""
    template: TemplateSettings = TemplateSettings()
    prompts_per_step: int = Field(default=64, ge=1)
    """Prompts of one step, over all replicas (sft: examples)."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longer prompts are left out and counted."""
    shuffle: bool = True
    """A new seeded order in every epoch."""
