"""Parameters of model chunks are found by name and place, whatever made the modules."""

import pytest
import torch

from megatron_meds.actor.shape import ModelShape, read_model_config
from megatron_meds.weights.families import entries
from megatron_meds.weights.live import held_parameters
from megatron_meds.weights.reshard import padded_rows, shard_shape

FUSED, LOCAL = -1, 0
"""Which of an entry's names: transformer-engine's (norms inside the linear layers) or the local layers'."""


def chunk_of(shape: ModelShape, layers: list[int], naming: int, outside: bool = False) -> torch.nn.Module:
    """A module tree with the names that Megatron gives a chunk of these layers (0-based, whole model)."""
    chunk = torch.nn.Module()
    place = {layer: local for local, layer in enumerate(layers)}
    for entry in entries(shape):
        if entry.layer is None and outside:
            add(chunk, entry.megatron[naming], shard_shape(entry, 1, padded_rows(shape.vocab, 8)))
        elif entry.layer in place:
            add(chunk, f"decoder.layers.{place[entry.layer]}.{entry.megatron[naming]}", shard_shape(entry, 1))
    for layer, local in place.items():
        chunk.get_submodule(f"decoder.layers.{local}").layer_number = layer + 1  # type: ignore[assignment]
    return chunk


def add(root: torch.nn.Module, name: str, shape: tuple[int, ...]) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, torch.nn.Module())
        root = root.get_submodule(part)
    root.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize("naming", [LOCAL, FUSED])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_local_and_fused_names_lead_to_the_same_entries(kind, naming, tiny):
    shape = read_model_config(tiny(kind))
    held = held_parameters([chunk_of(shape, [0, 1, 2, 3], naming, outside=True)], shape, tensor_size=1)
    assert {h.entry for h in held} == set(entries(shape))
    assert not any(h.copy for h in held)


def test_layers_are_placed_by_their_number_in_the_whole_model(tiny):
    shape = read_model_config(tiny("llama"))
    held = held_parameters([chunk_of(shape, [1], LOCAL), chunk_of(shape, [3], LOCAL)], shape, tensor_size=1)
    assert {h.entry.layer for h in held} == {1, 3}


def test_an_output_layer_in_a_tied_model_is_a_copy_of_its_embedding(tiny):
    shape = read_model_config(tiny("llama_tied"))
    chunk = chunk_of(shape, [3], LOCAL)
    add(chunk, "output_layer.weight", (152, 64))
    (copy,) = [h for h in held_parameters([chunk], shape, tensor_size=1) if h.copy]
    assert copy.entry.tensors[0].name == "model.embed_tokens.weight"
    assert copy.vocabulary_rows == 152


def test_a_parameter_without_an_entry_is_named(tiny):
    shape = read_model_config(tiny("llama"))
    chunk = chunk_of(shape, [0], LOCAL)
    add(chunk, "decoder.layers.0.self_attention.linear_proj.bias", (64,))
    with pytest.raises(
        ValueError, match=r"no entry for parameter decoder\.layers\.0\.self_attention\.linear_proj\.bias"
    ):
        held_parameters([chunk], shape, tensor_size=1)


def test_a_parameter_that_the_table_asks_for_is_missed(tiny):
    shape = read_model_config(tiny("qwen2"))
    chunk = chunk_of(shape, [2], LOCAL)
    chunk.get_submodule("decoder.layers.0.self_attention.linear_qkv").bias = None  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match=r"no parameter decoder\.layers\.2\.self_attention\.linear_qkv\.bias"
    ):
        held_parameters([chunk], shape, tensor_size=1)


def test_a_shard_of_another_shape_is_named_with_what_it_is_part_of(tiny):
    shape = read_model_config(tiny("llama"))
    chunk = chunk_of(shape, [2], LOCAL)
    with pytest.raises(ValueError, match=r"layers\.2\..* at tensor size 2"):
        held_parameters([chunk], shape, tensor_size=2)
