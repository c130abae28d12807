"""What flows through a step: a prompt, a trajectory, and the ledger of its rewards.

Plain data: numpy where numbers are many, no torch, and no knowledge of who fills it in.
Letters: B samples, T tokens, L layers.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np


def prompt_id(question: str) -> str:
    """sha256 (hex) of the question with Unicode normalised (NFKC), runs of white space joined and
    the ends stripped, so that copies of one question share an id."""
    text = " ".join(unicodedata.normalize("NFKC", question).split())
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Prompt:
    """One problem, ready to be asked."""

    id: str
    """`prompt_id(question)`."""
    question: str
    token_ids: tuple[int, ...]
    """The whole prompt as the model sees it, template and special tokens included."""
    answer: str
    """Reference answer."""
    source: str = ""
    """Data set it comes from."""
    extra: dict[str, object] = field(default_factory=dict, hash=False, compare=False)
    """Further columns of its row, for a user's reward function."""


@dataclass
class MeasuredSteps:
    """The P steps of a chain of thought, and what they were found to be worth."""

    offsets: list[int]
    """[P] characters of the text at which they begin."""
    bounds: list[int]
    """[P + 1] step j is the response tokens bounds[j] to bounds[j + 1] - 1."""
    accuracies: list[float]
    """[P + 1] share of right answers among continuations from before each step, and from after the last."""
    rewards: list[float]
    """[P]"""
    weight_version: int
    """Version of the weights that continued them."""


@dataclass
class Trajectory:
    """One response to a prompt, and what was found out about it."""

    prompt: Prompt
    sample: int
    """Number within its group, 0-based."""
    response_ids: list[int]
    """Sampled ids, end-of-text included when it was sampled."""
    text: str
    """The response as text, special tokens left out."""
    rollout_logprobs: list[float]
    """Per response token: log-probability of the sampler at its temperature; NaN where it gave none."""
    finish_reason: str
    """`stop` or `length`."""
    weight_version: int
    """Version of the weights it was sampled from."""
    correct: bool | None = None
    """Verdict; None before grading."""
    verdict: str = ""
    """How the verdict came about: `right`, `wrong`, `no box`, `timeout`, ..."""
    logprobs: np.ndarray | None = None
    """[T] fp32: the actor's log-probabilities before the update."""
    entropy: np.ndarray | None = None
    """[T] fp32: entropy of the actor's distribution at each response token, nats."""
    layer_logits: np.ndarray | None = None
    """[L] fp32: the LM head's logit of the answer's first token at every decoder layer; NaN without an
    answer, None in a run that remembers no mistakes."""
    reference_logprobs: np.ndarray | None = None
    """[T] fp32: log-probabilities under the frozen reference policy; None where a run has none."""
    values: np.ndarray | None = None
    """[T] fp32: the critic's value before each response token is chosen; None where a run has none."""

    steps: MeasuredSteps | None = None
    """Its measured steps; None where it has none, or they were not measured."""

    @property
    def truncated(self) -> bool:
        """Ended by the length limit."""
        return self.finish_reason == "length"

    @property
    def key(self) -> str:
        """Names the sample in messages."""
        return f"{self.prompt.id[:12]}/{self.sample}"

    def __len__(self) -> int:
        return len(self.response_ids)


