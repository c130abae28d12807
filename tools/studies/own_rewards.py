"""Two methods of the field that VSRM is compared with, as reward functions of a user's own.

`vsrm.reward_function=tools.studies.own_rewards:exit_decay` and
`reward.function=tools.studies.own_rewards:group_length` with `reward.function_replaces_outcome=true`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_meds.trajectory import Trajectory

LENGTH_WEIGHT = 0.4
"""Share of a right answer's reward that its length decides."""


def exit_decay(accuracies: np.ndarray) -> np.ndarray:
    """Early exits from one trace: a right exit earns half of what the right exit before it did.

        v_i = acc_i 2^-(acc_0 + ... + acc_{i-1})        r_j = (v_{j+1} - mean v) / (P + 1)

    The exits are the truncations of the trace at its steps, a group of their own. A token of step j is a
    part of exits j + 1 to P, so that the reward to go gives it the sum of their advantages.

    Args:
        accuracies: [P + 1] of the exits, share of right continuations.

    Returns:
        [P].

    Source: after the decaying reward of serial groups, S-GRPO, arXiv 2505.07686.
    """
    before = np.concatenate([[0.0], np.cumsum(accuracies)[:-1]])
    values = accuracies * 0.5**before
    return (values[1:] - values.mean()) / len(values)


def group_length(trajectories: Sequence[Trajectory]) -> list[float]:
    """A right answer earns the more the shorter it is beside the right answers to its prompt.

        right: 1 - LENGTH_WEIGHT sigmoid((tokens - mean) / std)        wrong: 0

    Mean and standard deviation are those of the prompt's right answers; 1 - LENGTH_WEIGHT / 2 where they
    are all of one length.

    Source: after arXiv 2502.04463, section 3.
    """
    lengths: dict[str, list[int]] = {}
    for t in trajectories:
        if t.correct:
            lengths.setdefault(t.prompt.id, []).append(len(t))
    rewards = []
    for t in trajectories:
        if not t.correct:
            rewards.append(0.0)
            continue
        others = np.array(lengths[t.prompt.id], dtype=np.float64)
        spread = others.std()
        z = (len(t) - others.mean()) / spread if spread > 0 else 0.0
        rewards.append(float(1.0 - LENGTH_WEIGHT / (1.0 + np.exp(-z))))
    return rewards
