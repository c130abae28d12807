"""The model on one pipeline stage against Hugging Face: logits in fp32, for every family and cut."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_meds.actor import model
from megatron_meds.actor.settings import ActorSettings
from tests.ranks import RankError
from tests.tiny import KINDS, VOCABULARY

BODY = "tests.distributed.bodies_actor:logits"


def _sequences(lengths):
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


SEQUENCES = _sequences([9, 1, 17, 4])


def _reference(folder, sequences):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0] for ids in sequences]


def _agree(found, folder, sequences=SEQUENCES, atol=2e-5):
    for per_rank in found:
        for ours, theirs in zip(per_rank, _reference(folder, sequences), strict=True):
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2}, {"tensor": 2, "sequence": True}], ids=["tp1", "tp2", "tp2-sp"]
)
def test_logits_equal_hugging_face(ranks, tiny, kind, layout, packed):
    folder = tiny(kind)
    _agree(ranks(2).run(BODY, layout=layout, folder=folder, sequences=SEQUENCES, packed=packed), folder)


def test_transformers_works_beside_an_actor_on_the_cpu(ranks, tiny):
    folder = tiny("qwen3")
    found = ranks(2).run(
        "tests.distributed.bodies_actor:logits_of_transformers", layout={}, folder=folder, ids=SEQUENCES[0]
    )
    (reference,) = _reference(folder, SEQUENCES[:1])
    for logits in found:
        torch.testing.assert_close(logits, reference)


@pytest.mark.parametrize("sequence", [False, True], ids=["tp4", "tp4-sp"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_logits_hold_with_fewer_key_value_heads_than_tensor_ranks(ranks, tiny, kind, sequence):
    folder = tiny(kind)
    layout = {"tensor": 4, "sequence": sequence}
    _agree(ranks(4).run(BODY, layout=layout, folder=folder, sequences=SEQUENCES, packed=True), folder)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "llama3"],
)
def test_logits_hold_with_scaled_rotary_embeddings(ranks, tiny, tmp_path, rope, packed):
    sequences = _sequences([200, 30])
    for file in tiny("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 500000.0, **rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = ranks(2).run(BODY, layout={"tensor": 2}, folder=tmp_path, sequences=sequences, packed=packed)
    _agree(found, tmp_path, sequences, atol=5e-5)


def test_bf16_stays_close_to_hugging_face(ranks, tiny):
    folder = tiny("qwen3")
    found = ranks(2).run(
        BODY, layout={"tensor": 2}, folder=folder, sequences=SEQUENCES, packed=True, precision="bf16"
    )
    _agree(found, folder, atol=0.15)


def test_random_weights_follow_the_seed_and_are_the_same_on_every_replica(ranks, tiny):
    body, folder = "tests.distributed.bodies_actor:random_weights", tiny("qwen3")

    def weights(seed, **layout):
        return ranks(4).run(body, layout=layout, folder=folder, seed=seed)

    first, again, other = weights(5, tensor=2), weights(5, tensor=2), weights(6, tensor=2)
    for name, matrix in first[0].items():
        assert torch.equal(matrix, again[0][name]), "the seed decides"
        assert torch.equal(matrix, first[2][name]), "ranks 0 and 2 hold the same shard"
        assert not torch.equal(matrix, first[1][name]), "tensor ranks hold different shards"
        assert not torch.equal(matrix, other[0][name]), "another seed, other weights"
        assert 0.5 * 0.02 / 8**0.5 < matrix.std() < 1.5 * 0.02
    stages = weights(5, pipeline=2)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert not torch.equal(stages[0][name], stages[2][name]), "the first layers of two stages differ"


def test_a_layout_the_model_cannot_be_cut_into_is_refused_with_its_key(ranks, tiny):
    with pytest.raises(
        RankError, match=r"actor\.layout\.tensor = 2: does not divide the model's 1 attention heads"
    ):
        ranks(2).run(
            BODY,
            layout={"tensor": 2},
            folder=tiny("llama", heads=1, kv_heads=1),
            sequences=SEQUENCES,
            packed=True,
        )


def test_transformer_engine_is_taken_on_a_gpu_in_bf16_only(monkeypatch):
    monkeypatch.setattr(model, "_has_module", lambda name: True)
    gpu, fp32 = SimpleNamespace(device=torch.device("cuda"), context_size=1), ActorSettings(precision="fp32")
    assert model.pick_attention("auto", ActorSettings(), gpu) == "te"
    assert model.pick_attention("auto", fp32, gpu) == "sdpa"
    with pytest.raises(ValueError, match=r"model\.attention = te: needs actor\.precision=bf16"):
        model.pick_attention("te", fp32, gpu)
