"""The actor against Hugging Face in fp32, in every layout: scores, gradients, updates."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_meds.trajectory import Prompt, Trajectory

LAYOUTS = {
    "dp4": {},
    "tp2-dp2": {"tensor": 2},
    "tp2-sp-dp2": {"tensor": 2, "sequence": True},
    "pp2-dp2": {"pipeline": 2},
    "pp4": {"pipeline": 4},
    "pp4-uneven": {"pipeline": 4, "stages": "Et*3|tt|tt|tL"},
    "pp2-vpp2-dp2": {"pipeline": 2, "virtual": 2},
    "tp2-pp2": {"tensor": 2, "pipeline": 2},
    "tp2-sp-pp2": {"tensor": 2, "sequence": True, "pipeline": 2},
    "tp2-sp-pp2-vpp2": {"tensor": 2, "sequence": True, "pipeline": 2, "virtual": 2},
}
LAYERS = 8
TEMPERATURE = 0.8


@functools.cache
def batch() -> tuple[list[Trajectory], dict[str, list[np.ndarray]]]:
    """Seven trajectories of unlike lengths and arbitrary weights on their tokens."""
    random = np.random.default_rng(5)
    trajectories, on_logprobs, on_entropy = [], [], []
    for index, (prompt, response) in enumerate([(3, 9), (8, 1), (1, 17), (5, 5), (12, 2), (2, 30), (4, 7)]):
        ids = [int(i) for i in random.integers(0, 151, prompt + response)]
        asked = Prompt(id=f"p{index}", question="?", token_ids=tuple(ids[:prompt]), answer="1")
        trajectories.append(Trajectory(asked, 0, ids[prompt:], "", [0.0] * response, "stop", 0))
        on_logprobs.append(random.normal(size=response).astype(np.float32))
        on_entropy.append(random.normal(size=response).astype(np.float32))
    return trajectories, {"on_logprobs": on_logprobs, "on_entropy": on_entropy}


def _forward(model, trajectory, temperature):
    prompt = list(trajectory.prompt.token_ids)
    ids = torch.tensor([prompt + trajectory.response_ids])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    logp = logits.log_softmax(-1)
    picked = logp.gather(-1, torch.tensor(trajectory.response_ids)[:, None])[:, 0]
    return picked, -(logp.exp() * logp).sum(-1)


def _loss(model, temperature):
    trajectories, arrays = batch()
    total, scores = torch.zeros(()), {}
    for i, t in enumerate(trajectories):
        logp, entropy = _forward(model, t, temperature)
        total = total + (torch.from_numpy(arrays["on_logprobs"][i]) * logp).sum()
        total = total + (torch.from_numpy(arrays["on_entropy"][i]) * entropy).sum()
        scores[i] = (logp.detach().numpy(), entropy.detach().numpy())
    return total, scores


@pytest.fixture(scope="module")
def reference(tiny):
    """kind -> (scores, gradient) by Hugging Face, computed once."""

    @functools.cache
    def compute(kind: str):
        model = AutoModelForCausalLM.from_pretrained(tiny(kind, layers=LAYERS), dtype=torch.float32)
        loss, scores = _loss(model, TEMPERATURE)
        loss.backward()
        return scores, {name: p.grad for name, p in model.named_parameters()}

    return compute


@pytest.mark.parametrize("batching", ["packed", "padded"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_gradients_equal_hugging_face(ranks, tiny, reference, kind, layout, batching):
    trajectories, arrays = batch()
    results = ranks(4).run(
        "tests.distributed.bodies_parity:parity",
        layout=LAYOUTS[layout],
        folder=tiny(kind, layers=LAYERS),
        actor={"batching": batching, "tokens_per_micro_batch": 24, "head_chunk": 5},
        trajectories=trajectories,
        arrays=arrays,
        temperature=TEMPERATURE,
    )
    scores, gradient = reference(kind)
    found = {i: pair for result in results for i, pair in result["scores"].items()}
    assert sorted(found) == list(range(len(trajectories)))
    for i, (logp, entropy) in scores.items():
        np.testing.assert_allclose(found[i][0], logp, atol=1e-4, rtol=0)
        np.testing.assert_allclose(found[i][1], entropy, atol=1e-4, rtol=0)
    (exported,) = [result["gradient"] for result in results if result["gradient"]]
    assert set(exported) == set(gradient)
    for name, wanted in gradient.items():
        error = (exported[name] - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-4, f"gradient of {name}: relative error {error:.2e}"


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_leaves_the_gradient_as_it_is(ranks, tiny, reference, recompute):
    trajectories, arrays = batch()
    results = ranks(4).run(
        "tests.distributed.bodies_parity:parity",
        layout=LAYOUTS["tp2-sp-pp2"],
        folder=tiny("qwen3", layers=LAYERS),
        actor={"recompute": recompute, "tokens_per_micro_batch": 24},
        trajectories=trajectories,
        arrays=arrays,
        temperature=TEMPERATURE,
    )
    _, gradient = reference("qwen3")
    (exported,) = [result["gradient"] for result in results if result["gradient"]]
    for name, wanted in gradient.items():
        assert (exported[name] - wanted).abs().max() / wanted.abs().max() < 1e-4, name


def _torch_updates(folder, count):
    """The same updates by Hugging Face, torch's AdamW and clip_grad_norm_."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3
    )
    for _ in range(count):
        optimizer.zero_grad()
        loss, _ = _loss(model, 1.0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed-optimizer", "plain-optimizer"])
@pytest.mark.parametrize("layout", ["dp4", "tp2-sp-dp2", "pp2-vpp2-dp2", "tp2-pp2"])
def test_updates_equal_torch_adamw_with_clipping(ranks, tiny, layout, distributed):
    trajectories, arrays = batch()
    folder = tiny("qwen2", layers=4)
    results = ranks(4).run(
        "tests.distributed.bodies_parity:updates",
        layout=LAYOUTS[layout],
        folder=folder,
        actor={"distributed_optimizer": distributed, "tokens_per_micro_batch": 40},
        trajectories=trajectories,
        arrays=arrays,
        count=3,
    )
    (exported,) = [result for result in results if result]
    start = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, wanted in _torch_updates(folder, 3).items():
        moved = (wanted - start[name]).abs().max()
        assert moved > 1e-4
        gap = (exported[name] - wanted).abs() / moved
        # Adam divides a gradient by its own size: an entry whose gradient is rounding moves by rounding.
        assert gap.mean() < 1e-4 and (gap > 0.01).float().mean() < 2e-3, name
