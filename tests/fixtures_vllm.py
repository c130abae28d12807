"""The fixture `vllm_server`: one real vLLM server on CPU for the whole session."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_meds.rollout.client import Client, Sample
from megatron_meds.rollout.server import Servers
from megatron_meds.rollout.settings import RolloutSettings, ServerSettings
from megatron_meds.weights.settings import WeightsSettings
from megatron_meds.weights.sync import WeightSync
from tests.tiny import VOCABULARY
from tests.weights_in_memory import OneRank, StateDict

MAX_MODEL_LEN = 384


@dataclass
class VllmServer:
    """A server of a tiny Qwen3 in fp32, and the model's folder.

    Tests may push any weights of that shape and must not count on those an earlier test left.
    """

    servers: Servers
    folder: Path
    run_dir: Path
    last_version: int = 0

    @property
    def urls(self) -> list[str]:
        return self.servers.urls

    def model(self) -> PreTrainedModel:
        """The model the server was started from, by transformers (fp32, a copy of one's own)."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def client(self, **settings) -> Client:
        """A client of this server at the weights of the last `push`."""
        client = Client(self.urls, RolloutSettings(**settings), vocabulary=VOCABULARY, stop_token_ids=[1])
        client.version = self.last_version or None
        return client

    def greedy(self, prompt_ids: list[int], tokens: int) -> Sample:
        """The likeliest continuation."""
        return self.client().greedy(prompt_ids, tokens)[0]

    def push(self, model: PreTrainedModel, bucket_mib: float = 256) -> WeightSync:
        """Give the server this model's weights, under a version of their own."""
        settings = WeightsSettings(bucket_mib=bucket_mib)
        sync = WeightSync(settings, self.urls, source_of(model), OneRank(), transport="shm")
        sync.connect()
        self.last_version += 1
        sync.push(self.last_version)
        sync.close()
        return sync


def log_probs(
    model: PreTrainedModel, prompt_ids: list[int], response_ids: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """[T, V]: what transformers says of every token that could have come at each response position."""
    ids = torch.tensor([prompt_ids + response_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)


def perturbed(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The model with a tenth of noise on every weight: other outputs, as after a large update."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model


def source_of(model: PreTrainedModel) -> StateDict:
    """The checkpoint's tensors: a tied output layer is not among them."""
    names = {name for name, _ in model.named_parameters()}
    return StateDict({name: t.detach() for name, t in model.state_dict().items() if name in names})


def server_settings(**changes) -> ServerSettings:
    """Settings of a small server."""
    return ServerSettings(
        **({"kv_cache_gib": 0.125, "max_num_seqs": 32, "stop_timeout_seconds": 5} | changes)
    )


def start_servers(folder: Path, run_dir: Path, **changes) -> Servers:
    """Real servers in fp32 on CPU."""
    return Servers.start(
        server_settings(**changes),
        folder,
        run_dir=run_dir,
        max_model_len=MAX_MODEL_LEN,
        dtype="float32",
        device="cpu",
        transport="shm",
        seed=0,
    )


@pytest.fixture(scope="session")
def vllm_server(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One server, started once; about half a minute."""
    folder, run_dir = tiny("qwen3_tied"), tmp_path_factory.mktemp("run")
    with start_servers(folder, run_dir) as servers:
        yield VllmServer(servers, folder, run_dir)
