"""Every algorithm against its paper's equations, written out over sequences and tokens, in fp64.

Nothing here but the data is shared with the product: advantages, losses and their gradients are computed
once more, a sequence at a time, and must be the same however the step is split.
"""

from __future__ import annotations

import math
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megatron_meds.algorithms import gae, resolve
from megatron_meds.algorithms.algorithm import estimate
from megatron_meds.algorithms.objective import (
    policy_objective,
    token_arrays,
    value_arrays,
    value_objective,
    weigh,
)
from megatron_meds.algorithms.settings import AlgorithmSettings
from megatron_meds.trajectory import Prompt, RewardLedger, Trajectory

LONGEST = 12
GAMMA = 0.9
LAM = 0.8
VALUE_CLIP = 0.5
TERMS = {
    "kl": {"coefficient": 0.3},
    "entropy_bonus": 0.05,
    "mismatch": {"importance_weights": True, "cap": 1.5},
}
NAMES = [
    "grpo", "dapo", "dr_grpo", "gspo", "grpo_entropy", "rloo", "reinforce_pp", "reinforce_pp_baseline",
    "ppo",
]  # fmt: skip


@dataclass
class Step:
    """Random sequences: what is sampled, scored and rewarded, and the policy that has moved since."""

    trajectories: list[Trajectory]
    rewards: list[np.ndarray]
    """[T] of each: at the last token, and at one before it."""
    new: list[torch.Tensor]
    """[T] fp64: log-probabilities of the policy that learns; leaves."""
    entropy: list[torch.Tensor]
    """[T] fp64; leaves."""
    values: list[torch.Tensor]
    """[T] fp64: of the critic that learns; leaves."""


def random_step(seed: int, groups: int = 4, samples: int = 3, moved: float = 0.3) -> Step:
    random, of_critic = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
    step = Step([], [], [], [], [])
    for group in range(groups):
        prompt = Prompt(id=f"p{group}", question="?", token_ids=(1,), answer="1")
        for sample in range(samples):
            length = int(random.integers(1, LONGEST + 1))
            old = -2.0 * random.random(length)
            server = old + 0.4 * random.normal(size=length)
            server[random.random(length) < 0.1] = np.nan
            t = Trajectory(prompt, sample, [0] * length, "", server.tolist(), "stop", 0)
            t.logprobs = old.astype(np.float32)
            t.reference_logprobs = (old + 0.5 * random.normal(size=length)).astype(np.float32)
            rewards = np.zeros(length)
            rewards[-1] = random.integers(0, 2)
            rewards[random.integers(0, length)] += random.normal()
            new = t.logprobs.astype(np.float64) + moved * random.normal(size=length)
            step.trajectories.append(t)
            step.rewards.append(rewards)
            step.new.append(torch.from_numpy(new).requires_grad_())
            t.values = of_critic.normal(size=length).astype(np.float32)
            step.values.append(torch.from_numpy(t.values + of_critic.normal(size=length)).requires_grad_())
            step.entropy.append(torch.from_numpy(2.0 * random.random(length)).requires_grad_())
    return step


# --- the equations ---------------------------------------------------------------------------------


def siblings(step: Step, i: int) -> list[float]:
    """Total rewards of the group of sequence i."""
    own = step.trajectories[i].prompt.id
    return [r.sum() for r, t in zip(step.rewards, step.trajectories, strict=True) if t.prompt.id == own]


def paper_advantages(name: str, step: Step) -> list[np.ndarray]:
    per_sequence = []
    for i, rewards in enumerate(step.rewards):
        group = siblings(step, i)
        mean = statistics.mean(group)
        if name == "dr_grpo":
            per_sequence.append(rewards.sum() - mean)
        elif name == "rloo":
            per_sequence.append(rewards.sum() - (sum(group) - rewards.sum()) / (len(group) - 1))
        else:
            per_sequence.append((rewards.sum() - mean) / (statistics.stdev(group) + 1e-6))
    if not name.startswith("reinforce") and name != "ppo":
        return [np.full(len(r), a) for r, a in zip(step.rewards, per_sequence, strict=True)]
    returns = []
    for i, rewards in enumerate(step.rewards):
        if name == "ppo":
            returns.append(paper_gae(rewards, step.trajectories[i].values))
            continue
        rest = rewards.copy()
        if name == "reinforce_pp_baseline":
            rest[-1] -= statistics.mean(siblings(step, i))
        size = len(rest)
        returns.append([sum(GAMMA ** (k - t) * rest[k] for k in range(t, size)) for t in range(size)])
    everything = [g for row in returns for g in row]
    mean, std = statistics.mean(everything), statistics.stdev(everything)
    return [(np.array(row) - mean) / std for row in returns]


