"""The tiny reasoner's folder is one that transformers loads, and its tokens are characters."""

import string

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tools.tiny_reasoner.tokenizer import write_model_folder

RESPONSE = "<think>\n3*4=12\nWait, let me check.\n</think>\n\\boxed{-17}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_reasoner")
    write_model_folder(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_a_response_survives_the_way_to_ids_and_back(tokenizer):
    ids = tokenizer(RESPONSE + "<|end|>").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == RESPONSE
    assert ids[-1] == tokenizer.eos_token_id


def test_every_character_is_a_token_and_so_are_the_think_tags(tokenizer):
    characters = "\n " + string.ascii_letters + string.digits + string.punctuation
    assert [tokenizer.decode([i]) for i in tokenizer(characters).input_ids] == list(characters)
    assert len(tokenizer(RESPONSE).input_ids) == len(RESPONSE) - len("<think>") - len("</think>") + 2


def test_no_special_token_is_added_to_a_text(tokenizer):
    assert (
        tokenizer("7+3", add_special_tokens=True).input_ids
        == tokenizer("7+3", add_special_tokens=False).input_ids
    )


def test_the_chat_template_asks_the_question(tokenizer):
    messages = [{"role": "user", "content": "7+3*4-2"}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert asked == "<|user|>7+3*4-2<|assistant|>"
    with pytest.raises(Exception, match="user and assistant messages only"):
        tokenizer.apply_chat_template([{"role": "system", "content": "no"}], tokenize=False)


def test_the_model_has_2_7_million_parameters_and_a_row_per_token(folder, tokenizer):
    config = AutoConfig.from_pretrained(folder)
    assert config.vocab_size == len(tokenizer)
    model = AutoModelForCausalLM.from_config(config)
    assert 2.6e6 < sum(parameter.numel() for parameter in model.parameters()) < 2.8e6
