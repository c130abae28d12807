"""Settings of VSRM: how a chain of thought is cut, how its prefixes are measured, what a step earns."""

from typing import Literal

from pydantic import Field

from megatron_meds.section import Section
from megatron_meds.vsrm.rewards import least_change
from megatron_meds.vsrm.steps import CLOSE, OPEN, StepRules


class VsrmSettings(Section):
    enabled: bool = False
    """Reward every reasoning step by the accuracy it gained (arXiv 2508.10293)."""
    preset: Literal["sound", "released"] = "sound"
    """Values of the settings below that are null: `released` is what the authors' code does."""
    skip: int = Field(default=1000, ge=0)
    """Length at the beginning of the reasoning, which restates the problem, without a split."""
    gap: int = Field(default=400, ge=0)
    """Least distance between splits."""
    unit: Literal["characters", "tokens"] = "characters"
    """Of `skip` and `gap`."""
    markers: list[str] | None = Field(default=None, min_length=1)
    """Words that begin a step, in the cases listed; null: the preset's (sound: Therefore, Thus and Hence
    too)."""
    match: Literal["word", "substring"] | None = None
    """Markers are whole words (sound), or stand anywhere, as "So" in "Solving" (released)."""
    measure: Literal["split", "marker"] | None = None
    """What `skip` and `gap` hold for: the split, at the start of its sentence (sound), or the marker
    (released)."""
    decimal_ends: bool | None = None
    """Whether a `.` between digits ends a sentence: false (sound), true (released)."""
    truncated: Literal["close", "opening"] | None = None
    """Last prefix of reasoning that was never closed: all of it, closed by force (sound), or the opening tag
    alone (released)."""
    open_tag: str = Field(default=OPEN, min_length=1)
    """Text that opens the reasoning, in the response or at the end of the prompt."""
    close_tag: str = Field(default=CLOSE, min_length=1)
    """Text that closes it, appended to each prefix as the tokenizer's ids."""
    candidates: int = Field(default=5, ge=1)
    """Continuations of each prefix; its accuracy is their share of right answers."""
    temperature: float = Field(default=0.6, gt=0)
    """Of the continuations."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Of the continuations."""
    max_tokens: int = Field(default=768, ge=1)
    """Longest continuation."""
    min_tokens: int = Field(default=32, ge=1)
    """A prefix that leaves room for fewer is dropped, and counted."""
    gamma: float = Field(default=0.7, gt=0, le=1)
    """Discount, by the step, of a gain that comes later."""
    window: int = Field(default=4, ge=0)
    """Steps that a step without a change looks ahead for the next one; 0: it earns 0 (an ablation)."""
    eps: float = Field(default=1e-5, ge=0)
    """Smallest change of accuracy that counts."""
    min_gain: int = Field(default=1, ge=1)
    """The same in samples of `candidates`."""
    reward_function: str | None = None
    """`module:name` of your own `(accuracies: ndarray[P + 1]) -> [P]`, the reward of each step from the
    accuracies of the prefixes, in place of `gamma`, `window`, `eps` and `min_gain`."""
    place: Literal["last", "first"] | None = None
    """Token of a step that is rewarded: its last, so that the credit reaches the whole step (sound), or its
    first (released)."""
    outcome: Literal["add", "overwrite"] | None = None
    """Where a step reward falls on the outcome's token: both count (sound), or the outcome alone
    (released)."""
    max_prefixes: int | None = Field(default=None, ge=2)
    """Prefixes of a response, evenly thinned; null: no limit."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the trajectories whose steps are rewarded, chosen by the seed."""

    def rules(self) -> StepRules:
        """How a response is cut."""
        preset = StepRules.released() if self.released else StepRules.sound()
        return StepRules(
            skip=self.skip,
            gap=self.gap,
            unit=self.unit,
            markers=preset.markers if self.markers is None else tuple(self.markers),
            match=self.match or preset.match,
            measure=self.measure or preset.measure,
            decimal_ends=preset.decimal_ends if self.decimal_ends is None else self.decimal_ends,
            open_tag=self.open_tag,
            close_tag=self.close_tag,
        )

    @property
    def released(self) -> bool:
        return self.preset == "released"

    @property
    def last_prefix(self) -> Literal["close", "opening"]:
        """`truncated`, worked out."""
        return self.truncated or ("opening" if self.released else "close")

    @property
    def rewarded_token(self) -> Literal["last", "first"]:
        """`place`, worked out."""
        return self.place or ("first" if self.released else "last")

    @property
    def on_outcome(self) -> Literal["add", "overwrite"]:
        """`outcome`, worked out."""
        return self.outcome or ("overwrite" if self.released else "add")

    @property
    def least_change(self) -> float:
        """`eps` and `min_gain` as one number."""
        return least_change(self.candidates, self.min_gain, self.eps)

    @property
    def room(self) -> int:
        """Tokens that a prefix and its continuation may take beyond prompt and response: a token of the
        closing tag is a byte or more."""
        return len(self.close_tag.encode()) + self.max_tokens