def paper_gae(rewards: np.ndarray, values: np.ndarray) -> list[float]:
    """The sum over k of (gamma lam)^k delta_{t + k}, written out."""
    after = [*values[1:].tolist(), 0.0]
    deltas = [r + GAMMA * after[t] - float(values[t]) for t, r in enumerate(rewards)]
    size = len(deltas)
    return [sum((GAMMA * LAM) ** (k - t) * deltas[k] for k in range(t, size)) for t in range(size)]


def paper_value_loss(step: Step) -> torch.Tensor:
    tokens = []
    for t, rewards, new in zip(step.trajectories, step.rewards, step.values, strict=True):
        for k, advantage in enumerate(paper_gae(rewards, t.values)):
            old = float(t.values[k])
            target = old + advantage
            near = new[k].clamp(old - VALUE_CLIP, old + VALUE_CLIP)
            tokens.append(torch.maximum((new[k] - target) ** 2, (near - target) ** 2) / 2)
    return torch.stack(tokens).mean()


def surrogate(ratio, advantage, low, high, dual=None):
    loss = -torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)
    return torch.minimum(loss, -dual * advantage) if dual is not None and advantage < 0 else loss


def paper_loss(name: str, step: Step) -> torch.Tensor:
    """Policy loss with importance weights, KL (k3) to the reference, entropy bonus."""
    advantages = paper_advantages(name, step)
    low, high = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28)}.get(name, (0.2, 0.2))
    sequences = []
    for i, t in enumerate(step.trajectories):
        old = torch.from_numpy(t.logprobs.astype(np.float64))
        reference = torch.from_numpy(t.reference_logprobs.astype(np.float64))
        new, entropy, size = step.new[i], step.entropy[i], len(t)
        sequence_ratio = torch.exp(sum(new[k] - old[k] for k in range(size)) / size)
        tokens = []
        for k in range(size):
            a = float(advantages[i][k])
            if name == "grpo_entropy":
                a += min(0.4 * entropy[k].item(), abs(a) / 2)
            ratio = sequence_ratio if name == "gspo" else torch.exp(new[k] - old[k])
            dual = {"dapo": 10.0, "ppo": 3.0}.get(name)
            loss = surrogate(ratio, torch.tensor(a), low, high, dual)
            server = t.rollout_logprobs[k]
            weight = 1.0 if math.isnan(server) else min(math.exp(float(old[k]) - server), 1.5)
            delta = reference[k] - new[k]
            k3 = torch.exp(delta) - delta - 1
            tokens.append(weight * loss + 0.3 * k3 - 0.05 * entropy[k])
        sequences.append(torch.stack(tokens))
    if name == "dapo":
        return torch.cat(sequences).mean()
    if name == "ppo":
        return torch.cat(sequences).mean() + paper_value_loss(step)
    if name == "rloo":
        return torch.stack([s.sum() for s in sequences]).mean()
    if name == "dr_grpo":
        return torch.stack([s.sum() / LONGEST for s in sequences]).mean()
    return torch.stack([s.mean() for s in sequences]).mean()


def leaves(name: str, step: Step) -> list[torch.Tensor]:
    return [*step.new, *step.entropy, *(step.values if name == "ppo" else [])]


# --- the product, split over replicas and micro-batches --------------------------------------------


class AddUp:
    """The sum over replicas, each a thread."""

    def __init__(self, parts: int) -> None:
        self._barrier = threading.Barrier(parts)
        self._given: dict[int, np.ndarray] = {}

    def of(self, part: int):
        def add(numbers):
            self._given[part] = np.asarray(numbers)
            self._barrier.wait(timeout=10)
            total = sum(self._given[i] for i in sorted(self._given))
            self._barrier.wait(timeout=10)
            return total

        return add


