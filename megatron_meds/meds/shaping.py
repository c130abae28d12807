"""What a repeated mistake costs, written into the ledger: one step of MEDS on one replica.

Joins features, memory and penalties. Knows trajectories, their ledger and the settings; knows neither
how layer logits come about nor how rows travel between replicas.

    R' = R - min(alpha ln(n_k + 1), beta)            a wrong answer whose cluster had n_k members before
    R' = R / (1 + min(alpha ln(n_k + 1), beta))      a right one, where these are shaped

Letters: B trajectories, L layers. Source: MEDS, arXiv 2604.11297, and its authors' released code.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

import numpy as np

from megatron_meds.boxes import find_last_box
from megatron_meds.imports import load_function
from megatron_meds.meds.diagnostics import EigenSums
from megatron_meds.meds.features import make_features
from megatron_meds.meds.memory import MistakeMemory, Note
from megatron_meds.meds.positions import AnswerToken, NoFeature, find_answer_token
from megatron_meds.meds.sharding import Exchange, Rows, ShardedMemory, alone
from megatron_meds.tokens import Decode
from megatron_meds.trajectory import RewardLedger, Trajectory

if TYPE_CHECKING:
    from megatron_meds.meds.settings import MedsSettings

SOURCE = "meds"
"""Name of the penalties in the ledger."""
_TARGETS = {"wrong": (False,), "right": (True,), "both": (False, True), "none": (False,)}


def penalty(sizes: np.ndarray | Sequence[int], alpha: float = 0.1, beta: float = 0.2) -> np.ndarray:
    """min(alpha ln(size + 1), beta), elementwise, fp64; a size of 0 costs nothing.

    Raises:
        ValueError: a negative size, alpha or beta.
    """
    counts = np.asarray(sizes, dtype=np.float64)
    if alpha < 0 or beta < 0 or (counts < 0).any():
        raise ValueError(f"sizes, alpha = {alpha} and beta = {beta} must be 0 or more")
    return np.minimum(alpha * np.log1p(counts), beta)


@dataclass
class StepReport:
    """Metrics of one step on one replica, to be added up over replicas."""

    means: dict[str, tuple[float, float]] = field(default_factory=dict)
    """name -> (sum, count)"""
    maxima: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)


class Meds:
    """MEDS on the head of one replica. `answer_tokens` before scoring, `shape` after; every head calls
    `shape` in every step."""

    def __init__(
        self, settings: MedsSettings, replica: int = 0, replicas: int = 1, exchange: Exchange = alone
    ) -> None:
        """
        Args:
            exchange: of the heads, such as `Mesh.exchange_heads`.

        Raises:
            FunctionError: `meds.feature_function` leads to no function.
        """
        self.settings = settings
        memory = MistakeMemory(
            noise=settings.noise,
            neighbours=settings.neighbours,
            max_per_prompt=settings.max_per_prompt,
            backend=settings.backend,
            clusters=settings.clusters,
            count_current=settings.count_current,
            single_radius=settings.single_radius,
            workers=settings.workers,
        )
        self.shard = ShardedMemory(memory, replica, replicas, exchange)
        self._exchange = exchange
        self._function = (
            load_function(settings.feature_function, "meds.feature_function")
            if settings.feature_function
            else None
        )

    @property
    def memory(self) -> MistakeMemory:
        """Of the prompts this replica owns."""
        return self.shard.memory

    def close(self) -> None:
        """End the worker processes."""
        self.memory.close()

    def answer_tokens(
        self, trajectories: Sequence[Trajectory], decode: Decode
    ) -> list[AnswerToken | NoFeature | None]:
        """[B] the token that begins each answer, or why there is none; None for answers that are not
        remembered (see `target`), which need no layer logits.

        Args:
            decode: ids to text as the trajectories' own text was made.

        Raises:
            ValueError: a trajectory was not graded, or its text is not what its ids decode to; names
                the sample.
        """
        found: list[AnswerToken | NoFeature | None] = []
        for t in trajectories:
            if not self._wanted(t):
                found.append(None)
                continue
            try:
                found.append(find_answer_token(t.response_ids, t.text, decode))
            except ValueError as error:
                raise ValueError(f"sample {t.key}: {error}") from error
        return found

    def shape(
        self,
        ledger: RewardLedger,
        trajectories: Sequence[Trajectory],
        answers: Sequence[AnswerToken | NoFeature | None],
        layer_logits: np.ndarray,
        step: int,
    ) -> StepReport:
        """Visit the memory and add what the visit costs, as source `meds`. A collective of the heads.

        Args:
            ledger: complete but for the penalties, since a right answer's share is of its reward so far.
            answers: from `answer_tokens`.
            layer_logits: [B, L] fp32; rows of trajectories without an AnswerToken are not looked at.
            step: number of the step.

        Raises:
            ValueError: lengths that do not agree.
        """
        settings, count = self.settings, len(trajectories)
        logits = np.array(layer_logits, dtype=np.float32)
        if logits.ndim != 2 or not count == len(logits) == len(answers) == len(ledger):
            raise ValueError(
                f"{count} trajectories come with layer logits of shape {logits.shape}, {len(answers)} "
                f"answers and a ledger of {len(ledger)}"
            )
        present = [i for i, answer in enumerate(answers) if isinstance(answer, AnswerToken)]
        absent = np.setdiff1d(np.arange(count), present)
        logits[absent] = np.nan
        features = make_features(logits, trajectories, settings.last, settings.difference, self._function)
        layers = logits[present] if settings.keep_layer_logits else np.empty((len(present), 0), np.float32)
        sizes = self.shard.visit(
            Rows(
                prompt_ids=[trajectories[i].prompt.id for i in present],
                correct=np.array([bool(trajectories[i].correct) for i in present], dtype=bool),
                samples=np.array([trajectories[i].sample for i in present], dtype=np.int32),
                features=features[present],
                layers=layers,
                notes=[self._note(trajectories[i]) for i in present],
                questions=[
                    _head(trajectories[i].prompt.question, settings.response_characters) for i in present
                ],
            ),
            step,
        )
        weight = 0.0 if settings.target == "none" else 1.0
        costs = weight * penalty(sizes, settings.alpha, settings.cap)
        self._enter(ledger, trajectories, present, costs)
        return self._report(answers, sizes, costs)

    def _wanted(self, trajectory: Trajectory) -> bool:
        if trajectory.correct is None:
            raise ValueError(f"sample {trajectory.key} was not graded")
        return trajectory.correct in _TARGETS[self.settings.target]

    def _note(self, trajectory: Trajectory) -> Note:
        """Bounded text of a response: its answer and its end, where that stands."""
        span = find_last_box(trajectory.text)
        answer = trajectory.text[slice(*span)].strip() if not isinstance(span, str) else ""
        return Note(
            _head(answer, self.settings.answer_characters),
            _tail(trajectory.text, self.settings.response_characters),
        )

    def _enter(
        self,
        ledger: RewardLedger,
        trajectories: Sequence[Trajectory],
        present: Sequence[int],
        costs: np.ndarray,
    ) -> None:
        ledger.open(SOURCE)
        rewards = ledger.totals()
        for index, cost in zip(present, costs.tolist(), strict=True):
            reward = float(rewards[index])
            if cost == 0.0 or math.isnan(reward):
                continue
            change = reward / (1.0 + cost) - reward if trajectories[index].correct else -cost
            ledger.add(SOURCE, index, change)

    def _report(
        self, answers: Sequence[AnswerToken | NoFeature | None], sizes: np.ndarray, costs: np.ndarray
    ) -> StepReport:
        """Metrics, all named `meds/...`. A collective of the heads where the eigen ratio is wanted."""
        shard, memory = self.shard.report, self.memory
        found = StepReport()
        asked = sum(answer is not None for answer in answers)
        reasons = Counter(answer for answer in answers if isinstance(answer, str))
        found.means = {
            "meds/penalised_share": (float((costs > 0).sum()), float(asked)),
            "meds/penalty": (float(costs.sum()), float(asked)),
            "meds/size": (float(sizes.sum()), float(len(sizes))),
            "meds/noise_share": (float(shard.noise_rows), float(shard.visited_rows)),
            "meds/clusters": (float(len(shard.cluster_sizes)), float(shard.visited_prompts)),
            "meds/cluster_size": (float(shard.cluster_sizes.sum()), float(len(shard.cluster_sizes))),
        }
        found.maxima = {
            "meds/cluster_size_max": float(shard.cluster_sizes.max(initial=0)),
            "meds/seconds/exchange": shard.exchange_seconds,
            "meds/seconds/assign": shard.assign_seconds,
            "meds/seconds/cluster": shard.cluster_seconds,
        }
        found.totals = {
            "meds/memory_rows": float(memory.rows),
            "meds/memory_bytes": float(memory.bytes),
            "meds/memory_prompts": float(len(memory)),
            "meds/no_feature/not_finite": float(shard.dropped),
        }
        for reason in (*get_args(get_args(NoFeature)[0]), *get_args(get_args(NoFeature)[1])):
            found.totals[f"meds/no_feature/{reason.replace(' ', '_')}"] = float(reasons[reason])
        if self.settings.eigen_ratio:
            found.maxima |= self._eigen_ratios()
        return found

    def _eigen_ratios(self) -> dict[str, float]:
        """Over all replicas, on the first; on the others the seconds only. A collective of the heads."""
        started = time.perf_counter()
        own = self.shard.eigen_sums()
        seconds = time.perf_counter() - started
        everyone = self._exchange([own, *[EigenSums()] * (self.shard.replicas - 1)])
        ratios = EigenSums.merge(everyone).values()
        return {f"meds/{name}": value for name, value in ratios.items()} | {"meds/seconds/diagnose": seconds}


def _head(text: str, count: int) -> str:
    return text if len(text) <= count else text[: max(count - 1, 0)] + "…" * (count > 0)


def _tail(text: str, count: int) -> str:
    return text if len(text) <= count else "…" * (count > 0) + text[len(text) - max(count - 1, 0) :]
