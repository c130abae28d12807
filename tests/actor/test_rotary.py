"""Rotary frequencies against transformers' own, and positions that restart with each packed sequence."""

from dataclasses import replace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_meds.actor.rotary import RestartingRotary, inverse_frequencies
from megatron_meds.actor.shape import RopeScaling, read_model_config

SCALINGS = {
    "linear": RopeScaling("linear", 3.0),
    "llama31": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
    "llama32": RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
    "other bounds": RopeScaling("llama3", 5.0, 2.0, 3.0, 100),
}


def test_frequencies_are_transformers_own(tiny):
    config = AutoConfig.from_pretrained(tiny("llama"))
    found = inverse_frequencies(read_model_config(tiny("llama")))
    torch.testing.assert_close(found, LlamaRotaryEmbedding(config).inv_freq, rtol=0, atol=0)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_scaled_frequencies_are_transformers_own(tiny, name, theta):
    scaling = SCALINGS[name]
    config = AutoConfig.from_pretrained(tiny("llama"))
    config.head_dim = 128
    config.rope_parameters = {
        "rope_type": scaling.kind,
        "rope_theta": theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_positions,
    }
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, torch.device("cpu"))
    assert factor == 1.0
    shape = replace(read_model_config(tiny("llama")), head_dim=128, rope_theta=theta, rope_scaling=scaling)
    torch.testing.assert_close(inverse_frequencies(shape), theirs, rtol=1e-6, atol=0)


def test_a_pack_gets_the_angles_of_each_of_its_sequences():
    rotary = RestartingRotary(16, rotary_percent=1.0, use_cpu_initialization=True)
    lengths = [5, 1, 7]
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams("thd", borders, borders, max_seqlen_q=7, max_seqlen_kv=7)
    found = rotary(rotary.get_rotary_seq_len(None, None, None, None, packed), packed_seq=True)
    places = torch.cat([torch.arange(length) for length in lengths])
    half = places[:, None] * 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(found[:, 0, 0], torch.cat([half, half], dim=-1))