def own_loss(settings: AlgorithmSettings, step: Step, replicas: list[list[int]], micro_batch: int) -> float:
    """Adds gradients to the step's leaves, a micro-batch at a time; returns the sum of the losses, the
    critic's among them where there is one."""
    algorithm = resolve(settings)
    objective = policy_objective(algorithm)
    add_up = AddUp(len(replicas))

    def arrays_of(part: int):
        rows = replicas[part]
        mine = [step.trajectories[i] for i in rows]
        ledger = RewardLedger(mine)
        for place, i in enumerate(rows):
            ledger.add_tokens("all", place, step.rewards[i])
        whole = add_up.of(part)
        advantages = algorithm.advantages(ledger, mine, whole)
        weights = weigh(
            [len(t) for t in mine],
            algorithm.aggregation,
            LONGEST,
            lambda own: float(whole(np.array([own]))[0]),
        )
        arrays = token_arrays(algorithm, mine, advantages, weights)
        if algorithm.returns is not None:
            arrays |= value_arrays(mine, algorithm.returns(ledger, mine), weights)
        return arrays

    with ThreadPoolExecutor(len(replicas)) as pool:
        found = list(pool.map(arrays_of, range(len(replicas))))
    total = 0.0
    for rows, arrays in zip(replicas, found, strict=True):
        for start in range(0, len(rows), micro_batch):
            part = range(start, min(start + micro_batch, len(rows)))
            tokens = {
                name: torch.from_numpy(np.concatenate([values[k] for k in part]))
                for name, values in arrays.items()
            }
            logprobs = torch.cat([step.new[rows[k]] for k in part])
            entropy = torch.cat([step.entropy[rows[k]] for k in part])
            loss, _ = objective(logprobs, entropy, tokens)
            if algorithm.returns is not None:
                values = torch.cat([step.values[rows[k]] for k in part])
                loss = loss + value_objective(VALUE_CLIP)(values, tokens)[0]
            loss.backward()
            total += loss.item()
    return total


