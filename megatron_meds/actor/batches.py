"""Trajectories to micro-batches: packed rows or rows of like lengths, equally many on every replica.

Knows lengths and token ids; not rewards, not the model. Letters: b rows, s tokens of a row,
N response tokens of a micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from megatron_meds.trajectory import Trajectory


@dataclass(frozen=True)
class MicroBatch:
    """Token rows for one forward call, and where their response tokens are predicted."""

    tokens_bs: torch.Tensor
    """int64 [b, s]: prompt and response without the last response token, which predicts nothing."""
    positions_bs: torch.Tensor
    """int64 [b, s]: position within its own sequence."""
    select_N: torch.Tensor
    """int64 [N]: places of the predicting positions in the flattened [s * b] order of hidden states."""
    targets_N: torch.Tensor
    """int64 [N]: the response token each of them predicts."""
    rows: tuple[int, ...]
    """Indexes of the trajectories, in the order of `select_N`; empty in a filler."""
    lengths: tuple[int, ...]
    """Response tokens of each of `rows`; they add up to N."""
    starts: tuple[int, ...]
    """Where the first response token of each of `rows` is predicted, in that same flattened order;
    the next ones follow b places apart."""
    cu_seqlens: torch.Tensor | None
    """int32 [sequences + 1], always on the CPU: borders of the packed sequences; None where rows are
    padded."""
    max_seqlen: int
    """Longest sequence in tokens."""
    real_tokens: int
    """Tokens that are not padding."""

    @property
    def shape(self) -> tuple[int, int]:
        """(b, s)."""
        return self.tokens_bs.shape[0], self.tokens_bs.shape[1]

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device, but for `cu_seqlens`."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("tokens_bs", "positions_bs", "select_N", "targets_N")
        }
        return MicroBatch(
            **moved,
            rows=self.rows,
            lengths=self.lengths,
            starts=self.starts,
            cu_seqlens=self.cu_seqlens,
            max_seqlen=self.max_seqlen,
            real_tokens=self.real_tokens,
        )

    def gather(self, per_trajectory: Sequence[np.ndarray]) -> torch.Tensor:
        """[N] fp32 on the micro-batch's device: the token arrays of its rows, end to end."""
        if not self.rows:
            return torch.zeros(0, dtype=torch.float32, device=self.tokens_bs.device)
        joined = np.concatenate([per_trajectory[row] for row in self.rows]).astype(np.float32)
        return torch.from_numpy(joined).to(self.tokens_bs.device)

    def places(self, tokens: Mapping[int, int]) -> dict[int, int]:
        """Where chosen response tokens are predicted: trajectory index -> place in the flattened
        [s * b] order of hidden states, for those of `tokens` (index -> token number) in this micro-batch."""
        rows = self.tokens_bs.shape[0]
        return {
            row: start + tokens[row] * rows
            for row, start in zip(self.rows, self.starts, strict=True)
            if row in tokens
        }

    def scatter(self, values_N: torch.Tensor) -> dict[int, np.ndarray]:
        """Cut [..., N] back into one fp32 array [..., T] per trajectory index."""
        pieces = values_N.float().cpu().split(list(self.lengths), dim=-1) if self.rows else ()
        return {row: piece.numpy() for row, piece in zip(self.rows, pieces, strict=True)}


def input_length(trajectory: Trajectory) -> int:
    """Tokens that enter the model: prompt and response without the last response token."""
    return len(trajectory.prompt.token_ids) + len(trajectory.response_ids) - 1


