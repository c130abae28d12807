"""The client against servers that misbehave on purpose; against a real one in test_client_vllm.py."""

import math

import pytest
from vllm.sampling_params import SamplingParams

from megatron_meds.rollout.client import ENDPOINT, Client, GenerationError, Request, parse_samples
from megatron_meds.rollout.messages import Sampling
from megatron_meds.rollout.settings import RolloutSettings
from tests.stub_server import StubServer


def choice(index=0, ids=(5, 6), logprobs=(-0.5, -1.5), version="3", reason="stop"):
    content = None
    if logprobs is not None:
        content = {"content": [{"token_id": t, "logprob": v} for t, v in zip(ids, logprobs, strict=True)]}
    spans = [{"version": version, "start": 0, "end": len(ids)}]
    return {
        "index": index,
        "token_ids": list(ids),
        "logprobs": content,
        "finish_reason": reason,
        "weight_versions": spans,
    }


def serving(version="3", generate=None):
    """Answers of a server that is well; `generate(body)` answers requests for samples."""

    def answer(path, body):
        if path == "/health":
            return 200, {}
        if path == "/weight_info":
            return 200, {"weight_version": version}
        assert path == ENDPOINT
        if generate is not None:
            return generate(body)
        n = body["sampling_params"]["n"]
        return 200, {"choices": [choice(k, ids=(body["token_ids"][0], k)) for k in range(n)]}

    return answer


def client(*servers, version=3, **settings):
    made = Client([s.url for s in servers], RolloutSettings(**settings), vocabulary=100)
    made.version = version
    return made


def test_missing_and_undefined_log_probs_become_nan_and_are_counted():
    ids = (1, 2, 3, 4)
    (sample,) = parse_samples({"choices": [choice(ids=ids, logprobs=(None, math.nan, -9999.0, -0.25))]})
    assert sample.missing_logprobs == 3
    assert [math.isnan(v) for v in sample.logprobs] == [True, True, True, False]
    (none,) = parse_samples({"choices": [choice(ids=ids, logprobs=None)]})
    assert none.missing_logprobs == 4
    assert none.token_ids == [1, 2, 3, 4]


def test_samples_come_in_the_order_of_their_seeds():
    samples = parse_samples({"choices": [choice(1, ids=(8, 8)), choice(0, ids=(7, 7))]})
    assert [s.token_ids[0] for s in samples] == [7, 8]


def test_the_log_prob_of_another_token_is_refused():
    broken = choice()
    broken["logprobs"]["content"][1]["token_id"] = 77
    with pytest.raises(GenerationError, match="log-prob of token 77 for 6"):
        parse_samples({"choices": [broken]})


def test_weights_changed_under_a_running_request_are_refused():
    broken = choice()
    broken["weight_versions"].append({"version": "4", "start": 1, "end": 2})
    with pytest.raises(GenerationError, match=r"\['3', '4'\]"):
        parse_samples({"choices": [broken]})


def test_every_field_that_shapes_the_distribution_is_sent():
    shaping = {
        "n", "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "max_tokens", "min_tokens",
        "stop", "stop_token_ids", "ignore_eos", "logprobs",
    }  # fmt: skip
    assert shaping <= set(SamplingParams.__struct_fields__)  # the names are vLLM's
    body = Client([], RolloutSettings(temperature=0.6, stop_token_ids=[9]), stop_token_ids=[1, 9]).body(
        Request([3, 4], 2, 11)
    )
    sent = body["sampling_params"]
    assert shaping <= set(sent)
    assert (body["token_ids"], sent["n"], sent["seed"]) == ([3, 4], 2, 11)
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["min_p"]) == (0.6, 1.0, -1, 0.0)
    assert (sent["repetition_penalty"], sent["presence_penalty"], sent["frequency_penalty"]) == (
        1.0,
        0.0,
        0.0,
    )
    assert (sent["stop_token_ids"], sent["ignore_eos"]) == ([1, 9], False)


def test_prompts_that_would_end_a_server_are_refused_by_name():
    with StubServer(serving()) as server:
        with pytest.raises(GenerationError, match=r"ids \[100\] are outside the vocabulary of 100"):
            client(server).generate([Request([1, 100], 1)])
        with pytest.raises(GenerationError, match="the prompt is empty"):
            client(server).generate([Request([], 1)])
        assert ENDPOINT not in server.paths()
    with pytest.raises(ValueError, match="no server"):
        client().generate([Request([1], 1)])


def test_a_refused_request_is_named_and_not_sent_again():
    with StubServer(serving(generate=lambda body: (400, {"error": {"message": "too long"}}))) as server:
        with pytest.raises(GenerationError, match=r"prompt of 2 tokens \[1, 2\] \(seed 5\).*too long"):
            client(server).generate([Request([1, 2], 1, 5)])
        assert server.paths().count(ENDPOINT) == 1


def test_a_failure_of_a_server_that_is_well_is_tried_again_elsewhere():
    with StubServer(serving(generate=lambda body: (500, "no"))) as bad, StubServer(serving()) as good:
        samples = client(bad, good).sample([Request([i], 1) for i in range(1, 7)])
    assert [s[0].token_ids[0] for s in samples] == [1, 2, 3, 4, 5, 6]


def test_tries_are_bounded_and_the_request_is_named():
    with StubServer(serving(generate=lambda body: (500, "no"))) as server:
        with pytest.raises(
            GenerationError, match=r"2 samples of a prompt of 1 tokens \[7\].*rollout.retries = 1"
        ):
            client(server, retries=1).generate([Request([7], 2)])
        assert server.paths().count(ENDPOINT) == 2


