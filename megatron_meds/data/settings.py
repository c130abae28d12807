"""Settings of the data."""

from pathlib import Path, PurePath
from typing import Literal

from pydantic import Field

from megatron_meds.section import Section


class FieldMap(Section):
    question: str = "question"
    """Column of the problem's text, or of a list of messages, whose user message it is. Dots reach into
    nested columns (`reward_model.ground_truth`), in every field."""
    answer: str | None = "answer"
    """Column of the reference answer. `last_box(column)` takes the last box of a solution text,
    `first(column)` the first entry of a list, `after_hashes(column)` what follows the last `####`.
    None: rows without an answer (sft)."""
    id: str | None = None
    """Column of an id to show; the prompt id itself is the sha256 of the normalised question."""
    system: str | None = None
    """Column of a system message."""
    response: str | None = None
    """Column of the response to learn (sft)."""


class DatasetSettings(Section):
    path: str | None = None
    """A .jsonl or .parquet file, a folder of them, or the name of a Hugging Face data set. None: `name` is
    that of a known set."""
    name: str | None = None
    """What to call the set in metrics and messages; None: the last part of `path`, less its suffix. A known
    set's name (`megatron-meds data list` has them) says where it comes from and which fields it has."""
    split: str | None = None
    """Split of a Hugging Face data set; None: `train`, or the known set's own."""
    config: str | None = None
    """Configuration of a Hugging Face data set; None: its only one, or the known set's own."""
    revision: str | None = None
    """Commit or tag of a Hugging Face data set; None: the newest, or the known set's own."""
    fields: FieldMap = FieldMap()
    where: dict[str, list[str | int]] = Field(default_factory=dict)
    """Use only rows whose column holds one of the values, such as `{level: [Level 4, Level 5]}`."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many rows."""
    incomplete: Literal["error", "skip"] = "error"
    """Rows that lack a column of `fields` or leave it empty: end the run, or are left out and counted."""

    @property
    def label(self) -> str:
        """`name`, or the last part of `path` less its suffix."""
        return self.name or PurePath(self.path or "unnamed").stem


class TemplateSettings(Section):
    name: Literal["chat", "qwen-math", "raw"] = "chat"
    """`chat`: the tokenizer's chat template; `qwen-math`: Qwen2.5-Math's; `raw`: the question as it is."""
    system: str | None = None
    """System message; None: the template's own (qwen-math: the paper's step-by-step instruction)."""
    options: dict[str, bool | int | str] = Field(default_factory=dict)
    """Options of the chat template, such as `enable_thinking`."""
    prefix: str = ""
    """Text before the question (raw)."""
    suffix: str = ""
    """Text after the question (raw)."""


class DataSettings(Section):
    train: list[DatasetSettings] = Field(default_factory=list)
    """Training sets, joined; questions that appear twice are asked once."""
    evaluation: list[DatasetSettings] = Field(default_factory=list)
    """Held-out sets."""
    overlap: Literal["keep", "drop"] = "keep"
    """Training questions that an evaluation set asks too (by letters, digits and signs of arithmetic): stay,
    or are left out. They are counted and told either way."""
    folder: Path | None = None
    """Local copies of known sets, each NAME.jsonl, NAME.parquet or NAME/SPLIT.*; looked at first."""
    cache: Path | None = None
    """Where downloaded sets are kept as Parquet, and found again without a network; delete a file to download
    its set anew. None: $MEGATRON_MEDS_CACHE, or megatron_meds in the user's cache folder."""
    template: TemplateSettings = TemplateSettings()
    prompts_per_step: int = Field(default=64, ge=1)
    """Prompts of one step, over all replicas (sft: examples)."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longer prompts are left out and counted."""
    shuffle: bool = True
    """A new seeded order in every epoch."""
