"""Which prompts come next: endless epochs in a seeded order, with a position that is state.

Knows nothing of what it deals out, so that it serves prompts and supervised examples alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from megatron_meds.trajectory import Prompt, Trajectory


class PromptLoader[Item: (Prompt, Trajectory)]:
    """Deals out items: each exactly once an epoch, and after the last one the next epoch begins.

    A draw that reaches the end of an epoch goes on in the next, so nothing is lost or cut short; a
    set smaller than a draw is dealt out more than once in it. The order of an epoch depends on
    the seed and the epoch's number alone.
    """

    def __init__(self, items: Sequence[Item], prompts_per_step: int, seed: int, shuffle: bool = True) -> None:
        """
        Args:
            prompts_per_step: how many `next` gives when not told.
            shuffle: a new order in every epoch; otherwise that of `items`.

        Raises:
            ValueError: no items.
        """
        if not items:
            raise ValueError("the loader was given no items: data.train is empty")
        self._items = items
        self._per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Items of an epoch."""
        return len(self._items)

    @property
    def epochs(self) -> float:
        """Epochs dealt out so far, fractions included."""
        return self._epoch + self._position / len(self._items)

    def next(self, count: int | None = None) -> list[Item]:
        """The next `count` items (None: `prompts_per_step`)."""
        taken: list[Item] = []
        wanted = self._per_step if count is None else count
        while len(taken) < wanted:
            if self._position == len(self._items):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            end = min(self._position + wanted - len(taken), len(self._items))
            taken += [self._items[i] for i in self._order[self._position : end]]
            self._position = end
        return taken

    def state_dict(self) -> dict[str, int | bool | str]:
        """The exact position: what `next` gives after loading it is what it gives now."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "items": self._digest(),
        }

    def load_state_dict(self, state: dict[str, int | bool | str]) -> None:
        """Go on from a position; seed and shuffling are those of the state.

        Raises:
            ValueError: the state belongs to other items, or to another order of them.
        """
        if state["items"] != self._digest():
            raise ValueError(
                "the checkpoint's place in the data belongs to other data: data.train or a limit of it "
                "changed; restore it, or start a new run from the exported weights"
            )
        self._seed, self._shuffle = int(state["seed"]), bool(state["shuffle"])
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        count = len(self._items)
        if not self._shuffle:
            return np.arange(count)
        return np.random.default_rng([self._seed, epoch]).permutation(count)

    def _digest(self) -> str:
        """sha256 of the items' ids, in order."""
        digest = hashlib.sha256()
        for item in self._items:
            digest.update((item.key if isinstance(item, Trajectory) else item.id).encode())
        return digest.hexdigest()
