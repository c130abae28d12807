"""The base of every settings section. Knows pydantic and nothing of what is set."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of settings: unknown keys are refused, values are frozen, the docstring under a
    field is its description (the settings reference is made from these)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True
    )
