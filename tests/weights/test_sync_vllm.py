"""Weights pushed to a real vLLM server, against transformers with the same weights."""

import time

import pytest
import torch

from megatron_meds.agreement import RankError
from megatron_meds.rollout.client import Request
from megatron_meds.weights import check
from megatron_meds.weights.control import ControlClient
from megatron_meds.weights.settings import WeightsSettings
from megatron_meds.weights.sync import WeightSync
from tests.fixtures_vllm import log_probs, perturbed, source_of
from tests.tiny import VOCABULARY
from tests.weights_in_memory import OneRank, StateDict

pytestmark = pytest.mark.timeout(900)  # the first test starts the server

PROMPT = [5, 9, 12, 40, 7]
LONG_PROMPT = [(7 * i) % 150 + 1 for i in range(100)]  # three blocks of the server's KV cache and a bit


def assert_serves(server, model, prompt=PROMPT, tokens=12):
    """The server's likeliest tokens and their log-probs are those of the model."""
    sample = server.greedy(prompt, tokens)
    reference = log_probs(model, prompt, sample.token_ids)
    chosen = reference.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    assert (reference.max(dim=1).values - chosen).max() < 1e-3
    assert (chosen - torch.tensor(sample.logprobs)).abs().max() < 1e-3


def test_identical_weights_leave_greedy_output_identical(vllm_server):
    vllm_server.push(vllm_server.model())
    before = vllm_server.greedy(PROMPT, 24)
    vllm_server.push(vllm_server.model())
    after = vllm_server.greedy(PROMPT, 24)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    assert after.weight_version == before.weight_version + 1
    assert_serves(vllm_server, vllm_server.model())


@pytest.mark.parametrize("bucket_mib", [256, 0.02])
def test_the_server_says_what_transformers_says_with_the_pushed_weights_twice(vllm_server, bucket_mib):
    for seed in (1, 2):
        model = perturbed(vllm_server.model(), seed)
        vllm_server.push(model, bucket_mib)  # the small ones: a layer's q, k and v come in different buckets
        assert_serves(vllm_server, model)


def test_a_prefix_cached_with_old_weights_is_not_used_with_new_ones(vllm_server):
    vllm_server.push(vllm_server.model())
    assert_serves(vllm_server, vllm_server.model(), LONG_PROMPT)
    assert_serves(vllm_server, vllm_server.model(), LONG_PROMPT)  # from the cache
    other = perturbed(vllm_server.model(), 3)
    vllm_server.push(other)
    assert_serves(vllm_server, other, LONG_PROMPT)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_tempered_distribution(vllm_server, temperature):
    model = perturbed(vllm_server.model(), 4)
    vllm_server.push(model)
    client = vllm_server.client(temperature=temperature, max_tokens=16)
    ((*samples,),) = client.sample([Request(PROMPT, 4, seed=1)])
    for sample in samples:
        reference = log_probs(model, PROMPT, sample.token_ids, temperature)
        expected = reference.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        assert (expected - torch.tensor(sample.logprobs)).abs().max() < 1e-3
        assert sample.weight_version == vllm_server.last_version


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (
            lambda w: w | {"model.layers.2.mlp.up_proj.weight": torch.zeros(5, 64)},
            "model.layers.2.mlp.up_proj.weight",
        ),
        (
            lambda w: w | {"model.layers.1.mlp.sideways.weight": torch.zeros(5)},
            "model.layers.1.mlp.sideways.weight",
        ),
        (lambda w: {k: v for k, v in w.items() if k != "model.norm.weight"}, "model.norm.weight"),
    ],
    ids=["wrong shape", "unknown", "missing"],
)
def test_a_tensor_the_server_cannot_take_is_named_in_time_and_the_next_push_mends_it(
    vllm_server, change, name
):
    model = perturbed(vllm_server.model(), 5)
    client = vllm_server.client(max_tokens=4)
    settings = WeightsSettings(timeout_seconds=60)
    sync = WeightSync(
        settings, vllm_server.urls, StateDict(change(source_of(model).weights)), OneRank(), transport="shm"
    )
    sync.connect()
    started = time.monotonic()
    with pytest.raises(RankError, match=rf"server {vllm_server.urls[0]} .*{name}"):
        sync.push(1)
    assert time.monotonic() - started < 60
    sync.close()
    refused = client.generate([Request(PROMPT, 1)])
    assert refused is not None
    assert "holds weights 'updating'" in refused
    vllm_server.push(model)
    assert_serves(vllm_server, model)


def digests(server) -> check.Digests:
    control = ControlClient(server.urls, timeout=60)
    (found,) = check.read_digests(control)
    control.close()
    return found


@pytest.mark.parametrize(
    ("name", "named"),
    [
        (
            "model.layers.2.mlp.up_proj.weight",
            ["model.layers.2.mlp.gate_up_proj.weight (gate_proj, up_proj) differs"],
        ),
        ("model.layers.0.self_attn.o_proj.weight", ["model.layers.0.self_attn.o_proj.weight differs"]),
        ("model.layers.3.self_attn.k_norm.weight", ["model.layers.3.self_attn.k_norm.weight differs"]),
        (
            "model.embed_tokens.weight",  # tied: the output layer holds it packed
            [
                "model.embed_tokens.weight differs",
                "model.embed_tokens.weight as packed differs",
                "lm_head.weight as packed differs",
            ],
        ),
    ],
)
def test_one_wrong_number_in_a_server_s_weights_is_found_and_its_tensor_named(vllm_server, name, named):
    model = perturbed(vllm_server.model(), 6)
    vllm_server.push(model)
    right = digests(vllm_server)
    vllm_server.push(model)
    assert check.differing(digests(vllm_server), right) == []
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] += 1e-3
    vllm_server.push(model)
    assert check.differing(digests(vllm_server), right) == named


def test_greedy_outputs_of_other_weights_are_not_taken_for_the_model_s(vllm_server, tmp_path):
    right, wrong = perturbed(vllm_server.model(), 7), perturbed(vllm_server.model(), 8)
    right.save_pretrained(tmp_path)
    vllm_server.push(right)
    good = vllm_server.greedy(PROMPT, 16)
    vllm_server.push(wrong)
    bad = vllm_server.greedy(PROMPT, 16)
    said = [[(one.token_ids, one.logprobs)] for one in (good, bad)]
    equal, different = check.agreement(tmp_path, [PROMPT], said, tolerance=1e-3)
    assert (equal.tokens, equal.wrong) == (16, 0)
    assert equal.logprob < 1e-3
    assert different.wrong > 0
    generated = right.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert good.token_ids == generated[0, len(PROMPT) :].tolist()


def test_versions_count_up_and_are_what_the_server_reports(vllm_server):
    sync = vllm_server.push(vllm_server.model())
    client = vllm_server.client(max_tokens=3)
    ((sample,),) = client.sample([Request(PROMPT, 1)])
    assert sync.version == vllm_server.last_version == sample.weight_version
    assert all(0 <= token < VOCABULARY for token in sample.token_ids)
