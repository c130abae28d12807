"""What step rewards ask of a real server: own sampling per request, cached prefixes, the current weights."""

from megatron_meds.rollout.messages import Request, Sampling


def test_continuations_find_their_prefixes_in_the_cache_and_come_from_the_current_weights(vllm_server):
    vllm_server.push(vllm_server.model())
    client = vllm_server.client(temperature=1.0, max_tokens=64)
    sampling = Sampling(temperature=0.6, top_p=0.95, max_tokens=3, logprobs=False)
    whole = [5 + i % 90 for i in range(200)]
    requests = [Request(whole[:n], 4, seed=n, sampling=sampling, group=0) for n in (64, 128, 200)]
    asked, found = client.prefix_cache()
    samples = [s for answer in client.sample(requests) for s in answer]
    asked, found = (
        after - before for after, before in zip(client.prefix_cache(), (asked, found), strict=True)
    )
    assert len(samples) == 12 and all(len(s.token_ids) <= 3 for s in samples)
    assert all(s.missing_logprobs == len(s.token_ids) for s in samples)
    assert {s.weight_version for s in samples} == {vllm_server.last_version}
    assert asked == 4 * (64 + 128 + 200)
    assert asked - found < 0.35 * asked  # 200 tokens once, and a block of 32 for each sample
    vllm_server.push(vllm_server.model())  # another version: nothing cached is used again
    before = vllm_server.client().prefix_cache()
    client = vllm_server.client()
    client.sample([Request(whole, 1, seed=1, sampling=sampling)])
    after = client.prefix_cache()
    assert (after[0] - before[0], after[1] - before[1]) == (200, 0)