SPLITS = {
    "at-once": ([list(range(12))], 12),
    "micro-batches": ([list(range(12))], 5),
    "two-replicas": ([[3, 4, 5, 9, 10, 11], [0, 1, 2, 6, 7, 8]], 4),
    "an-idle-replica": ([list(range(11, -1, -1)), []], 1),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_the_papers_equations_for_every_split(name, split):
    step = random_step(seed=len(name), moved=1e-3 if name == "gspo" else 0.3)
    expected = paper_loss(name, step)
    gradients = torch.autograd.grad(expected, leaves(name, step))
    settings = AlgorithmSettings(name=name, gamma=GAMMA, lam=LAM, **TERMS)
    assert own_loss(settings, step, *SPLITS[split]) == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    for leaf, gradient in zip(leaves(name, step), gradients, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-4, atol=1e-6)


def test_the_data_reaches_both_sides_of_every_clip():
    for name, moved in (("gspo", 1e-3), ("grpo", 0.3)):
        step = random_step(seed=len(name), moved=moved)
        loss = paper_loss(name, step)
        (without,) = torch.autograd.grad(loss, step.new[0], retain_graph=True)
        assert loss.isfinite()
        assert without.any()
        algorithm = resolve(AlgorithmSettings(name=name))
        ledger = RewardLedger(step.trajectories)
        for i, r in enumerate(step.rewards):
            ledger.add_tokens("all", i, r)
        advantages = algorithm.advantages(ledger, step.trajectories)
        arrays = token_arrays(algorithm, step.trajectories, advantages, [1.0] * 12)
        tokens = {k: torch.from_numpy(np.concatenate(v)) for k, v in arrays.items()}
        _, metrics = policy_objective(algorithm)(torch.cat(step.new), torch.cat(step.entropy), tokens)
        assert 0.1 < metrics["clip_fraction"] / metrics["tokens"] < 0.9


# --- closed forms ----------------------------------------------------------------------------------


def ledger_of(rewards: list[dict[int, float]], lengths: list[int], prompts: str):
    """(ledger, trajectories) with rewards by token."""
    trajectories = [
        Trajectory(Prompt(p, p, (1,), "1"), i, [0] * n, "", [0.0] * n, "stop", 0)
        for i, (n, p) in enumerate(zip(lengths, prompts, strict=True))
    ]
    ledger = RewardLedger(trajectories)
    for i, given in enumerate(rewards):
        for token, value in given.items():
            ledger.add("r", i, value, token)
    return ledger, trajectories


def advantages_of(name: str, *args, **options) -> list[list[float]]:
    found = resolve(AlgorithmSettings(name=name, **options)).advantages(*ledger_of(*args))
    assert all(a.dtype == np.float32 for a in found)
    return [a.tolist() for a in found]


def test_rloo_and_dr_grpo_have_their_closed_forms():
    # one right of four: 1 - 0 for it, 0 - 1/3 for the others; without leave-one-out 3/4 and -1/4
    rewards = [{-1: 1.0}, {}, {}, {}]
    found = advantages_of("rloo", rewards, [2, 1, 1, 1], "aaaa")
    np.testing.assert_allclose(np.concatenate(found), [1, 1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    found = advantages_of("dr_grpo", rewards, [2, 1, 1, 1], "aaaa")
    np.testing.assert_allclose(np.concatenate(found), [0.75, 0.75, -0.25, -0.25, -0.25], rtol=1e-6)


def test_reinforce_pp_whitens_the_rewards_to_go_over_all_tokens_of_the_step():
    # returns 3, 2, 2 and 0: mean 7/4, squares (25 + 1 + 1 + 49) / 16, unbiased variance 76/48
    found = advantages_of("reinforce_pp", [{0: 1.0, 2: 2.0}, {}], [3, 1], "ab")
    expected = (np.array([3, 2, 2, 0]) - 1.75) / math.sqrt(76 / 48)
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-6)


def test_the_group_baseline_takes_an_easy_prompts_advantage_away():
    # both prompts have rewards 1 and 0 about their own mean; without the baseline 10 and 11 would tower
    rewards = [{-1: 11.0}, {-1: 10.0}, {-1: 1.0}, {}]
    found = advantages_of("reinforce_pp_baseline", rewards, [1, 1, 1, 1], "aabb")
    np.testing.assert_allclose(np.concatenate(found), np.array([1, -1, 1, -1]) * math.sqrt(3) / 2, rtol=1e-6)


def with_values(ledger: RewardLedger, trajectories: list[Trajectory], values: list[list[float]]):
    for t, v in zip(trajectories, values, strict=True):
        t.values = np.array(v, dtype=np.float32)
    return ledger, trajectories


def test_ppo_at_gamma_and_lambda_1_compares_what_came_with_what_the_critic_expected():
    # rewards to go 3, 2, 2 and 0 less the values: 2, 1, 0 and 1; mean 1, unbiased variance 2/3
    step = with_values(*ledger_of([{0: 1.0, 2: 2.0}, {}], [3, 1], "ab"), [[1.0, 1.0, 2.0], [-1.0]])
    algorithm = resolve(AlgorithmSettings(name="ppo"))
    found = algorithm.advantages(*step)
    np.testing.assert_allclose(np.concatenate(found), np.array([1, 0, -1, 0]) / math.sqrt(2 / 3), rtol=1e-6)
    assert [r.tolist() for r in algorithm.returns(*step)] == [[3.0, 2.0, 2.0], [0.0]]


def test_ppo_gives_a_sample_without_a_score_no_advantage_and_no_return():
    algorithm = resolve(AlgorithmSettings(name="ppo", gamma=0.9, lam=0.5))
    ledger, trajectories = with_values(
        *ledger_of([{-1: 1.0}, {}, {}], [2, 2, 5], "abc"), [[0.1, 0.2], [0.3, 0.4], [9.0] * 5]
    )
    ledger.mark_unscored("r", 2)
    found, returns = algorithm.advantages(ledger, trajectories), algorithm.returns(ledger, trajectories)
    fewer = with_values(*ledger_of([{-1: 1.0}, {}], [2, 2], "ab"), [[0.1, 0.2], [0.3, 0.4]])
    assert not found[2].any() and returns[2] is None
    np.testing.assert_array_equal(found[:2], algorithm.advantages(*fewer))
    np.testing.assert_array_equal(returns[:2], algorithm.returns(*fewer))
    arrays = value_arrays(trajectories, returns, [0.5, 0.5, 0.0])
    assert not arrays["returns"][2].any() and not arrays["value_weights"][2].any()


def test_ppo_takes_the_end_of_a_truncated_response_for_its_end():
    ledger, trajectories = with_values(*ledger_of([{}], [2], "a"), [[4.0, 6.0]])
    trajectories[0].finish_reason = "length"
    assert resolve(AlgorithmSettings(name="ppo")).returns(ledger, trajectories)[0].tolist() == [0.0, 0.0]


def test_estimates_of_ragged_lists_are_those_of_each_alone():
    random = np.random.default_rng(2)
    lengths = [*random.integers(1, 9, size=300).tolist(), 40]
    rewards, values = ([random.normal(size=n) for n in lengths] for _ in range(2))
    advantages, returns = estimate(rewards, values, 0.9, 0.8)
    for r, v, a, g in zip(rewards, values, advantages, returns, strict=True):
        (alone,), (target,) = gae(*(torch.from_numpy(x)[None] for x in (r, v, np.ones(len(r)))), 0.9, 0.8)
        np.testing.assert_array_equal(a, alone.numpy())
        np.testing.assert_array_equal(g, target.numpy())
    assert estimate([], [], 0.9, 0.8) == ([], [])


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_equal_rewards_give_no_advantage_and_an_unscored_sample_takes_no_part(name):
    rewards = [{-1: 0.7}] * 4
    assert not np.concatenate(advantages_of(name, rewards, [1, 1, 1, 1], "aabb")).any()
    ledger, trajectories = ledger_of([{-1: 1.0}, {}, {}], [2, 2, 5], "aaa")
    ledger.mark_unscored("r", 2)
    found = resolve(AlgorithmSettings(name=name)).advantages(ledger, trajectories)
    without = resolve(AlgorithmSettings(name=name)).advantages(*ledger_of([{-1: 1.0}, {}], [2, 2], "aa"))
    assert not found[2].any()
    np.testing.assert_array_equal(found[:2], without)


@pytest.mark.parametrize("name", NAMES)
def test_a_replica_without_trajectories_has_no_advantages(name):
    assert resolve(AlgorithmSettings(name=name)).advantages(RewardLedger([]), []) == []


def test_the_entropy_advantage_is_bounded_by_half_the_advantage_and_has_no_gradient():
    from megatron_meds.algorithms import entropy_advantages

    entropies = torch.tensor([0.1, 9.0, 9.0, 1.0], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, 0.0])
    found = entropy_advantages(advantages, entropies)
    torch.testing.assert_close(found, torch.tensor([0.04, 0.5, 0.5, 0.0]))
    assert not found.requires_grad
    torch.testing.assert_close(
        entropy_advantages(advantages, entropies, 0.2, 4.0)[:2], torch.tensor([0.02, 0.25])
    )


def test_sequence_means_and_their_gradients_stay_within_a_sequence():
    from megatron_meds.algorithms import sequence_means

    values = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    numbers = torch.tensor([4.0, 4.0, 2.0, 4.0, 4.0, 4.0, 0.0])
    found = sequence_means(values, numbers)
    for part in (slice(0, 2), slice(2, 3), slice(3, 6), slice(6, 7)):
        torch.testing.assert_close(found[part], values[part].mean().expand_as(found[part]))
    assert torch.autograd.gradcheck(lambda v: sequence_means(v, numbers), values)
    empty = torch.zeros(0)
    assert sequence_means(empty, empty).shape == (0,)  # a micro-batch that only fills up


def test_a_sequence_that_does_not_weigh_leaves_the_gradient_of_the_others_as_it_is():
    step = random_step(3)
    algorithm = resolve(AlgorithmSettings(name="gspo", **TERMS))
    grads = []
    for poisoned in (False, True):
        tokens = {
            k: torch.from_numpy(np.concatenate(v))
            for k, v in token_arrays(
                algorithm,
                step.trajectories[:3],
                [np.ones(len(t), np.float32) for t in step.trajectories[:3]],
                [0.1, 0.0, 0.2],
            ).items()
        }
        rows = [x.detach().clone() for x in step.new[:3]]
        rows[1] += 5.0 * poisoned
        rows = [r.requires_grad_() for r in rows]
        policy_objective(algorithm)(torch.cat(rows), torch.cat(step.entropy[:3]), tokens)[0].backward()
        assert not rows[1].grad.any()
        grads.append(torch.cat([rows[0].grad, rows[2].grad]))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "missing"), [("grpo", "reference_logprobs"), ("dapo", "logprobs")])
