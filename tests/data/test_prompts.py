"""Prompts and examples: nothing twice, nothing too long, and everything left out is counted."""

import json
import math

import pytest

from megatron_meds.data.datasets import DataError
from megatron_meds.data.prompts import load_evaluation_prompts, load_examples, load_training_prompts
from megatron_meds.data.settings import DatasetSettings, FieldMap, TemplateSettings
from megatron_meds.data.templates import Template, load_tokenizer
from megatron_meds.trajectory import prompt_id
from tools.tiny_reasoner.tokenizer import write_model_folder


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_reasoner")
    write_model_folder(folder)
    return Template(TemplateSettings(), load_tokenizer(folder))


def write(path, rows, **fields):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetSettings(path=str(path), fields=FieldMap(**fields))


def test_training_sets_are_joined_without_repeats_and_long_prompts_are_left_out(tmp_path, template):
    first = write(
        tmp_path / "a.jsonl",
        [{"question": "1+1", "answer": "2", "level": 1}, {"question": "9" * 50, "answer": "1"}],
    )
    second = write(
        tmp_path / "b.jsonl", [{"question": " 1+1", "answer": "3"}, {"question": "2+2", "answer": 4}]
    )
    prompts, counts = load_training_prompts([first, second], template, max_prompt_tokens=20)
    assert [(p.question, p.answer, p.source) for p in prompts] == [("1+1", "2", "a"), ("2+2", "4", "b")]
    assert prompts[0].id == prompt_id("1+1")
    assert prompts[0].extra == {"level": 1}
    assert prompts[0].token_ids == template.token_ids(["<|user|>1+1<|assistant|>"])[0]
    assert (counts.rows, counts.duplicates, counts.conflicting, counts.too_long) == (4, 1, 1, 1)


def test_a_prompt_of_exactly_the_limit_is_kept(tmp_path, template):
    one = write(tmp_path / "a.jsonl", [{"question": "1+1", "answer": "2"}])
    assert len(load_training_prompts([one], template, max_prompt_tokens=5)[0]) == 1
    with pytest.raises(DataError, match=r"raise data\.max_prompt_tokens"):
        load_training_prompts([one], template, max_prompt_tokens=4)


def test_evaluation_sets_keep_every_row_under_their_label(tmp_path, template):
    rows = [{"question": "1+1", "answer": "2"}] * 2
    one = write(tmp_path / "a.jsonl", rows)
    named = one.model_copy(update={"name": "sums"})
    found = load_evaluation_prompts([one, named], template, max_prompt_tokens=20)
    assert {label: len(prompts) for label, prompts in found.items()} == {"a": 2, "sums": 2}
    with pytest.raises(DataError, match="two sets are called 'a'"):
        load_evaluation_prompts([one, one], template, max_prompt_tokens=20)
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: the prompt has 5 tokens"):
        load_evaluation_prompts([one], template, max_prompt_tokens=4)


def test_examples_are_trajectories_that_end_and_that_nobody_sampled(tmp_path, template):
    rows = [
        {"question": "1+1", "response": "\\boxed{2}"},
        {"question": "1+1", "response": "\\boxed{3}"},
        {"question": "2+2", "response": "\\boxed{" + "4" * 30 + "}"},
    ]
    one = write(tmp_path / "a.jsonl", rows, answer=None, response="response")
    examples, counts = load_examples([one], template, max_prompt_tokens=20, max_response_tokens=10)
    assert [(e.prompt.question, e.sample, e.text) for e in examples] == [
        ("1+1", 0, "\\boxed{2}"),
        ("1+1", 1, "\\boxed{3}"),
    ]
    assert counts.too_long == 1
    for example in examples:
        assert template.tokenizer.decode(example.response_ids) == example.text + "<|end|>"
        assert len(example.rollout_logprobs) == len(example)
        assert all(math.isnan(value) for value in example.rollout_logprobs)
        assert not example.truncated


def test_examples_need_a_response_column(tmp_path, template):
    one = write(tmp_path / "a.jsonl", [{"question": "1+1", "answer": "2"}])
    with pytest.raises(DataError, match=r"fields\.response"):
        load_examples([one], template, max_prompt_tokens=20, max_response_tokens=10)
