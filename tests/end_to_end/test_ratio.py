"""After a sync the actor and the real server agree on every token that was sampled."""

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.fixtures_vllm import perturbed


@pytest.fixture(scope="module")
def other_weights(vllm_server, tmp_path_factory):
    """A folder like the server's, with other weights: only a sync makes the two agree."""
    import torch

    folder = tmp_path_factory.mktemp("perturbed")
    model = AutoModelForCausalLM.from_pretrained(vllm_server.folder, dtype=torch.float32)
    perturbed(model, seed=3).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    "layout", [{"pipeline": 2}, {"tensor": 2, "sequence": True}, {}], ids=["pp2", "tp2-sp", "dp2"]
)
def test_ratios_are_one_after_a_sync(ranks, vllm_server, other_weights, layout, temperature):
    vllm_server.last_version += 1
    results = ranks(2).run(
        "tests.distributed.bodies_ratio:sample_and_score",
        layout=layout,
        folder=other_weights,
        urls=vllm_server.urls,
        actor={"batching": "packed", "tokens_per_micro_batch": 64},
        temperature=temperature,
        version=vllm_server.last_version,
    )
    pairs = [pair for result in results for pair in result]
    assert len(pairs) == 12 * (1 if "pipeline" in layout or "tensor" in layout else 2)
    first = np.array([np.exp(own[0] - server[0]) for own, server in pairs])
    np.testing.assert_allclose(first, 1.0, atol=1e-3)
    gaps = np.concatenate([np.abs(own - server) for own, server in pairs])
    assert gaps.mean() < 1e-3
