"""The client against a real vLLM server."""

import pytest

from megatron_meds.rollout.client import GenerationError, Request
from tests.tiny import VOCABULARY

pytestmark = pytest.mark.timeout(900)  # the first test starts the server


def test_a_request_sent_again_gives_the_same_samples(vllm_server):
    vllm_server.push(vllm_server.model())
    client = vllm_server.client(max_tokens=12)
    requests = [Request([3, 4, 5 + i], 3, seed=10 * i) for i in range(4)]
    first, second = client.sample(requests), client.sample(requests)
    assert [[s.token_ids for s in g] for g in first] == [[s.token_ids for s in g] for g in second]
    assert len({tuple(s.token_ids) for group in first for s in group}) == 12


def test_responses_end_at_the_limit_or_with_their_stop_token(vllm_server):
    vllm_server.push(vllm_server.model())
    stops = list(range(60))
    client = vllm_server.client(max_tokens=10, stop_token_ids=stops)
    ended = set()
    for samples in client.sample([Request([8, 9], 8, seed=i) for i in range(4)]):
        for sample in samples:
            ended.add(sample.finish_reason)
            *body, last = sample.token_ids
            assert not set(body) & set(stops)
            assert (last in stops) == (sample.finish_reason == "stop")
            assert len(sample.logprobs) == len(sample.token_ids) <= 10
            assert sample.missing_logprobs == 0
            assert all(value <= 0 for value in sample.logprobs)
            assert all(0 <= token < VOCABULARY for token in sample.token_ids)
    assert "stop" in ended


def test_progress_counts_every_sample_once(vllm_server):
    vllm_server.push(vllm_server.model())
    counted = []
    vllm_server.client(max_tokens=2).sample([Request([i], 2) for i in range(1, 11)], counted.append)
    assert counted == [2] * 10


def test_a_prompt_that_is_too_long_is_refused_by_name(vllm_server):
    vllm_server.push(vllm_server.model())
    with pytest.raises(GenerationError, match="prompt of 400 tokens"):
        vllm_server.client().sample([Request([7] * 400, 1)])
