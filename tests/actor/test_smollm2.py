"""The actor on real weights: SmolLM2-135M against Hugging Face in fp32, its template's prompts too.

Needs the folder that `python tools/fetch_smollm2.py` makes; $SMOLLM2 says where, if not build/smollm2.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_meds.data.settings import TemplateSettings
from megatron_meds.data.templates import Template, load_tokenizer
from megatron_meds.trajectory import Prompt, Trajectory
from tools.fetch_smollm2 import is_whole

FOLDER = Path(os.environ.get("SMOLLM2") or Path(__file__).parents[2] / "build" / "smollm2").absolute()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not is_whole(FOLDER),
        reason=f"no SmolLM2 at {FOLDER}: run tools/fetch_smollm2.py, or set SMOLLM2 to its folder",
    ),
]

LAYOUTS = {
    "tp3": (3, {"tensor": 3}),
    "pp4-uneven": (4, {"pipeline": 4, "stages": "Et*6|t*8|t*9|t*7L"}),
}
TEXTS = [
    ("What is 3 + 5?", "3 + 5 = 8."),
    ("Name the capital of France.", "The capital of France is Paris, a city on the Seine."),
]


@pytest.fixture(scope="module")
def batch() -> tuple[list[Trajectory], dict[str, list[np.ndarray]]]:
    """Two short conversations in the model's own template, with arbitrary weights on their tokens."""
    template = Template(TemplateSettings(), load_tokenizer(FOLDER))
    random = np.random.default_rng(3)
    prompts = template.token_ids([template.text(question) for question, _ in TEXTS])
    responses = template.response_ids([answer for _, answer in TEXTS])
    trajectories = [
        Trajectory(Prompt(f"p{i}", "?", ids, "1"), 0, response, "", [0.0] * len(response), "stop", 0)
        for i, (ids, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    names = ("on_logprobs", "on_entropy")
    arrays = {n: [random.normal(size=len(t)).astype(np.float32) for t in trajectories] for n in names}
    return trajectories, arrays


@pytest.fixture(scope="module")
def reference(batch):
    """(log-probabilities, entropies) of each trajectory and the gradient, by Hugging Face in fp32."""
    trajectories, arrays = batch
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    # The end of a turn is this model's padding too, and torch gives a padding row no gradient; here it is a
    # token like any other.
    model.get_input_embeddings().padding_idx = None
    total, scores = torch.zeros(()), []
    for i, t in enumerate(trajectories):
        prompt = list(t.prompt.token_ids)
        logits = model(torch.tensor([prompt + t.response_ids])).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1)
        picked = logp.gather(-1, torch.tensor(t.response_ids)[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        total = total + (torch.from_numpy(arrays["on_logprobs"][i]) * picked).sum()
        total = total + (torch.from_numpy(arrays["on_entropy"][i]) * entropy).sum()
        scores.append((picked.detach().numpy(), entropy.detach().numpy()))
    total.backward()
    return scores, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_gradients_of_real_weights_equal_hugging_face(ranks, batch, reference, layout):
    trajectories, arrays = batch
    size, settings = LAYOUTS[layout]
    results = ranks(size).run(
        "tests.distributed.bodies_parity:parity",
        layout=settings,
        folder=FOLDER,
        actor={"tokens_per_micro_batch": 64},
        trajectories=trajectories,
        arrays=arrays,
        temperature=1.0,
    )
    scores, gradient = reference
    found = {i: pair for result in results for i, pair in result["scores"].items()}
    for i, (logp, entropy) in enumerate(scores):
        np.testing.assert_allclose(found[i][0], logp, atol=1e-4, rtol=0)
        np.testing.assert_allclose(found[i][1], entropy, atol=1e-4, rtol=0)
    (exported,) = [result["gradient"] for result in results if result["gradient"]]
    assert set(exported) == set(gradient)
    errors = {n: ((exported[n] - g).abs().max() / g.abs().max()).item() for n, g in gradient.items()}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < 1e-3, f"gradient of {worst}: relative error {errors[worst]:.2e}"