def plan_packed(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of indexes whose lengths add up to at most `budget`: as few as first fit finds, evenly filled.

    A sequence longer than the budget gets a bin of its own.
    """
    plan = _first_fit(lengths, budget)
    if len(plan) < 2 or max(lengths) > budget:
        return plan
    # The smallest capacity that needs no more bins: a last bin with little in it would be padding where
    # all rows get one length, and a bubble in the pipeline where they do not.
    low, high = max(-(-sum(lengths) // len(plan)), max(lengths)), budget
    while high - low > budget // 512:
        capacity = (low + high) // 2
        tighter = _first_fit(lengths, capacity)
        if len(tighter) <= len(plan):
            plan, high = tighter, capacity
        else:
            low = capacity + 1
    return plan


def _first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First fit, longest first."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        need = lengths[index]
        place = next((k for k, free in enumerate(room) if free >= need), None)
        if place is None:
            bins.append([index])
            room.append(capacity - need)
        else:
            bins[place].append(index)
            room[place] -= need
    return bins


def plan_padded(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of like lengths with rows x longest row at most `budget`; longest first.

    The cut of the sorted lengths that costs least: every token of the rectangles, and a sixteenth of the
    budget for each bin. A sequence longer than the budget gets a bin of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    cost, start = [0.0], [0]  # of the first n sequences; where the last bin of them begins
    for end in range(1, len(order) + 1):
        cheapest, begin = float("inf"), end - 1
        for first in range(end - 1, -1, -1):
            tokens = (end - first) * lengths[order[first]]
            if tokens > budget and end - first > 1:
                break  # with one more, still longer row it would not fit either
            total = cost[first] + tokens + budget / 16
            if total < cheapest:
                cheapest, begin = total, first
        cost.append(cheapest)
        start.append(begin)
    bins: list[list[int]] = []
    end = len(order)
    while end:
        bins.append(order[start[end] : end])
        end = start[end]
    return bins[::-1]


def count_for(count: int, stages: int, interleaved: bool) -> int:
    """Micro-batches a schedule takes: at least one, and with an interleaved pipeline a multiple of
    its stages."""
    count = max(count, 1)
    return -(-count // stages) * stages if interleaved else count


def make_micro_batches(
    trajectories: Sequence[Trajectory],
    *,
    budget: int,
    batching: Literal["packed", "padded"],
    multiple: int = 1,
    uniform: bool = False,
) -> list[MicroBatch]:
    """Cut trajectories into micro-batches of at most `budget` tokens, padding included.

    Args:
        multiple: row lengths are multiples of this (sequence parallelism: the tensor size).
        uniform: packed rows all get one length, so that pipeline stages need not exchange shapes.

    Raises:
        ValueError: a trajectory without prompt or response tokens, by its key; `uniform` with padded
            rows, whose one shape would be the most rows by the longest.
    """
    if uniform and batching == "padded":
        raise ValueError("padded micro-batches have shapes of their own: uniform is for packed ones")
    for trajectory in trajectories:
        if not trajectory.prompt.token_ids or not trajectory.response_ids:
            raise ValueError(f"sample {trajectory.key} has an empty prompt or response")
    lengths = [input_length(t) for t in trajectories]
    plan = (plan_packed if batching == "packed" else plan_padded)(lengths, budget)
    if not plan:
        return []
    if batching == "packed":
        totals = [_up(sum(lengths[i] for i in rows), multiple) for rows in plan]
        common = max(totals) if uniform else None
        return [
            _packed(rows, trajectories, common or total) for rows, total in zip(plan, totals, strict=True)
        ]
    widths = [_up(max(lengths[i] for i in rows), multiple) for rows in plan]
    return [_padded(rows, trajectories, len(rows), width) for rows, width in zip(plan, widths, strict=True)]


def filler(shape: tuple[int, int], batching: Literal["packed", "padded"]) -> MicroBatch:
    """A micro-batch of `shape` (b, s) with nothing to predict: evens out counts between replicas."""
    return _packed([], [], shape[1]) if batching == "packed" else _padded([], [], *shape)


def _packed(rows: Sequence[int], trajectories: Sequence[Trajectory], total: int) -> MicroBatch:
    tokens = np.zeros(total, dtype=np.int64)
    positions = np.zeros(total, dtype=np.int64)
    borders, starts, targets, used = [0], [], [], 0
    for row in rows:
        trajectory = trajectories[row]
        ids = _input_ids(trajectory)
        tokens[used : used + len(ids)] = ids
        positions[used : used + len(ids)] = np.arange(len(ids))
        starts.append(used + len(trajectory.prompt.token_ids) - 1)
        targets.append(np.asarray(trajectory.response_ids, dtype=np.int64))
        used += len(ids)
        borders.append(used)
    longest = max((b - a for a, b in itertools.pairwise(borders)), default=0)
    if used < total:  # the padding is a sequence of its own, so that nothing attends to it
        positions[used:] = np.arange(total - used)
        borders.append(total)
        longest = max(longest, total - used)
    return MicroBatch(
        tokens_bs=torch.from_numpy(tokens)[None],
        positions_bs=torch.from_numpy(positions)[None],
        select_N=_join([s + np.arange(len(t)) for s, t in zip(starts, targets, strict=True)]),
        targets_N=_join(targets),
        rows=tuple(rows),
        lengths=tuple(map(len, targets)),
        starts=tuple(starts),
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
        max_seqlen=longest,
        real_tokens=used,
    )


def _padded(rows: Sequence[int], trajectories: Sequence[Trajectory], height: int, width: int) -> MicroBatch:
    tokens = np.zeros((height, width), dtype=np.int64)
    positions = np.tile(np.arange(width, dtype=np.int64), (height, 1))
    starts, targets, real = [], [], 0
    for place, row in enumerate(rows):
        trajectory = trajectories[row]
        ids = _input_ids(trajectory)
        tokens[place, : len(ids)] = ids
        starts.append((len(trajectory.prompt.token_ids) - 1) * height + place)
        targets.append(np.asarray(trajectory.response_ids, dtype=np.int64))
        real += len(ids)
    return MicroBatch(
        tokens_bs=torch.from_numpy(tokens),
        positions_bs=torch.from_numpy(positions),
        select_N=_join(
            [start + np.arange(len(t)) * height for start, t in zip(starts, targets, strict=True)]
        ),
        targets_N=_join(targets),
        rows=tuple(rows),
        lengths=tuple(map(len, targets)),
        starts=tuple(starts),
        cu_seqlens=None,
        max_seqlen=width,
        real_tokens=real,
    )


def _input_ids(trajectory: Trajectory) -> np.ndarray:
    ids = [*trajectory.prompt.token_ids, *trajectory.response_ids[:-1]]
    return np.asarray(ids, dtype=np.int64)


def _join(pieces: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(pieces)) if pieces else torch.zeros(0, dtype=torch.int64)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
