"""Whole objectives through the actor: gradients against Hugging Face and the equations, the reference."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_meds.trajectory import Prompt, Trajectory

BODIES = "tests.distributed.bodies_algorithms"
LONGEST = 20
CASES = {
    "grpo": {
        "name": "grpo",
        "kl": {"coefficient": 0.2},
        "entropy_bonus": 0.1,
        "mismatch": {"importance_weights": True},
    },
    "gspo": {"name": "gspo", "clip_low": 0.05, "clip_high": 0.05, "kl": {"coefficient": 0.2}},
}
COUNTED = [9, 1, 17, 0, 2]
"""Tokens of each sequence that count: the fourth one left the loss."""


def forward(model, trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of every response token, by transformers."""
    prompt = list(trajectory.prompt.token_ids)
    ids = torch.tensor([prompt + trajectory.response_ids])
    logp = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    picked = logp.gather(-1, torch.tensor(trajectory.response_ids)[:, None])[:, 0]
    return picked, -(logp.exp() * logp).sum(-1)


@pytest.fixture(scope="module")
def folder(tiny):
    return tiny("qwen3_tied")


@pytest.fixture(scope="module")
def batch(folder) -> tuple[list[Trajectory], list[np.ndarray]]:
    """Five trajectories, scored by policies near the model, and advantages of their tokens."""
    random = np.random.default_rng(7)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trajectories, advantages = [], []
    for index, (prompt, response) in enumerate([(3, 9), (8, 1), (1, 17), (5, 5), (12, 2)]):
        ids = [int(i) for i in random.integers(0, 151, prompt + response)]
        asked = Prompt(id=f"p{index}", question="?", token_ids=tuple(ids[:prompt]), answer="1")
        t = Trajectory(asked, 0, ids[prompt:], "", [], "stop", 0)
        with torch.no_grad():
            now = forward(model, t)[0].numpy()
        near = [(now + 0.3 * random.normal(size=response)).astype(np.float32) for _ in range(3)]
        t.logprobs, t.reference_logprobs = near[0], near[1]
        t.rollout_logprobs = near[2].tolist()
        trajectories.append(t)
        advantages.append(np.full(response, random.normal(), dtype=np.float32))
    trajectories[0].rollout_logprobs[4] = float("nan")
    return trajectories, advantages


@pytest.fixture(scope="module")
def expected(folder, batch):
    """case -> gradient, by transformers and the equations on one process."""

    @functools.cache
    def compute(case: str) -> dict[str, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        sequences = []
        for t, a, count in zip(*batch, COUNTED, strict=True):
            if not count:
                continue
            new, entropy = forward(model, t)
            old, reference = torch.from_numpy(t.logprobs), torch.from_numpy(t.reference_logprobs)
            advantage, delta = torch.from_numpy(a), reference - new
            k3 = delta.exp() - delta - 1
            if case == "grpo":
                ratio = (new - old).exp()
                server = torch.tensor(t.rollout_logprobs)
                weight = torch.nan_to_num((old - server).exp(), nan=1.0).clamp(max=2.0)
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * weight
                sequences.append((-gain + 0.2 * k3 - 0.1 * entropy).mean())
            else:
                ratio = ((new - old).sum() / len(t)).exp()
                gain = torch.minimum(ratio * advantage[0], ratio.clamp(0.95, 1.05) * advantage[0])
                sequences.append(-gain + 0.2 * k3.mean())
        torch.stack(sequences).mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    return compute


@pytest.mark.parametrize(
    ("layout", "batching", "budget"),
    [
        ({"pipeline": 2}, "packed", 24),
        ({"tensor": 2, "sequence": True}, "padded", 40),
        ({}, "packed", 8192),
    ],
    ids=["pp2-dp2", "tp2-sp-dp2", "dp4"],
)
def test_the_gradient_of_a_whole_objective_is_that_of_one_process_by_the_equations(
    ranks, folder, batch, expected, layout, batching, budget
):
    trajectories, advantages = batch
    results = ranks(4).run(
        f"{BODIES}:gradients",
        layout=layout,
        folder=folder,
        actor={"batching": batching, "tokens_per_micro_batch": budget},
        trajectories=trajectories,
        advantages=advantages,
        counted=COUNTED,
        cases=CASES,
        longest=LONGEST,
    )
    for case in CASES:
        (found,) = [result[case] for result in results if result[case]]
        wanted = expected(case)
        assert set(found) == set(wanted)
        for name, gradient in wanted.items():
            error = (found[name] - gradient).abs().max() / gradient.abs().max()
            assert error < 1e-4, f"{case}, gradient of {name}: relative error {error:.2e}"


@pytest.mark.parametrize("layout", [{"pipeline": 2, "virtual": 2}, {"tensor": 2}], ids=["pp2-vpp2", "tp2"])
def test_the_reference_stays_what_its_folder_holds_while_the_policy_learns_and_is_resumed(
    ranks, tiny, folder, batch, tmp_path, layout
):
    trajectories, _ = batch
    other = tiny("llama", layers=8)
    results = ranks(4).run(
        f"{BODIES}:reference_through_a_resume",
        layout=layout,
        model=folder,
        other=other,
        folder=tmp_path / "state",
        trajectories=trajectories,
    )
    found = {name: {k: v for result in results for k, v in result[name].items()} for name in results[0]}
    assert not found["trained"][0].any()
    for place, source in (("before", folder), ("after", folder), ("resumed", folder), ("other", other)):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        assert sorted(found[place]) == list(range(len(trajectories)))
        for i, t in enumerate(trajectories):
            with torch.no_grad():
                wanted = forward(model, t)[0].numpy()
            np.testing.assert_allclose(found[place][i], wanted, atol=1e-4, rtol=0)
    for i in range(len(trajectories)):
        assert np.array_equal(found["before"][i], found["resumed"][i])
    assert max(np.abs(found["policy"][i] - found["before"][i]).max() for i in found["policy"]) > 1e-2
