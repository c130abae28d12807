"""GSM8K and MATH problems become the prompts that transformers itself makes of them, token by token."""

import os
from pathlib import Path

import pytest

from megatron_meds.data.datasets import load_rows
from megatron_meds.data.known import Places
from megatron_meds.data.prompts import load_training_prompts
from megatron_meds.data.settings import DatasetSettings, TemplateSettings
from megatron_meds.data.templates import Template, load_tokenizer

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
TOKENIZERS = {
    "qwen3": DATA / "tokenizer" / "qwen3",
    "smollm2": Path(os.environ.get("SMOLLM2") or ROOT / "build" / "smollm2"),
}
SETS = {"gsm8k-train": 40, "math-3-5": 40}

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the public data sets are not on this machine")


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    folder = TOKENIZERS[request.param]
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"the tokenizer of {request.param} is not on this machine ({folder})")
    return load_tokenizer(folder)


def options_of(tokenizer):
    thinks = "enable_thinking" in tokenizer.chat_template
    return [{}, {"enable_thinking": False}, {"enable_thinking": True}] if thinks else [{}]


@pytest.mark.parametrize("name", SETS)
def test_prompts_are_those_of_transformers_and_begin_once(tokenizer, name):
    settings = DatasetSettings(name=name, limit=SETS[name])
    places = Places(DATA / "train")
    rows = load_rows(settings, places=places)
    for options in options_of(tokenizer):
        template = Template(TemplateSettings(options=options), tokenizer)
        prompts, counts = load_training_prompts([settings], template, 4096, places)
        assert len(prompts) == SETS[name]
        assert counts.too_long == 0
        for row, prompt in zip(rows, prompts, strict=True):
            wanted = tokenizer.apply_chat_template(
                [{"role": "user", "content": row.question}],
                add_generation_prompt=True,
                return_dict=False,
                **options,
            )
            assert list(prompt.token_ids) == wanted
            assert prompt.answer == row.answer
            assert tokenizer.decode(wanted) == template.text(row.question)
            assert len({wanted[0], wanted[1]}) == 2  # one beginning of text, if any


def test_thinking_can_be_turned_off(tokenizer):
    options = options_of(tokenizer)
    if len(options) == 1:
        pytest.skip("this chat template has no enable_thinking")
    on, off = (
        Template(TemplateSettings(options={"enable_thinking": flag}), tokenizer).text("1+1?")
        for flag in (True, False)
    )
    assert off == f"{on}<think>\n\n</think>\n\n"
