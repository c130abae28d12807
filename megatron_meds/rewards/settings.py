"""Settings of the rewards."""

from pydantic import Field

from megatron_meds.section import Section


class FormatSettings(Section):
    no_box: float = 0.0
    """Added when the response closed its reasoning but holds no parsable box."""
    unclosed: float = 0.0
    """Added when the reasoning was never closed (a `think_close` that does not appear)."""
    think_close: str | None = None
    """Text that closes the reasoning, such as `</think>`; None: not looked for."""
    replaces_outcome: bool = False
    """A response that costs one of these gets no outcome reward beside it."""


class OverlongSettings(Section):
    buffer: int = Field(default=0, ge=0)
    """Tokens before `rollout.max_tokens` in which the penalty grows from 0 to -factor (DAPO); 0: none."""
    factor: float = Field(default=1.0, ge=0)
    """Penalty at the limit."""
    filter: bool = False
    """Leave truncated responses out of the loss (overlong filtering)."""


class LengthSettings(Section):
    penalty: float = Field(default=0.0, ge=0)
    """Taken off a response of `rollout.max_tokens`, and of a shorter one in proportion; source `length`."""


class RewardSettings(Section):
    correct: float = 1.0
    """Outcome reward of a right answer, at the last response token."""
    wrong: float = 0.0
    """Outcome reward of a wrong one."""
    form: FormatSettings = FormatSettings()
    overlong: OverlongSettings = OverlongSettings()
    length: LengthSettings = LengthSettings()
    function: str | None = None
    """`module:name` of your own `(trajectories: list[Trajectory]) -> list[float]`, added as source `custom`.
    NaN: this sample cannot be scored; it counts for nothing. Infinite: refused."""
    function_replaces_outcome: bool = False
    """With `function`: leave the outcome reward out."""