def test_an_unscored_trajectory_is_named(name, missing):
    step = random_step(1)
    setattr(step.trajectories[5], missing, None)
    algorithm = resolve(AlgorithmSettings(name=name, kl={"coefficient": 0.1}))
    with pytest.raises(ValueError, match=f"p1/2 has no {missing}"):
        token_arrays(algorithm, step.trajectories, [np.zeros(len(t)) for t in step.trajectories], [1.0] * 12)


def with_steps(ledger: RewardLedger, steps: dict[int, dict[int, float]]) -> RewardLedger:
    """The ledger with step rewards {trajectory: {token: value}}."""
    ledger.open("steps")
    for trajectory, values in steps.items():
        for token, value in values.items():
            ledger.add("steps", trajectory, value, token)
    return ledger


def stepped(name: str, outcomes, steps, lengths, prompts: str, **settings) -> list[list[float]]:
    ledger, trajectories = ledger_of(
        [{n - 1: r} for r, n in zip(outcomes, lengths, strict=True)], lengths, prompts
    )
    algorithm = resolve(AlgorithmSettings(name=name, **settings))
    return [a.tolist() for a in algorithm.advantages(with_steps(ledger, steps), trajectories)]


def test_step_rewards_join_a_groups_advantages_at_the_tokens_they_reach():
    # G of the two: [0.6, 0.2, 0.2] and [-0.4]; mean over their four tokens 0.15
    steps = {0: {0: 0.4, 2: 0.2}, 1: {0: -0.4}}
    found = stepped("dr_grpo", [1.0, 0.0], steps, [3, 1], "aa")
    assert found[0] == pytest.approx([0.5 + 0.45, 0.5 + 0.05, 0.5 + 0.05])
    assert found[1] == pytest.approx([-0.5 - 0.55])
    std = math.sqrt(0.5)
    for name in ("grpo", "dapo", "gspo"):
        scaled = stepped(name, [1.0, 0.0], steps, [3, 1], "aa")
        assert [a for row in scaled for a in row] == pytest.approx(
            [a / std for row in found for a in row], rel=1e-5
        )


