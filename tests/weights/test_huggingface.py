"""Hugging Face folders into live actors and out again, on real ranks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import KINDS, VOCABULARY, is_tied

BODIES = "tests.distributed.bodies_weights"
LAYOUTS = {
    "dp4": {},
    "tp2-dp2": {"tensor": 2},
    "tp4": {"tensor": 4},
    "pp2-dp2": {"pipeline": 2},
    "pp4": {"pipeline": 4},
    "tp2-pp2": {"tensor": 2, "pipeline": 2},
    "tp2-pp2-vpp2": {"tensor": 2, "pipeline": 2, "virtual": 2},
    "pp2-vpp2-dp2": {"pipeline": 2, "virtual": 2},
    "pp2-uneven": {"pipeline": 2, "stages": "Et|t*3L"},
    "tp2-sp-pp2": {"tensor": 2, "pipeline": 2, "sequence": True},
}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def assert_same_weights(left: Path, right: Path) -> None:
    one, other = stored(left), stored(right)
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_family_comes_back_bit_for_bit(layout, ranks, tiny, tmp_path):
    folders = {tiny(kind, kv_heads=4, heads=8): tmp_path / kind for kind in KINDS}
    ranks(4).run(f"{BODIES}:round_trip", layout=layout, folders=folders)
    for source, target in folders.items():
        assert_same_weights(source, target)
        assert json.loads((target / "config.json").read_text()) == json.loads(
            (source / "config.json").read_text()
        )
        assert (target / "generation_config.json").read_bytes() == (
            source / "generation_config.json"
        ).read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_kv_heads_fewer_than_the_tensor_ranks_come_back_bit_for_bit(ranks, tiny, tmp_path):
    folders = {
        tiny(kind, heads=4, kv_heads=n): tmp_path / f"{kind}{n}"
        for kind in ("qwen2", "qwen3")
        for n in (1, 2)
    }
    ranks(4).run(f"{BODIES}:round_trip", layout={"tensor": 4}, folders=folders)
    for source, target in folders.items():
        assert_same_weights(source, target)


def test_no_rank_reads_more_than_its_share(ranks, tiny, tmp_path):
    source = tiny("llama", kv_heads=4, heads=8, max_shard_size="50KB")
    assert len(list(source.glob("*.safetensors"))) > 4
    size = sum(tensor.nbytes for tensor in stored(source).values())
    read = ranks(4).run(
        f"{BODIES}:round_trip", layout={"tensor": 2, "pipeline": 2}, folders={source: tmp_path / "out"}
    )
    assert_same_weights(source, tmp_path / "out")
    shares = [rank[str(source)] for rank in read]
    norms = 64 * 4 * (2 * 4 + 1)  # read by both tensor ranks
    assert sum(shares) == size + norms
    assert max(shares) < 0.3 * size


def test_files_of_bounded_size_with_an_index_that_transformers_loads(ranks, tiny, tmp_path):
    source, target = tiny("qwen3", kv_heads=4, heads=8), tmp_path / "out"
    ranks(4).run(
        f"{BODIES}:round_trip",
        layout={"tensor": 2, "pipeline": 2},
        folders={source: target},
        max_shard_gib=1e-4,
    )
    assert_same_weights(source, target)
    sizes = [path.stat().st_size for path in target.glob("*.safetensors")]
    assert len(sizes) > 3
    assert max(sizes) < 1.2e-4 * 2**30
    ids = torch.tensor([[3, 5, 7, 11]])
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(source)(ids).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(target)(ids).logits, want)


def test_another_dtype_is_written_and_said_in_the_config(ranks, tiny, tmp_path):
    source, target = tiny("qwen2", kv_heads=4, heads=8), tmp_path / "out"
    ranks(4).run(
        f"{BODIES}:round_trip",
        layout={"tensor": 2, "pipeline": 2},
        folders={source: target},
        dtype=torch.bfloat16,
    )
    before, after = stored(source), stored(target)
    assert all(torch.equal(after[name], before[name].to(torch.bfloat16)) for name in before)
    assert AutoModelForCausalLM.from_pretrained(target, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3"])
def test_a_model_made_from_the_config_alone_is_saved_whole(kind, ranks, tiny, tmp_path):
    layout = {"tensor": 2, "pipeline": 2}
    source, target = tiny(kind, kv_heads=4, heads=8), tmp_path / "out"
    ranks(4).run(f"{BODIES}:save_random", layout=layout, source=source, target=target, precision="bf16")
    before, after = stored(source), stored(target)
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}


def test_a_save_that_fails_is_reported_on_every_rank(ranks, tiny, tmp_path):
    source, target = tiny("llama", kv_heads=4, heads=8), tmp_path / "out"
    target.mkdir()
    layout = {"tensor": 2, "pipeline": 2}
    said = ranks(4).run(f"{BODIES}:failures_to_save", layout=layout, source=source, target=target)
    assert all("out exists; remove it or choose another target" in message for message in said)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_rows_that_pad_the_vocabulary_are_zero_after_loading(kind, ranks, tiny):
    folder = tiny(kind, kv_heads=4, heads=8)
    found = ranks(4).run(f"{BODIES}:padding_after_load", layout={"tensor": 4}, folder=folder)
    assert sum(rows for rank in found for rows, _ in rank) >= (1 if is_tied(kind) else 2)
    assert all(largest == 0.0 for rank in found for _, largest in rank)


@pytest.mark.parametrize("kind", ["llama_tied", "qwen2", "qwen3", "qwen3_tied"])
def test_logits_equal_transformers_at_one_stage_and_at_four(kind, ranks, tiny):
    layouts = ({}, {"pipeline": 4}, {"tensor": 2, "pipeline": 2, "virtual": 2}, {"tensor": 4})
    assert_logits_equal_transformers(ranks, tiny(kind, kv_heads=4, heads=8), layouts)


def test_logits_equal_transformers_with_fewer_kv_heads_than_tensor_ranks(ranks, tiny):
    assert_logits_equal_transformers(ranks, tiny("qwen2", kv_heads=2, heads=4), [{"tensor": 4}])


def assert_logits_equal_transformers(ranks, folder: Path, layouts) -> None:
    tokens = [[3, 5, 7, 11, 13, 150, 0, 2], [1, 1, 2, 3, 5, 8, 13, 21]]
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor(tokens)).logits
    for layout in layouts:
        got = [
            x
            for x in ranks(4).run(f"{BODIES}:logits", layout=layout, folder=folder, tokens=tokens)
            if x is not None
        ]
        assert len(got) == 1
        assert got[0].shape == (2, 8, VOCABULARY)
        torch.testing.assert_close(got[0], want, atol=2e-5, rtol=0)


# --- checkpoints that contradict their config


def changed(source: Path, target: Path, config: dict | None = None, **tensors: torch.Tensor | None) -> Path:
    """A copy of a folder with tensors replaced, added, or (None) left out."""
    target.mkdir()
    weights = stored(source) | tensors
    save_file(
        {k: v for k, v in weights.items() if v is not None}, target / "model.safetensors", {"format": "pt"}
    )
    own = json.loads((source / "config.json").read_text()) | (config or {})
    (target / "config.json").write_text(json.dumps(own))
    (target / "generation_config.json").write_bytes((source / "generation_config.json").read_bytes())
    return target


def complaint(ranks, folder: Path, **layout) -> str:
    said = set(ranks(4).run(f"{BODIES}:failures_to_load", layout=layout, folder=folder))
    assert len(said) == 1
    return said.pop()


def test_a_tied_model_may_store_its_output_layer_if_it_is_the_embedding(ranks, tiny, tmp_path):
    source = tiny("llama_tied", kv_heads=4, heads=8)
    stored_twice = changed(
        source, tmp_path / "twice", **{"lm_head.weight": stored(source)["model.embed_tokens.weight"]}
    )
    ranks(4).run(
        f"{BODIES}:round_trip", layout={"tensor": 2, "pipeline": 2}, folders={stored_twice: tmp_path / "out"}
    )
    assert_same_weights(source, tmp_path / "out")


def test_a_tied_model_that_stores_another_output_layer_is_refused(ranks, tiny, tmp_path):
    source = tiny("llama_tied", kv_heads=4, heads=8)
    other = stored(source)["model.embed_tokens.weight"] + 1
    folder = changed(source, tmp_path / "other", **{"lm_head.weight": other})
    said = complaint(ranks, folder, tensor=4)
    assert 'says that they are tied. Set "tie_word_embeddings": false there, or remove lm_head.weight' in said


def test_an_untied_model_without_an_output_layer_is_refused_with_the_remedy(ranks, tiny, tmp_path):
    folder = changed(tiny("qwen3"), tmp_path / "none", **{"lm_head.weight": None})
    assert 'set "tie_word_embeddings": true there' in complaint(ranks, folder)


def test_missing_tensors_are_named(ranks, tiny, tmp_path):
    name = "model.layers.2.mlp.up_proj.weight"
    assert complaint(ranks, changed(tiny("llama"), tmp_path / "less", **{name: None})).endswith(
        f"lacks {name}"
    )


def test_tensors_without_a_place_are_named(ranks, tiny, tmp_path):
    name = "model.layers.2.self_attn.o_proj.bias"
    said = complaint(ranks, changed(tiny("llama"), tmp_path / "more", **{name: torch.zeros(64)}))
    assert said.endswith(f"no place for: {name}")


def test_tensors_that_follow_from_the_config_are_not_read(ranks, tiny, tmp_path):
    source = tiny("llama", kv_heads=4, heads=8)
    name = "model.layers.2.self_attn.rotary_emb.inv_freq"
    folder = changed(source, tmp_path / "old", **{name: torch.zeros(8)})
    ranks(4).run(f"{BODIES}:round_trip", layout={"pipeline": 2}, folders={folder: tmp_path / "out"})
    assert_same_weights(source, tmp_path / "out")


def test_a_tensor_of_another_shape_is_named(ranks, tiny, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    said = complaint(ranks, changed(tiny("llama"), tmp_path / "wide", **{name: torch.zeros(95, 64)}))
    assert f"{name} has shape (95, 64); its config.json asks for (96, 64)" in said