class RewardLedger:
    """Who gave which reward at which token.

    Per source: entries (trajectory, token, value), and arrays that reward every token of a
    trajectory. A trajectory's token rewards are the sum over sources in the order in which the
    sources first appeared. Values must be finite; a source that
    cannot score a trajectory says so by `mark_unscored`, and the trajectory then has no total.
    """

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self._lengths = [len(t) for t in trajectories]
        self._keys = [t.key for t in trajectories]
        self._entries: dict[str, list[tuple[int, int, float]]] = {}
        self._arrays: dict[str, list[tuple[int, np.ndarray]]] = {}
        self._unscored: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def sources(self) -> list[str]:
        """Sources in the order in which they are added up."""
        return list(self._entries)

    @property
    def unscored(self) -> dict[int, str]:
        """Trajectories without a score: number -> the first source that could not give one."""
        return dict(self._unscored)

    def open(self, source: str) -> None:
        """Name a source that may end up without entries, so that it is logged as 0."""
        self._entries.setdefault(source, [])

    def add(self, source: str, trajectory: int, value: float, token: int = -1) -> None:
        """Add `value` at `token` (negative: from the end) of trajectory number `trajectory`.

        Raises:
            ValueError: the value is NaN or infinite, or the token is outside the response; the
                message names the source and the sample.
        """
        length = self._lengths[trajectory]
        if not math.isfinite(value):
            raise ValueError(f"reward {value} from source {source!r} for sample {self._keys[trajectory]}")
        position = token + length if token < 0 else token
        if not 0 <= position < length:
            raise ValueError(
                f"source {source!r} rewards token {token} of sample {self._keys[trajectory]}, "
                f"which has {length} tokens"
            )
        self._entries.setdefault(source, []).append((trajectory, position, float(value)))

    def add_tokens(self, source: str, trajectory: int, values: np.ndarray) -> None:
        """Add a value at every token of trajectory number `trajectory`: an array [T].

        Raises:
            ValueError: not one value per token, or one is NaN or infinite; the message names the source
                and the sample.
        """
        array = np.asarray(values, dtype=np.float64)
        key, length = self._keys[trajectory], self._lengths[trajectory]
        if array.shape != (length,):
            raise ValueError(
                f"source {source!r}: array of shape {array.shape} for sample {key} of {length} tokens"
            )
        if not np.isfinite(array).all():
            token = int(np.flatnonzero(~np.isfinite(array))[0])
            raise ValueError(f"reward {array[token]} from source {source!r} for sample {key}, token {token}")
        self.open(source)
        self._arrays.setdefault(source, []).append((trajectory, array.copy()))

    def mark_unscored(self, source: str, trajectory: int) -> None:
        """Say that `source` has no verdict on trajectory number `trajectory`: it counts for nothing.

        Its total becomes NaN (from `source` and over all sources; group statistics leave NaN out and
        give it advantage 0) and its token rewards become 0.

        Raises:
            IndexError: there is no such trajectory.
        """
        self.open(source)
        if not 0 <= trajectory < len(self):
            raise IndexError(f"source {source!r}: no trajectory {trajectory} among {len(self)}")
        self._unscored.setdefault(trajectory, source)

    def remove(self, source: str, trajectory: int, token: int = -1) -> None:
        """Drop what `source` gave at one token (the released VSRM overwrites the last token)."""
        position = token + self._lengths[trajectory] if token < 0 else token
        for owner, array in self._arrays.get(source, []):
            if owner == trajectory:
                array[position] = 0.0
        kept = [e for e in self._entries.get(source, []) if e[:2] != (trajectory, position)]
        self._entries[source] = kept

    def entries(self, source: str) -> list[tuple[int, int, float]]:
        """(trajectory, token, value) of one source, in the order they were added; without its arrays."""
        return list(self._entries[source])

    def token_rewards(self, source: str | None = None) -> list[np.ndarray]:
        """Per trajectory [T] fp64: one source, or the sum over all; zeros for one without a score."""
        rewards = [np.zeros(n, dtype=np.float64) for n in self._lengths]
        for name in self.sources if source is None else [source]:
            for trajectory, token, value in self._entries[name]:
                rewards[trajectory][token] += value
            for trajectory, array in self._arrays.get(name, []):
                rewards[trajectory] += array
        for trajectory in self._unscored:
            rewards[trajectory][:] = 0.0
        return rewards

    def totals(self, source: str | None = None) -> np.ndarray:
        """[B] fp64: the reward of each trajectory from one source, or from all; NaN where it has no
        score (from all, or from the source that could not give one)."""
        sums = np.zeros(len(self), dtype=np.float64)
        names: Iterable[str] = self._entries if source is None else [source]
        for name in names:
            for trajectory, _, value in self._entries[name]:
                sums[trajectory] += value
            for trajectory, array in self._arrays.get(name, []):
                sums[trajectory] += array.sum()
        for trajectory, blind in self._unscored.items():
            if source in (None, blind):
                sums[trajectory] = math.nan
        return sums