def test_a_group_of_equal_outcomes_learns_from_its_steps_alone():
    found = stepped("grpo", [1.0, 1.0, 0.0], {0: {1: 0.5}, 1: {0: 0.0}}, [2, 2, 1], "aab")
    assert found[0] == pytest.approx([0.25, 0.25]) and found[1] == pytest.approx([-0.25, -0.25])
    assert found[2] == [0.0]


def test_the_outcomes_spread_and_mean_know_nothing_of_the_steps():
    plain = stepped("grpo", [1.0, 0.0], {}, [2, 2], "aa")
    flat = stepped("grpo", [1.0, 0.0], {0: {1: 0.3}, 1: {1: 0.3}}, [2, 2], "aa")
    assert [a for row in flat for a in row] == pytest.approx([a for row in plain for a in row])


def test_responses_without_steps_keep_their_advantage_and_do_not_count_for_the_mean():
    found = stepped("dr_grpo", [1.0, 0.0, 0.5], {0: {0: 0.2}}, [2, 2, 2], "aaa")
    assert found[0] == pytest.approx([0.5 + 0.1, 0.5 - 0.1])
    assert found[1] == pytest.approx([-0.5, -0.5]) and found[2] == pytest.approx([0.0, 0.0])


def test_an_unscored_response_has_no_advantage_from_its_steps_either():
    ledger, trajectories = ledger_of([{1: 1.0}, {1: 0.0}, {}], [2, 2, 2], "aaa")
    ledger.mark_unscored("custom", 2)
    with_steps(ledger, {0: {0: 0.2}, 2: {0: 0.9}})
    found = resolve(AlgorithmSettings(name="dr_grpo")).advantages(ledger, trajectories)
    assert found[2].tolist() == [0.0, 0.0]
    assert found[0].tolist() == pytest.approx([0.6, 0.4])


def test_reinforce_pp_takes_step_rewards_token_by_token():
    found = stepped("reinforce_pp", [1.0, 0.0], {0: {0: 0.4}, 1: {0: -0.2}}, [2, 2], "ab")
    to_go = [1.4, 1.0, -0.2, 0.0]
    mean, std = statistics.mean(to_go), statistics.stdev(to_go)
    assert [a for row in found for a in row] == pytest.approx([(g - mean) / std for g in to_go], rel=1e-4)