def test_requests_of_a_server_that_dies_go_to_the_others_and_none_is_answered_twice():
    dead = False

    def dying(path, body):
        nonlocal dead
        dead = dead or path == ENDPOINT
        return None if dead else serving()(path, body)

    counted = []
    with StubServer(dying) as bad, StubServer(serving()) as good:
        requests = [Request([i], 3) for i in range(1, 21)]
        answers = [None] * len(requests)
        assert client(bad, good, concurrency=4).generate(requests, answers, counted.append) is None
    assert [a[0].token_ids[0] for a in answers] == list(range(1, 21))
    assert counted == [3] * 20


def test_with_no_server_left_what_is_done_is_kept_and_the_rest_follows_after_a_restart():
    served = 0

    def dying(path, body):
        nonlocal served
        served += path == ENDPOINT
        return serving()(path, body) if served <= 5 else None

    requests = [Request([i], 1) for i in range(1, 13)]
    answers = [None] * len(requests)
    counted = []
    with StubServer(dying) as server:
        asked = client(server, concurrency=1)
        failure = asked.generate(requests, answers, counted.append)
        assert server.url in failure
        assert "does not answer" in failure
        assert sum(a is not None for a in answers) == len(counted) == 5
        served = -1000  # started again
        assert asked.generate(requests, answers, counted.append) is None
        repeated = [body["token_ids"][0] for path, body in server.calls if path == ENDPOINT]
    assert [a[0].token_ids[0] for a in answers] == list(range(1, 13))
    assert len(counted) == 12
    assert len(repeated) == 13  # the one that was cut off, and no other, was sent twice


@pytest.mark.parametrize("held", ["default", "updating", "2"])
def test_a_server_with_other_weights_is_not_asked(held):
    with StubServer(serving(version=held)) as server:
        failure = client(server).generate([Request([1], 1)])
        assert f"holds weights '{held}', not '3': push the weights before sampling" in failure
        assert ENDPOINT not in server.paths()


def test_samples_of_other_weights_are_not_taken():
    answer = {"choices": [choice(version="2")]}
    with StubServer(serving(generate=lambda body: (200, answer))) as server:
        assert "sampled with weights 2, not 3" in client(server).generate([Request([1], 1)])


def test_a_request_that_takes_too_long_names_the_setting():
    import time

    def slow(body):
        time.sleep(1.0)
        return 200, {"choices": [choice()]}

    with StubServer(serving(generate=slow)) as server:
        asked = client(server, request_timeout_seconds=0.2, retries=0)
        with pytest.raises(GenerationError, match=r"rollout.request_timeout_seconds = 0.2"):
            asked.generate([Request([1], 1)])


def test_requests_are_spread_over_the_servers():
    with StubServer(serving()) as first, StubServer(serving()) as second:
        client(first, second, concurrency=8).sample([Request([i], 1) for i in range(1, 41)])
        counts = [s.paths().count(ENDPOINT) for s in (first, second)]
    assert sum(counts) == 40
    assert min(counts) >= 10


def test_a_request_may_say_how_it_is_sampled():
    sampling = Sampling(temperature=0.6, top_p=0.95, max_tokens=7, logprobs=False)
    with StubServer(serving()) as server:
        sent = client(server, temperature=0.9, max_tokens=50)
        plain, own = (sent.body(Request([1], 2, 3, s))["sampling_params"] for s in (None, sampling))
    assert (plain["temperature"], plain["top_p"], plain["max_tokens"], plain["logprobs"]) == (0.9, 1.0, 50, 0)
    assert (own["temperature"], own["top_p"], own["max_tokens"], own["logprobs"]) == (0.6, 0.95, 7, None)
    assert {k for k in plain if plain[k] != own[k]} == {"temperature", "top_p", "max_tokens", "logprobs"}


def test_requests_of_a_group_go_to_one_server_and_to_another_when_it_is_gone():
    with StubServer(serving()) as first, StubServer(serving()) as second:
        asked = client(first, second)
        asked.sample([Request([g, i], 1, group=g) for g in (4, 5) for i in range(6)])
        groups = [
            {body["token_ids"][0] for path, body in s.calls if path == ENDPOINT} for s in (first, second)
        ]
        assert groups == [{4}, {5}]
    with StubServer(serving("1")) as old, StubServer(serving()) as current:
        assert len(client(old, current).sample([Request([4], 1, group=0)])) == 1


def test_cache_counters_of_all_servers_are_added_up():
    def counters(asked: int, found: int):
        text = (
            "# HELP vllm:prefix_cache_queries_total x\n"
            f'vllm:prefix_cache_queries_total{{engine="0",model_name="policy"}} {asked}.0\n'
            f'vllm:prefix_cache_hits_total{{engine="0",model_name="policy"}} {found}.0\n'
            f'vllm:prefix_cache_hits_created{{engine="0",model_name="policy"}} 1.7e+09\n'
        )
        return lambda path, body: (200, text)

    with StubServer(counters(100, 40)) as first, StubServer(counters(11, 2)) as second:
        assert client(first, second).prefix_cache() == (111.0, 42.0)
    with StubServer(lambda path, body: (404, {})) as server, pytest.raises(GenerationError, match="metrics"):
        client(server).prefix_cache()
