"""The order of a sync and what becomes of failures; against a real server in test_sync_vllm.py."""

import threading
import time

import pytest
import torch

from megatron_meds.agreement import RankError
from megatron_meds.weights.control import ControlClient
from megatron_meds.weights.settings import WeightsSettings
from megatron_meds.weights.source import Checked, ManifestError
from megatron_meds.weights.sync import WeightSync, _AbortingControl
from tests.stub_server import StubServer
from tests.weights_in_memory import OneRank, StateDict, ThreadRanks

WEIGHTS = {"a": torch.ones(3, 4), "b": torch.zeros(5), "c": torch.ones(2, dtype=torch.bfloat16)}


def serving(path, body):
    """What a server that is well answers to the calls of a sync."""
    return 200, {"success": True, "weight_version": "1", "world_size": 1}


def failing(path_that_fails, message="no"):
    def answer(path, body):
        return (500, {"error": {"message": message}}) if path == path_that_fails else serving(path, body)

    return answer


def sync_of(*servers, source=None, ranks=None, **settings):
    return WeightSync(
        WeightsSettings(**settings),
        [s.url for s in servers],
        source or StateDict(WEIGHTS),
        ranks or OneRank(),
        transport="shm",
    )


def on_threads(size, body):
    """body(ranks) on each rank; what each returned or raised."""
    results: list = [None] * size

    def run(ranks):
        try:
            results[ranks.rank] = body(ranks)
        except RankError as error:
            results[ranks.rank] = error

    threads = [threading.Thread(target=run, args=(ranks,)) for ranks in ThreadRanks.make(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_servers_hold_requests_back_and_forget_prefixes_with_every_version():
    with StubServer(serving) as server:
        sync = sync_of(server)
        sync.connect()
        report = sync.push(7)
        assert server.paths() == [
            "/init_weight_transfer_engine",
            "/update_weight_version",
            "/pause",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/reset_prefix_cache",
            "/resume",
        ]
        bodies = dict(server.calls)
        assert bodies["/update_weight_version"] == {"new_version": "updating"}
        assert bodies["/finish_weight_update"] == {"weight_version": "7"}
        assert bodies["/init_weight_transfer_engine"]["init_info"]["names"] == ["a", "b", "c"]
        assert (sync.version, report.tensors, report.bytes) == (7, 3, 12 * 4 + 5 * 4 + 2 * 2)
        sync.close()


def test_nothing_is_synced_before_the_rendezvous_and_none_is_held_before_the_first_push():
    with StubServer(serving) as server:
        sync = sync_of(server)
        assert sync.version is None
        with pytest.raises(RuntimeError, match="connect comes before push"):
            sync.push(1)
        sync.connect()
        sync.push(1)
        sync.reconnect()  # as after a restart
        assert sync.version is None
        sync.close()


@pytest.mark.parametrize(
    "path",
    ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"],
)
def test_a_server_that_fails_is_named_on_every_rank_and_every_rank_ends_the_stream(path):
    sources = [StateDict(WEIGHTS, is_sender=rank == 0) for rank in range(3)]
    with StubServer(serving) as well, StubServer(failing(path, "tensor b is odd")) as bad:

        def body(ranks):
            sync = sync_of(well, bad, source=sources[ranks.rank], ranks=ranks)
            sync.connect()
            try:
                return sync.push(1)
            finally:
                assert sync.version is None
                sync.close()

        results = on_threads(3, body)
        assert server_versions(well)[-1] == server_versions(bad)[-1] == "updating"
    for result in results:
        assert isinstance(result, RankError)
        assert bad.url in str(result)
        assert "tensor b is odd" in str(result)
        assert well.url not in str(result)
    assert [source.passes for source in sources] == [1, 1, 1]


def server_versions(server):
    """The versions a server was told, in order."""
    told = {"/update_weight_version": "new_version", "/finish_weight_update": "weight_version"}
    return [body[told[path]] for path, body in server.calls if path in told and body]


def test_a_server_that_does_not_answer_surfaces_within_the_timeout():
    def stuck(path, body):
        if path == "/update_weights":
            time.sleep(5)
        return serving(path, body)

    with StubServer(stuck) as server:
        sync = sync_of(server, timeout_seconds=0.5)
        sync.connect()
        started = time.monotonic()
        with pytest.raises(
            RankError, match=rf"{server.url} did not answer /update_weights within .*timeout_seconds"
        ):
            sync.push(1)
        assert time.monotonic() - started < 4
        sync.close()


def test_a_server_that_is_gone_is_named():
    with StubServer(serving) as server:
        sync = sync_of(server)
        sync.connect()
    with pytest.raises(RankError, match=f"{server.url} is not there"):
        sync.push(1)
    sync.close()


class Contradicting(StateDict):
    """A stream that is not its manifest."""

    def __init__(self, weights, streamed):
        super().__init__(weights)
        self.streamed = streamed

    def tensors(self):
        yield from self.streamed.items()


@pytest.mark.parametrize(
    ("streamed", "message"),
    [
        ({"b": WEIGHTS["b"], "a": WEIGHTS["a"], "c": WEIGHTS["c"]}, r"tensor 0 of the stream is b \(5,\)"),
        ({**WEIGHTS, "b": torch.zeros(6)}, r"tensor 1 of the stream is b \(6,\).*manifest has b \(5,\)"),
        ({**WEIGHTS, "c": torch.ones(2)}, r"tensor 2 of the stream is c \(2,\) torch.float32"),
        ({"a": WEIGHTS["a"], "b": WEIGHTS["b"]}, "c did not come"),
        ({**WEIGHTS, "d": torch.ones(1)}, "tensor d came after the last one"),
        ({**WEIGHTS, "b": None}, "tensor b is not there on the sender"),
    ],
)
def test_a_stream_that_contradicts_its_manifest_is_refused_by_name(streamed, message):
    with pytest.raises(ManifestError, match=message):
        Checked(Contradicting(WEIGHTS, streamed), is_sender=True).feed(lambda name, tensor: None)


def test_workers_of_several_servers_are_numbered_one_after_the_other():
    def sized(size):
        return lambda path, body: (200, {"world_size": size})

    with StubServer(sized(2)) as first, StubServer(sized(3)) as second, StubServer(sized(1)) as third:
        control = ControlClient([first.url, second.url, third.url], timeout=10)
        control.init_weight_transfer_engine({"master_port": 1, "rank_offset": 1, "world_size": 7})
        sent = [dict(s.calls)["/init_weight_transfer_engine"]["init_info"] for s in (first, second, third)]
        control.close()
    assert [info["rank_offset"] for info in sent] == [1, 3, 6]
    assert {info["world_size"] for info in sent} == {7}


def test_a_broadcast_whose_receiver_failed_is_ended():
    ended = []
    with StubServer(failing("/update_weights")) as server:
        control = ControlClient([server.url], timeout=10)
        aborting = _AbortingControl(control, lambda: ended.append(True))
        with pytest.raises(RuntimeError, match=server.url):
            aborting.update_weights({"names": []})
        control.close()
    assert ended == [True]
