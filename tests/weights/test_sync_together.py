"""A sync in which every rank writes its own part into the buffer; received as a server does."""

import threading

import pytest
import torch

from megatron_meds.agreement import RankError
from megatron_meds.weights.settings import WeightsSettings
from megatron_meds.weights.shm.memory import SharedMemory
from megatron_meds.weights.source import Run
from megatron_meds.weights.sync import WeightSync
from tests.stub_server import StubServer
from tests.weights_in_memory import StateDict, ThreadRanks
from tools.benchmarks.receiver import Receiver

RANKS = 3


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (9, 5), "b": (300, 7), "c": (4,), "d": (6, 64), "e": (3, 2)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Parts(StateDict):
    """Each rank holds every third row; `c` is held by the last rank alone, `d` is cut into columns."""

    takes_part = True

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__(weights(seed), is_sender=rank == 0)
        self.rank = rank
        self.left_out = ""

    def runs(self):
        for name, tensor in self.weights.items():
            if name == self.left_out or (name == "c" and self.rank != RANKS - 1):
                continue
            if name == "c":
                yield Run(name, 0, 0, tensor)
                continue
            dim = int(name == "d")
            for start in range(self.rank, tensor.shape[dim], RANKS):
                yield Run(name, dim, start, tensor.narrow(dim, start, 1))


class ReceivingServer(StubServer):
    """Maps the buffer and copies buckets out, as vLLM's worker does."""

    def __init__(self, tmp_path, fails_at: str = "") -> None:
        from safetensors.torch import save_file

        save_file({}, tmp_path / "model.safetensors")
        self.receiver = Receiver(tmp_path)

        def answer(path, body):
            if path == fails_at:
                return 500, {"error": {"message": "no room"}}
            if path in ("/init_weight_transfer_engine", "/update_weights"):
                getattr(self.receiver, path[1:])(**body)
            return 200, {"success": True, "weight_version": "1", "world_size": 1}

        super().__init__(answer)


def on_ranks(body):
    """body(ranks) on three threads; what each returned or raised."""
    results: list = [None] * RANKS

    def run(ranks):
        try:
            results[ranks.rank] = body(ranks)
        except RankError as error:
            results[ranks.rank] = error

    threads = [threading.Thread(target=run, args=(ranks,)) for ranks in ThreadRanks.make(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def open_sync(server, ranks, source, bucket_bytes):
    settings = WeightsSettings(bucket_mib=bucket_bytes / 2**20, timeout_seconds=20)
    sync = WeightSync(settings, [server.url], source, ranks, transport="shm")
    sync.connect()
    return sync


@pytest.mark.parametrize("bucket_bytes", [2**20, 600, 64], ids=["one bucket", "some", "a bucket each"])
def test_the_parts_of_all_ranks_make_the_tensors_at_each_sync(tmp_path, bucket_bytes):
    received = []
    with ReceivingServer(tmp_path) as server:

        def body(ranks):
            source = Parts(ranks.rank, seed=1)
            sync = open_sync(server, ranks, source, bucket_bytes)
            together = sync._sender.written_together  # type: ignore[attr-defined]
            for version in (1, 2, 3):
                source.weights = weights(seed=version)
                sync.push(version)
                if ranks.rank == 0:
                    received.append({k: t.clone() for k, t in server.receiver.weights.items()})
            sync.close()
            return together

        assert on_ranks(body) == [True] * RANKS
    assert len(received) == 3
    for version, found in enumerate(received, start=1):
        assert found.keys() == weights(version).keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights(version).items())
    assert server.receiver.bytes == 3 * sum(t.nbytes for t in weights(1).values())


def test_where_a_rank_cannot_reach_the_buffer_the_sender_gathers(tmp_path, monkeypatch):
    attach, callers = SharedMemory.attach, []

    def reach(path, size):
        callers.append(path)
        if len(callers) == 2:
            raise FileNotFoundError(path)  # as on another machine
        return attach(path, size)

    with ReceivingServer(tmp_path) as server:
        server.receiver.reads = False
        monkeypatch.setattr(SharedMemory, "attach", reach)

        def body(ranks):
            sync = open_sync(server, ranks, Parts(ranks.rank, seed=4), 600)
            sync.push(1)
            return sync._sender.written_together  # type: ignore[attr-defined]

        assert on_ranks(body) == [False] * RANKS
    assert server.paths()[-1] == "/resume"


def test_a_part_that_no_rank_writes_is_named_before_the_weights_are_used(tmp_path):
    with ReceivingServer(tmp_path) as server:

        def body(ranks):
            source = Parts(ranks.rank, seed=1)
            source.left_out = "b" if ranks.rank == 1 else ""
            return open_sync(server, ranks, source, 600).push(1)

        results = on_ranks(body)
        before_abandoned = server.paths()
    assert [type(result) for result in results] == [RankError] * RANKS, results
    assert all("tensor b: the ranks wrote 5600 bytes of it, it has 8400" in str(result) for result in results)
    assert before_abandoned.count("/resume") == 0


def test_a_rank_that_fails_to_write_stops_all_and_is_named(tmp_path):
    class Broken(Parts):
        def runs(self):
            for run in super().runs():
                if self.rank == 2 and run.name == "d":
                    run = Run("d", 1, 0, torch.zeros(99, 1))  # does not fit
                yield run

    with ReceivingServer(tmp_path) as server:
        results = on_ranks(lambda ranks: open_sync(server, ranks, Broken(ranks.rank, 1), 600).push(1))
        paths = server.paths()
    assert all(isinstance(result, RankError) and "rank 2" in str(result) for result in results)
    assert "/resume" not in paths


@pytest.mark.parametrize(
    "path", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
)
def test_a_server_that_fails_is_named_on_every_rank(tmp_path, path):
    with ReceivingServer(tmp_path, fails_at=path) as server:
        results = on_ranks(lambda ranks: open_sync(server, ranks, Parts(ranks.rank, 1), 64).push(1))
    for result in results:
        assert isinstance(result, RankError)
        assert server.url in str(result)
        assert "no room" in str(result)
