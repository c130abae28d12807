"""The objective of an update adds up over any split of a mini-batch."""

import numpy as np
import pytest
import torch

from megatron_meds.algorithms import policy_loss, resolve
from megatron_meds.algorithms.objective import policy_objective, spread, supervised_objective, weigh
from megatron_meds.algorithms.settings import AlgorithmSettings

AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def test_lengths_one_and_three_with_opposite_advantages_give_a_half_for_every_split():
    algorithm = resolve(AlgorithmSettings(name="dapo"))
    lengths, advantages = [1, 3], [1.0, -1.0]
    whole = weigh(lengths, "token-mean", 16, lambda own: 4.0)
    objective = policy_objective(algorithm)

    def part(rows):
        tokens = {
            "weights": torch.from_numpy(
                np.concatenate(spread([whole[i] for i in rows], [lengths[i] for i in rows]))
            ),
            "advantages": torch.from_numpy(
                np.concatenate(spread([advantages[i] for i in rows], [lengths[i] for i in rows]))
            ),
        }
        tokens["old_logprobs"] = torch.full_like(tokens["weights"], -1.0)
        logprobs = tokens["old_logprobs"].clone()
        return float(objective(logprobs, torch.zeros_like(logprobs), tokens)[0])

    assert part([0, 1]) == pytest.approx(0.5)
    assert part([0]) + part([1]) == pytest.approx(0.5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_parts_add_up_to_the_padded_policy_loss(aggregation):
    random = np.random.default_rng(0)
    lengths, longest = [4, 1, 7, 2], 7
    algorithm = resolve(AlgorithmSettings(name="dapo", aggregation=aggregation, dual_clip=3.0))
    logprobs = [random.normal(-1, 0.5, n).astype(np.float32) for n in lengths]
    old = [random.normal(-1, 0.5, n).astype(np.float32) for n in lengths]
    advantages = random.normal(size=len(lengths))

    denominators = {
        "token-mean": float(sum(lengths)),
    }
    weights = weigh(
        lengths, aggregation, longest, lambda own: denominators.get(aggregation, float(len(lengths)))
    )
    total = 0.0
    for i, n in enumerate(lengths):
        tokens = {
            "weights": torch.full((n,), weights[i]),
            "advantages": torch.full((n,), float(advantages[i])),
            "old_logprobs": torch.from_numpy(old[i]),
        }
        total += float(policy_objective(algorithm)(torch.from_numpy(logprobs[i]), torch.zeros(n), tokens)[0])

    def pad(rows):
        return torch.stack([torch.from_numpy(np.pad(r, (0, longest - len(r)))) for r in rows])

    mask = torch.tensor([[t < n for t in range(longest)] for n in lengths])
    expected, _ = policy_loss(
        pad(logprobs),
        pad(old),
        torch.from_numpy(advantages).float(),
        mask,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
        aggregation=aggregation,
    )
    assert total == pytest.approx(float(expected), rel=1e-5)


def test_a_sequence_that_does_not_count_weighs_nothing():
    weights = weigh([3, 0, 5], "token-mean", 8, lambda own: own)
    assert weights[1] == 0.0
    assert 3 * weights[0] + 5 * weights[2] == pytest.approx(1.0)


def test_the_supervised_objective_is_the_mean_cross_entropy():
    logits = torch.randn(6, 11)
    targets = torch.randint(0, 11, (6,))
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    loss, metrics = supervised_objective(logprobs, torch.zeros(6), {"weights": torch.full((6,), 1 / 6)})
    assert float(loss) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, targets)), rel=1e-6)
    assert float(metrics["tokens"]) == 6
