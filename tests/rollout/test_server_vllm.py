"""Real vLLM servers that die, and trainers that die before their servers."""

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from megatron_meds.agreement import RankError
from megatron_meds.rollout.client import Client, Request
from megatron_meds.rollout.settings import RolloutSettings
from megatron_meds.weights.check import differing, read_digests
from megatron_meds.weights.control import ControlClient
from megatron_meds.weights.settings import WeightsSettings
from megatron_meds.weights.sync import WeightSync
from tests.fixtures_vllm import log_probs, perturbed, source_of
from tests.tiny import VOCABULARY
from tests.weights_in_memory import OneRank

pytestmark = pytest.mark.timeout(900)  # servers start

TRAINER = """
import sys, time
from pathlib import Path
from tests.fixtures_vllm import start_servers
servers = start_servers(Path(sys.argv[1]), Path(sys.argv[2]))
print(servers.urls[0], flush=True)
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def other_trainer(vllm_server, tmp_path_factory) -> Iterator[tuple[psutil.Process, str]]:
    """Another process with a server of the same model: (process, URL)."""
    run_dir = tmp_path_factory.mktemp("other")
    command = [sys.executable, "-c", TRAINER, str(vllm_server.folder), str(run_dir)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, "the trainer's server did not start"
        yield psutil.Process(process.pid), url
        process.kill()


def test_two_servers_get_the_weights_and_share_the_prompts(vllm_server, other_trainer):
    urls = [vllm_server.urls[0], other_trainer[1]]
    model = perturbed(vllm_server.model(), 11)
    sync = WeightSync(WeightsSettings(), urls, source_of(model), OneRank(), transport="shm")
    sync.connect()
    vllm_server.last_version += 1
    sync.push(vllm_server.last_version)
    sync.close()
    client = Client(urls, RolloutSettings(max_tokens=8, concurrency=4), vocabulary=VOCABULARY)
    client.version = vllm_server.last_version
    counts = [_served(url) for url in urls]
    requests = [Request([3, 4 + i], 2, seed=i) for i in range(24)]
    answers = client.sample(requests)
    shares = [_served(url) - before for url, before in zip(urls, counts, strict=True)]
    assert sum(shares) == 48
    assert min(shares) > 0
    for request, samples in zip(requests, answers, strict=True):
        for sample in samples:
            reference = log_probs(model, request.prompt_ids, sample.token_ids)
            for token, value, row in zip(sample.token_ids, sample.logprobs, reference, strict=True):
                assert abs(float(row[token]) - value) < 1e-3


def _served(url: str) -> int:
    """Sequences a server has finished, by its own count."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return int(sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("vllm:request_success_total")))


def test_a_server_killed_in_the_middle_comes_back_and_nothing_is_lost_or_counted_twice(
    vllm_server, other_trainer
):
    model = perturbed(vllm_server.model(), 12)
    vllm_server.push(model)
    both = [vllm_server.urls[0], other_trainer[1]]
    sync = WeightSync(
        WeightsSettings(), both, source_of(perturbed(copy.deepcopy(model), 13)), OneRank(), transport="shm"
    )
    sync.connect()
    # Long responses, few at once: the server is killed after the first ones.
    client = vllm_server.client(max_tokens=200, concurrency=4)
    requests = [Request([5, 6 + i], 2, seed=100 * i) for i in range(16)]
    answers: list = [None] * len(requests)
    counted: list[int] = []
    enough = threading.Event()

    def on_done(samples: int) -> None:
        counted.append(samples)
        if len(counted) >= 4:
            enough.set()

    killer = threading.Thread(target=lambda: (enough.wait(600), _kill_server(vllm_server.urls[0])))
    killer.start()
    failure = client.generate(requests, answers, on_done)
    killer.join()
    done = [answer is not None for answer in answers]
    assert failure is not None
    assert vllm_server.urls[0] in failure
    assert 4 <= sum(done) < len(requests)
    kept = [answer for answer in answers if answer is not None]
    with pytest.raises(RankError, match=f"{both[0]} is not there"):
        sync.push(1)

    assert vllm_server.servers.check() == [0]
    vllm_server.servers.restart(0)
    unsynced = client.generate(requests, answers, on_done)
    assert unsynced is not None
    assert "holds weights 'default'" in unsynced
    vllm_server.push(model)
    client.version = vllm_server.last_version
    assert client.generate(requests, answers, on_done) is None

    # One trainer, two servers, one of them fresh: both get the weights, and hold the same.
    sync.reconnect()
    sync.push(2)
    sync.close()
    control = ControlClient(both, timeout=60)
    old, again = read_digests(control)
    assert control.versions() == ["2", "2"]
    control.close()
    assert differing(again, old) == []

    assert counted == [2] * len(requests)
    assert [a for a, was in zip(answers, done, strict=True) if was] == kept
    for request, samples in zip(requests, answers, strict=True):
        assert len(samples) == 2
        reference = log_probs(model, request.prompt_ids, samples[0].token_ids)
        assert abs(float(reference[0, samples[0].token_ids[0]]) - samples[0].logprobs[0]) < 1e-3


def _kill_server(url: str) -> None:
    """kill -9 to the API process of this process's server."""
    port = url.rsplit(":", 1)[1]
    for process in psutil.Process().children(recursive=True):
        command = process.cmdline()
        if port in command and not any("supervisor" in part for part in command):
            os.kill(process.pid, signal.SIGKILL)


def test_nothing_is_left_of_a_server_when_its_trainer_is_killed(other_trainer):
    process, _ = other_trainer
    family = process.children(recursive=True)
    assert len(family) >= 3  # supervisor, API process, engine
    process.kill()
    until = time.monotonic() + 60
    while any(_runs(p) for p in family) and time.monotonic() < until:
        time.sleep(0.2)
    assert [p for p in family if _runs(p)] == []


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
