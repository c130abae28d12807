"""config.json to shape, what is refused and why, and which layouts a model can be cut into."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from megatron_meds.actor.settings import LayoutSettings
from megatron_meds.actor.shape import (
    RopeScaling,
    UnsupportedModel,
    check_layout,
    read_model_config,
    shape_of,
    split_layers,
)
from tests.tiny import KINDS

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 151,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
LLAMA31_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_shape_is_what_transformers_reads(tiny, kind):
    shape, config = read_model_config(tiny(kind)), AutoConfig.from_pretrained(tiny(kind))
    assert shape.family == config.model_type
    assert (shape.layers, shape.hidden) == (config.num_hidden_layers, config.hidden_size)
    assert (shape.heads, shape.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert shape.head_dim == (config.head_dim if kind.startswith(("llama", "qwen3")) else 16)
    assert (shape.intermediate, shape.vocab) == (config.intermediate_size, config.vocab_size)
    assert shape.tied == config.tie_word_embeddings
    assert shape.qkv_bias == kind.startswith("qwen2")
    assert shape.qk_norm == kind.startswith("qwen3")
    assert shape.norm_eps == config.rms_norm_eps
    assert shape.rope_theta == config.rope_parameters["rope_theta"]
    assert shape.rope_scaling is None
    assert shape.max_positions == config.max_position_embeddings


def test_rope_is_read_alike_from_files_of_transformers_4_and_5():
    old = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA31_SCALING}}
    new = {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA31_SCALING}}
    plain = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    shapes = [shape_of(plain | old), shape_of(plain | new)]
    assert shapes[0] == shapes[1]
    assert shapes[0].rope_theta == 500000.0
    assert shapes[0].rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_the_oldest_form_of_linear_scaling_is_read():
    shape = shape_of(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert shape.rope_scaling == RopeScaling("linear", 2.0)


def test_a_scaling_that_was_set_to_null_is_none():
    assert shape_of(LLAMA | {"rope_scaling": None}).rope_scaling is None


def test_llama3_scaling_without_original_positions_takes_the_models():
    scaling = {k: v for k, v in LLAMA31_SCALING.items() if k != "original_max_position_embeddings"}
    shape = shape_of(LLAMA | {"rope_scaling": {"rope_type": "llama3", **scaling}})
    assert shape.rope_scaling is not None
    assert shape.rope_scaling.original_positions == 512


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "mixtral"}, "model_type = 'mixtral'"),
        ({"model_type": "qwen3_moe"}, "model_type = 'qwen3_moe'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type = 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type = 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters differs by layer",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"use_sliding_window": True, "max_window_layers": 4}, "use_sliding_window"),
        (
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4096},
            "sliding_window = 4096",
        ),
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"head_dim": 5}, "head_dim = 5"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_computed_wrongly_is_refused_by_its_key(config, key):
    with pytest.raises(UnsupportedModel) as refusal:
        shape_of(LLAMA | config)
    assert key in str(refusal.value)


def test_a_sliding_window_that_no_layer_uses_is_no_obstacle():
    assert shape_of(QWEN2 | {"use_sliding_window": False, "sliding_window": 4096}).layers == 8
    assert shape_of(QWEN2 | {"use_sliding_window": True, "max_window_layers": 8}).layers == 8


def test_qwen_must_name_its_key_value_heads_and_llama_need_not():
    def without(config):
        return {key: value for key, value in config.items() if key != "num_key_value_heads"}

    assert shape_of(without(LLAMA)).kv_heads == 8
    with pytest.raises(UnsupportedModel, match="num_key_value_heads is missing"):
        shape_of(without(QWEN2))


def test_a_missing_or_broken_config_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="not JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([LLAMA]))
    with pytest.raises(UnsupportedModel, match="no JSON object"):
        read_model_config(tmp_path)


def _faults(layout, **changes):
    shape = replace(shape_of(LLAMA), **changes)
    return "\n".join(check_layout(shape, LayoutSettings(**layout)))


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor": 2, "sequence": True},
        {"tensor": 8},
        {"pipeline": 4},
        {"pipeline": 2, "virtual": 4},
        {"pipeline": 4, "stages": "Et*3|tt|tt|tL"},
        {"pipeline": 2, "virtual": 2, "stages": "Ett|ttt|t|ttL"},
        {"pipeline": 3, "stages": "Et*4|t*4|L"},
    ],
    ids=str,
)
def test_layouts_that_fit_have_no_faults(layout):
    assert _faults(layout) == ""


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"tensor": 3}, ["actor.layout.tensor = 3", "8 attention heads", "choose one of [1, 2, 4, 8]"]),
        ({"tensor": 2, "intermediate": 97}, ["actor.layout.tensor = 2", "97 MLP columns"]),
        ({"tensor": 4, "kv_heads": 3, "heads": 12}, ["actor.layout.tensor = 4", "3 key/value heads"]),
        ({"sequence": True}, ["actor.layout.sequence", "actor.layout.tensor"]),
        ({"virtual": 2}, ["actor.layout.virtual = 2", "actor.layout.pipeline"]),
        ({"pipeline": 3}, ["actor.layout.pipeline = 3", "8 layers", "actor.layout.stages"]),
        ({"pipeline": 2, "virtual": 3}, ["pipeline = 2 x virtual = 3", "8 layers"]),
        ({"pipeline": 2, "stages": "Ettt|tttt|L"}, ["actor.layout.stages", "3 parts", "are 2"]),
        ({"pipeline": 2, "stages": "Ettt|ttttL"}, ["actor.layout.stages", "holds 7 layers, the model has 8"]),
        ({"pipeline": 2, "stages": "ttttE|ttttL"}, ["must begin with its only E"]),
        ({"pipeline": 2, "stages": "|Et*8L"}, ["must begin with its only E"]),
        ({"pipeline": 2, "stages": "EttttL|tttt"}, ["end with its only L"]),
        ({"pipeline": 2, "stages": "Etttt|ttmttL"}, ["['m'] mean nothing here"]),
    ],
    ids=str,
)
def test_layouts_that_do_not_fit_name_the_key_and_the_remedy(layout, words):
    of_model = {"heads", "kv_heads", "intermediate"} & layout.keys()
    fault = _faults(
        {key: value for key, value in layout.items() if key not in of_model},
        **{key: layout[key] for key in of_model},
    )
    assert all(word in fault for word in words), fault


@given(pipeline=st.integers(1, 6), virtual=st.integers(1, 4), each=st.integers(1, 5))
def test_equal_parts_hold_every_layer_once_in_order(pipeline, virtual, each):
    layers = pipeline * virtual * each
    split = split_layers(layers, LayoutSettings(pipeline=pipeline, virtual=virtual))
    in_order = [list(split[stage][chunk]) for chunk in range(virtual) for stage in range(pipeline)]
    assert [layer for part in in_order for layer in part] == list(range(layers))


def test_uneven_parts_are_split_as_megatron_does():
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    for stages in ("Et*3|(tt|)*5tL", "Et|tt,t|t*4|ttttt|L|", "E(t|)*4t*2|tt|ttL", "Ett|ttt|ttt|tttttL"):
        text = stages if stages.endswith("L") else stages.removesuffix("|")
        parts = PipelineParallelLayerLayout.get_num_stages_from_str(text)
        for pipeline in (n for n in range(1, parts + 1) if parts % n == 0):
            theirs = PipelineParallelLayerLayout.from_str(text, pipeline)
            layers = theirs.flatten_layout.count(LayerType.decoder)
            layout = LayoutSettings(pipeline=pipeline, virtual=parts // pipeline, stages=text)
            ours = split_layers(layers, layout)
            counts = [[len(run) for run in stage] for stage in ours]
            assert counts == [[part.count(LayerType.decoder) for part in stage] for stage in theirs.layout]
