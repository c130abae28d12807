"""Prompts carry exactly the special tokens of their template, and are tokenised once."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from megatron_meds.data.settings import TemplateSettings
from megatron_meds.data.templates import QWEN_MATH_SYSTEM, Template, end_token_ids, load_tokenizer
from tools.tiny_reasoner.tokenizer import write_model_folder

QWEN3 = Path(__file__).parents[3] / "shared" / "data" / "tokenizer" / "qwen3"

needs_qwen3 = pytest.mark.skipif(not QWEN3.is_dir(), reason="the Qwen3 tokenizer is not on this machine")


@pytest.fixture(scope="module")
def qwen3():
    return load_tokenizer(QWEN3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_reasoner")
    write_model_folder(folder)
    return load_tokenizer(folder)


def with_begin(chat_template=None):
    """A tokenizer that, as Llama's, puts <s> before plain text."""
    tokenizer = Tokenizer(
        WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2, "how": 3, "many": 4}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=chat_template,
    )


def ids(template, question, system=None):
    return template.token_ids([template.text(question, system)])[0]


def test_raw_text_begins_once_whether_or_not_it_says_so():
    assert ids(Template(TemplateSettings(name="raw"), with_begin()), "how many") == (0, 3, 4)
    prefixed = Template(TemplateSettings(name="raw", prefix="<s> "), with_begin())
    assert ids(prefixed, "how many") == (0, 3, 4)


def test_raw_text_of_a_tokenizer_without_a_beginning_has_none(tiny):
    template = Template(TemplateSettings(name="raw", prefix="<|user|>", suffix="<|assistant|>"), tiny)
    assert ids(template, "7+3") == tuple(tiny("<|user|>7+3<|assistant|>").input_ids)


def test_a_chat_template_that_writes_the_beginning_gets_no_second_one():
    chat = "<s> {% for m in messages %}{{ m.content }}{% endfor %}"
    assert ids(Template(TemplateSettings(), with_begin(chat)), "how many") == (0, 3, 4)


def test_the_tiny_reasoners_chat_template_asks_for_an_answer(tiny):
    template = Template(TemplateSettings(), tiny)
    assert template.text("7+3") == "<|user|>7+3<|assistant|>"
    assert ids(template, "7+3") == tuple(tiny.apply_chat_template(
        [{"role": "user", "content": "7+3"}], add_generation_prompt=True, return_dict=False
    ))  # fmt: skip


@needs_qwen3
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("system", [None, "be brief"])
def test_chat_prompts_are_those_of_transformers(qwen3, options, system):
    messages = [{"role": "system", "content": system}] * (system is not None)
    messages.append({"role": "user", "content": "how many?"})
    expected = qwen3.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    template = Template(TemplateSettings(options=options, system=system), qwen3)
    assert ids(template, "how many?") == tuple(expected)


@needs_qwen3
def test_options_change_the_prompt(qwen3):
    plain = Template(TemplateSettings(), qwen3).text("q")
    assert Template(TemplateSettings(options={"enable_thinking": False}), qwen3).text("q") != plain


@needs_qwen3
def test_qwen_math_is_the_papers_prompt(qwen3):
    template = Template(TemplateSettings(name="qwen-math"), qwen3)
    assert template.text("1+1?") == (
        "<|im_start|>system\n"
        "Please reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids(template, "1+1?").count(qwen3.convert_tokens_to_ids("<|im_start|>")) == 3
    assert QWEN_MATH_SYSTEM in template.text("1+1?")
    assert "<|im_start|>system\nbe brief<|im_end|>" in template.text("1+1?", system="be brief")


def test_a_rows_system_message_wins_over_the_settings():
    chat = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    template = Template(TemplateSettings(system="setting"), with_begin(chat))
    assert template.text("q", system="row") == "system:row;user:q;"
    assert template.text("q") == "system:setting;user:q;"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"enable_thinkng": False}}, "options.enable_thinkng"),
        ({"name": "raw", "options": {"enable_thinking": False}}, "data.template.options"),
        ({"name": "raw", "system": "be brief"}, "data.template.prefix"),
        ({"name": "chat", "suffix": "?"}, "belong to `raw`"),
        ({"name": "qwen-math"}, r"no token <\|im_start\|>"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(tiny, settings, message):
    with pytest.raises(ValueError, match=message):
        Template(TemplateSettings(**settings), tiny)


def test_a_tokenizer_without_chat_template_is_refused():
    with pytest.raises(ValueError, match="no chat template"):
        Template(TemplateSettings(), with_begin())


def test_a_rows_system_message_is_not_lost_in_raw(tiny):
    with pytest.raises(ValueError, match=r"fields\.system"):
        Template(TemplateSettings(name="raw"), tiny).text("q", system="be brief")


def test_responses_end(tiny):
    template = Template(TemplateSettings(), tiny)
    (response,) = template.response_ids(["\\boxed{7}"])
    assert response == [*tiny("\\boxed{7}").input_ids, tiny.eos_token_id]


def test_end_ids_are_those_of_tokenizer_and_generation_config(tiny, tmp_path):
    assert end_token_ids(tiny, tmp_path) == [tiny.eos_token_id]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, tiny.eos_token_id]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 8}))
    assert end_token_ids(tiny, tmp_path) == [tiny.eos_token_id, 9, 8]
