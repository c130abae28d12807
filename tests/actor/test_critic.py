"""The critic against Hugging Face in fp32, in every layout; its state through a resume."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from transformers import AutoModel

from megatron_meds.trajectory import Trajectory
from tests.actor.test_parity import LAYERS, LAYOUTS, batch

BODIES = "tests.distributed.bodies_critic"
CLIP = 0.4
COUNTED = [9, 1, 17, 0, 2, 30, 0]
"""Tokens of each sequence that count: the fourth left the loss, the last has no score."""
HEAD = np.random.default_rng(3).normal(size=64).astype(np.float32) / 8


@functools.cache
def case() -> tuple[list[Trajectory], list[np.ndarray | None]]:
    """Seven trajectories of unlike lengths with the values of a critic before, and what it is to predict."""
    random = np.random.default_rng(11)
    trajectories, _ = batch()
    returns: list[np.ndarray | None] = []
    for t in trajectories:
        t.values = (0.5 * random.normal(size=len(t))).astype(np.float32)
        returns.append(random.normal(size=len(t)).astype(np.float32))
    returns[6] = None
    return trajectories, returns


@pytest.fixture(scope="module")
def reference(tiny):
    """kind -> (values, loss, gradient) by Hugging Face, computed once."""

    @functools.cache
    def compute(kind: str):
        model = AutoModel.from_pretrained(tiny(kind, layers=LAYERS), dtype=torch.float32)
        head = torch.from_numpy(HEAD.copy()).requires_grad_()
        trajectories, returns = case()
        found, errors = {}, []
        for i, t in enumerate(trajectories):
            prompt = list(t.prompt.token_ids)
            ids = torch.tensor([prompt + t.response_ids])
            hidden = model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
            values = hidden @ head
            found[i] = values.detach().numpy()
            if COUNTED[i]:
                old, target = torch.from_numpy(t.values), torch.from_numpy(returns[i])
                near = torch.clamp(values, old - CLIP, old + CLIP)
                errors.append(torch.maximum((values - target) ** 2, (near - target) ** 2) / 2)
        loss = torch.cat(errors).mean()
        loss.backward()
        gradient = {f"model.{name}": p.grad for name, p in model.named_parameters()}
        return found, loss.item(), gradient | {"score.weight": head.grad[None]}

    return compute


@pytest.mark.parametrize(
    ("layout", "kind", "batching", "budget"),
    [
        ("dp4", "qwen2", "packed", 24),
        ("dp4", "llama", "padded", 8192),
        ("tp2-dp2", "qwen3", "packed", 24),
        ("tp2-sp-dp2", "qwen3_tied", "packed", 8192),
        ("tp2-sp-dp2", "qwen2", "padded", 24),
        ("pp2-dp2", "qwen2", "packed", 24),
        ("pp4-uneven", "qwen3_tied", "padded", 40),
        ("pp2-vpp2-dp2", "qwen2", "packed", 24),
        ("tp2-pp2", "llama", "packed", 40),
        ("tp2-sp-pp2", "qwen2", "padded", 24),
        ("tp2-sp-pp2-vpp2", "qwen3", "packed", 24),
    ],
)
def test_values_and_gradients_equal_hugging_face(ranks, tiny, reference, layout, kind, batching, budget):
    trajectories, returns = case()
    results = ranks(4).run(
        f"{BODIES}:parity",
        layout=LAYOUTS[layout],
        folder=tiny(kind, layers=LAYERS),
        actor={"batching": batching, "tokens_per_micro_batch": budget},
        head=HEAD,
        everyone=trajectories,
        returns=returns,
        counted=COUNTED,
        clip=CLIP,
    )
    values, loss, gradient = reference(kind)
    at_first, found = ({i: v for r in results for i, v in r[key].items()} for key in ("at_first", "values"))
    assert sorted(found) == list(range(len(trajectories)))
    for i, wanted in values.items():
        assert not at_first[i].any()
        np.testing.assert_allclose(found[i], wanted, atol=1e-4, rtol=0)
    sums = [r["sums"] for r in results if r["sums"]]
    assert sum(s["loss"] for s in sums) == pytest.approx(loss, rel=1e-5)
    assert sum(s["tokens"] for s in sums) == sum(COUNTED)
    assert 0.1 < sum(s["clip_fraction"] for s in sums) / sum(COUNTED) < 0.9
    (exported,) = [r["gradient"] for r in results if r["gradient"]]
    assert set(exported) == set(gradient)
    for name, wanted in gradient.items():
        error = (exported[name] - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-4, f"gradient of {name}: relative error {error:.2e}"
    sizes = [pair for r in results for pair in r["parameters"].items()]
    assert {size for name, size in sizes if name == "output_layer.weight"} == {(1, 64)}
    of_the_vocabulary = {name for name, size in sizes if size[0] in (152, 80)}  # whole, and half
    assert of_the_vocabulary == {"embedding.word_embeddings.weight"}


@pytest.mark.parametrize(
    ("layout", "actor"),
    [
        ({}, {}),
        ({"tensor": 2, "sequence": True, "pipeline": 2}, {"distributed_optimizer": False}),
        ({"pipeline": 2, "virtual": 2}, {}),
        ({"pipeline": 2}, {"precision": "bf16"}),
    ],
    ids=str,
)
def test_twice_n_steps_equal_n_a_resume_and_n_bit_by_bit(ranks, tiny, tmp_path, layout, actor):
    differing = ranks(4).run(
        f"{BODIES}:resume_bit_by_bit", layout=layout, folder=tiny("qwen2"), state=tmp_path / "critic", **actor
    )
    assert differing == [[]] * 4


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"pipeline": 2}, {"tensor": 2, "sequence": True, "pipeline": 2}),
        ({"tensor": 2, "pipeline": 2}, {}),
    ],
    ids=str,
)
def test_another_layout_loads_it_and_goes_on(ranks, tiny, tmp_path, before, after):
    options = {"folder": tiny("qwen2"), "state": tmp_path / "critic"}
    then = ranks(4).run(f"{BODIES}:train_and_save", layout=before, **options)
    now = ranks(4).run(f"{BODIES}:load_and_go_on", layout=after, **options)
    for when, tolerance in (("saved", 0.0), ("later", 1e-4)):
        (old,), (new,) = ([r[when]["weights"] for r in run if r[when]["weights"]] for run in (then, now))
        assert old["score.weight"].abs().max() > 1e-3
        torch.testing.assert_close(new, old, rtol=10 * tolerance, atol=tolerance)
        (old,), (new,) = ([r[when]["values"] for r in run if r[when]["values"]] for run in (then, now))
        for a, b in zip(old, new, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 + tolerance)


def test_a_state_of_another_kind_or_model_is_refused_with_the_remedy(ranks, tiny, tmp_path):
    state = tmp_path / "critic"
    told = ranks(2).run(f"{BODIES}:load_what_does_not_fit", layout={}, folder=tiny("qwen2"), state=state)
    assert all("is not a critic's state: it has no critic.json" in text for text in told), told[0]
    ranks(2).run(f"{BODIES}:train_and_save", layout={}, folder=tiny("qwen2"), state=state)
    told = ranks(2).run(f"{BODIES}:load_what_does_not_fit", layout={}, folder=tiny("qwen3"), state=state)
    assert all("of another model" in text and "check critic.path" in text for text in told), told[0]
