"""The family tables name exactly what transformers stores, with its shapes."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from megatron_meds.actor.shape import read_model_config
from megatron_meds.weights.families import check_names, entries
from tests.tiny import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_tables_name_every_stored_tensor_once_with_its_shape(kind, tiny):
    folder = tiny(kind)
    tensors = [tensor for entry in entries(read_model_config(folder)) for tensor in entry.tensors]
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert len(tensors) == len(stored)
    assert {tensor.name: tensor.shape for tensor in tensors} == stored


def test_a_table_that_contradicts_the_config_is_refused(tiny):
    with pytest.raises(ValueError, match="has QKV biases, which its weight table contradicts"):
        entries(replace(read_model_config(tiny("llama")), qkv_bias=True))
    with pytest.raises(ValueError, match="has no q/k norms"):
        entries(replace(read_model_config(tiny("qwen3")), qk_norm=False))


def test_an_unknown_family_is_refused_with_those_there_are(tiny):
    with pytest.raises(ValueError, match=r"'gemma'; there are \['llama', 'mistral', 'qwen2', 'qwen3'\]"):
        entries(replace(read_model_config(tiny("llama")), family="gemma"))


def test_many_missing_tensors_are_counted(tiny):
    with pytest.raises(ValueError, match=r"folder lacks .*lm_head\.weight.* and 34 more"):
        check_names([], read_model_config(tiny("llama")), Path("folder"))
