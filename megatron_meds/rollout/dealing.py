"""Which replica learns from which group: whole groups, dealt by token count.

Pure arithmetic on sizes, the same on every head. A mini-batch holds the same groups whatever the
number of replicas, so that an update does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence


def cut_mini_batches(groups: int, per_mini_batch: int | None) -> list[list[int]]:
    """Group indexes 0..groups-1 in order, `per_mini_batch` at a time (None: all at once); the last
    mini-batch may be smaller."""
    size = per_mini_batch or max(groups, 1)
    return [list(range(start, min(start + size, groups))) for start in range(0, groups, size)]


def deal(tokens: Sequence[int], groups: Sequence[int], replicas: int) -> list[list[int]]:
    """Share `groups` (indexes into `tokens`) over replicas: the longest first, each to the replica
    that has the fewest tokens so far; a replica may end up with none.

    Returns one list of group indexes per replica, each in the order of `groups`.
    """
    hands: list[list[int]] = [[] for _ in range(replicas)]
    load = [0] * replicas
    for group in sorted(groups, key=lambda g: (-tokens[g], g)):
        replica = min(range(replicas), key=lambda r: (load[r], r))
        hands[replica].append(group)
        load[replica] += tokens[group]
    place = {group: i for i, group in enumerate(groups)}
    return [sorted(hand, key=place.__getitem__) for hand in hands]


def next_round(wanted: int, kept: int, asked: int) -> int:
    """Prompts to ask in the next round of dynamic sampling: what is missing, divided by the share
    that was kept so far (taken as at least one in four), at most `wanted`."""
    missing = wanted - kept
    share = max(kept / asked, 0.25) if asked else 1.0
    return min(-int(-missing // share), wanted)
