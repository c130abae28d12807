"""Layer logits on the score pass against those of Hugging Face's hidden states, in every layout."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from megatron_meds.actor.layer_logits import context_place
from tests.actor.test_parity import LAYERS, LAYOUTS, batch
from tests.ranks import RankError

TOKENS = [3, 0, 16, None, 1, None, 6]
"""One answer token of each trajectory of the batch: first ones, last ones, and two samples without."""

VARIANTS = [
    ("packed", "last"),
    ("padded", "last"),
    ("packed", "all"),
    ("padded", "none"),
]


@pytest.fixture(scope="module")
def reference(tiny):
    """kind -> final_norm -> [n, L] by Hugging Face in fp32: hooks on its layers, its norm, its head."""

    @functools.cache
    def compute(kind: str) -> dict[str, np.ndarray]:
        model = AutoModelForCausalLM.from_pretrained(tiny(kind, layers=LAYERS), dtype=torch.float32)
        outputs: list[torch.Tensor] = []
        for layer in model.model.layers:
            layer.register_forward_hook(
                lambda _m, _i, out: outputs.append(out[0] if isinstance(out, tuple) else out)
            )
        trajectories, _ = batch()
        tables = {name: np.full((len(trajectories), LAYERS), np.nan) for name in ("last", "all", "none")}
        for i, (t, token) in enumerate(zip(trajectories, TOKENS, strict=True)):
            if token is None:
                continue
            outputs.clear()
            prompt = list(t.prompt.token_ids)
            with torch.no_grad():
                model(torch.tensor([prompt + t.response_ids]))
                place = len(prompt) + token - 1
                raw = torch.stack([h.reshape(-1, h.shape[-1])[place] for h in outputs])
                normed = model.model.norm(raw)
                row = model.lm_head.weight[t.response_ids[token]]
                tables["none"][i], tables["all"][i] = raw @ row, normed @ row
                tables["last"][i] = torch.cat([raw[:-1], normed[-1:]]) @ row
        return tables

    return compute


def run(ranks, folder, layout, shares, variants=VARIANTS, tokens=TOKENS):
    trajectories, _ = batch()
    return ranks(4).run(
        "tests.distributed.bodies_layer_logits:layer_logits",
        layout=layout,
        folder=folder,
        trajectories=trajectories,
        tokens=tokens,
        shares=shares,
        variants=variants,
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_logits_equal_those_of_hugging_face(ranks, tiny, reference, kind, layout):
    parts = LAYOUTS[layout]
    replicas = 4 // (parts.get("tensor", 1) * parts.get("pipeline", 1))
    shares = [list(range(r, len(TOKENS), replicas)) for r in range(replicas)]
    results = run(ranks, tiny(kind, layers=LAYERS), parts, shares)
    for number, (batching, final_norm) in enumerate(VARIANTS):
        wanted = reference(kind)[final_norm]
        seen = set()
        for result in (r[number] for r in results):  # every rank of a replica knows the whole table
            np.testing.assert_allclose(
                result["table"], wanted[result["rows"]], atol=1e-4, rtol=0, err_msg=f"{batching} {final_norm}"
            )
            seen |= set(result["rows"])
        assert seen == set(range(len(TOKENS)))


@pytest.mark.parametrize("layout", ["tp2-sp-dp2", "pp2-vpp2-dp2"])
def test_a_replica_without_samples_or_without_boxes(ranks, tiny, reference, layout):
    """One replica holds nothing, or only samples without an answer; the other's numbers are right."""
    without = [i for i, token in enumerate(TOKENS) if token is None]
    others = [i for i, token in enumerate(TOKENS) if token is not None]
    for shares in ([[], others], [others, without]):
        results = run(ranks, tiny("qwen3", layers=LAYERS), LAYOUTS[layout], shares, VARIANTS[:1])
        for (result,) in results:
            wanted = reference("qwen3")["last"][result["rows"]]
            np.testing.assert_allclose(result["table"], wanted, atol=1e-4, rtol=0)


def test_a_token_outside_its_response_is_named(ranks, tiny):
    with pytest.raises(RankError, match="token 9 of sample p0/0, which has 9 tokens"):
        run(ranks, tiny("qwen3", layers=LAYERS), {}, [[0]], VARIANTS[:1], tokens=[9, *TOKENS[1:]])


@given(size=st.integers(1, 8), chunk=st.integers(1, 5))
def test_context_places_are_those_of_the_two_chunk_cut(size, chunk):
    """Independent: cut the positions as Megatron-Core does and look every one of them up."""
    length = 2 * size * chunk
    chunks = torch.arange(length).view(2 * size, chunk)
    for rank in range(size):
        held = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]).tolist()
        for local, position in enumerate(held):
            assert context_place(position, length, size) == (rank, local)


@pytest.mark.parametrize(("position", "length", "size"), [(0, 6, 2), (8, 8, 2), (-1, 8, 2)])
def test_context_places_outside_are_refused(position, length, size):
    with pytest.raises(ValueError, match="tokens"):
        context_place(position, length, size)
