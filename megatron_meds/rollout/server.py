"""vLLM servers of this node: start, watch, restart, end.

Each server runs under a supervisor, so that none outlives its trainer, and writes a log of its own.
Everything that would colour samples is stated on the command line. Knows how vLLM is started;
nothing of prompts or weights.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import httpx

from megatron_meds.errors import UserError
from megatron_meds.rollout.settings import ServerSettings

GIB = 2**30
CPU_BATCHED_TOKENS = 8192
"""Tokens that a CPU server computes at once, if no prompt is longer."""
_PORTS = range(20_000, 32_768)
"""Where free ports for servers are looked for."""
_given: set[int] = set()
_POLL_SECONDS = 0.5
_LOG_LINES = 30
_OF_THE_TRAINER = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ROLE_",
    "GROUP_",
    "LOCAL_",
    "TORCHELASTIC",
)
"""Beginnings of torchrun's variables, which a server would take for its own."""


class ServerError(UserError, RuntimeError):
    """A server did not start, or died too often; the message has the end of its log."""


@dataclass
class _Server:
    url: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0


class Servers:
    """The servers that a node's trainer keeps, or (`external`) the addresses of servers that run.

    Attributes:
        urls: base URL of each, by index; unchanged by restarts.
    """

    def __init__(self, settings: ServerSettings, servers: Sequence[_Server], urls: Sequence[str]) -> None:
        """Use `Servers.start`."""
        self.settings = settings
        self.urls = list(urls)
        self._servers = list(servers)

    @classmethod
    def start(
        cls,
        settings: ServerSettings,
        model: Path,
        *,
        run_dir: Path,
        max_model_len: int,
        dtype: Literal["float32", "bfloat16"],
        device: Literal["cpu", "cuda"],
        transport: Literal["shm", "nccl"],
        seed: int,
        first_device: int = 0,
    ) -> Servers:
        """Start `settings.count` servers at once and wait until all are ready.

        With placement `external` nothing is started: the given ones must answer.

        Args:
            model: Hugging Face folder that the servers start from.
            run_dir: logs go to run_dir/servers/server_N.log.
            max_model_len: longest prompt plus response, where the settings leave it open.
            dtype: of the servers, where the settings leave it open.
            transport: how weights will come.
            seed: of the sampler for requests without one; server N gets seed + N.
            first_device: the first GPU of this node that is not the actor's.

        Raises:
            ServerError: a port is in use, or a server died or was not ready in time.
        """
        if settings.placement == "external":
            servers = cls(settings, [], settings.urls)
            servers._wait_ready(range(len(servers.urls)))
            return servers
        folder = run_dir / "servers"
        folder.mkdir(parents=True, exist_ok=True)
        ports = _ports(settings)
        reached = socket.gethostname() if settings.host == "0.0.0.0" else settings.host
        found: list[_Server] = []
        for number, port in enumerate(ports):
            command = _command(
                settings,
                model,
                port=port,
                max_model_len=settings.max_model_len or max_model_len,
                dtype=dtype if settings.dtype == "auto" else settings.dtype,
                device=device,
                transport=transport,
                seed=seed + number,
            )
            environment = _environment(settings, device, number, first_device)
            log = folder / f"server_{number}.log"
            found.append(_Server(f"http://{reached}:{port}", command, environment, log))
        servers = cls(settings, found, [server.url for server in found])
        try:
            for index in range(len(found)):
                servers._launch(index)
            servers._wait_ready(range(len(found)))
        except BaseException:
            servers.stop()
            raise
        return servers

    def check(self) -> list[int]:
        """Indexes of servers that are dead: the process has ended, or does not answer as healthy."""
        return [
            i for i in range(len(self.urls)) if self._ended(i) or not _healthy(self.urls[i], timeout=30.0)
        ]

    def restart(self, index: int) -> None:
        """End what is left of a server and start it again, on the same port, from the same folder.

        It then holds the weights of that folder: connect and push before it is asked for samples.

        Raises:
            ServerError: it was started `restarts` times already, or does not come up; or it is external
                and still does not answer.
        """
        if self._servers:
            server = self._servers[index]
            if server.starts > self.settings.restarts:
                raise ServerError(
                    f"server {self.urls[index]} died {server.starts} times, more than "
                    f"rollout.server.restarts = {self.settings.restarts} allows; the end of {server.log}:\n"
                    f"{_tail(server.log)}"
                )
            self._end([server])
            self._launch(index)
        self._wait_ready([index])

    def stop(self) -> None:
        """End all servers that were started here, with all their processes, in order."""
        self._end(self._servers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self, index: int) -> None:
        server = self._servers[index]
        supervisor = [
            sys.executable,
            "-m",
            "megatron_meds.rollout.supervisor",
            str(os.getpid()),
            str(self.settings.stop_timeout_seconds),
        ]
        with server.log.open("ab") as log:
            server.process = subprocess.Popen(
                [*supervisor, *server.command],
                env=server.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server.starts += 1

    def _wait_ready(self, indexes: Sequence[int] | range) -> None:
        waiting = list(indexes)
        until = time.monotonic() + self.settings.start_timeout_seconds
        while waiting:
            for index in waiting:
                if self._ended(index):
                    raise ServerError(self._failure(index, "ended while starting"))
            waiting = [index for index in waiting if not _healthy(self.urls[index], timeout=5.0)]
            if waiting and time.monotonic() > until:
                seconds = self.settings.start_timeout_seconds
                raise ServerError(
                    self._failure(
                        waiting[0],
                        f"was not ready within rollout.server.start_timeout_seconds = {seconds:g}",
                    )
                )
            if waiting:
                time.sleep(_POLL_SECONDS)

    def _ended(self, index: int) -> bool:
        if not self._servers:
            return False
        process = self._servers[index].process
        return process is None or process.poll() is not None

    def _failure(self, index: int, what: str) -> str:
        if not self._servers:
            return f"server {self.urls[index]} (rollout.server.urls) {what}"
        log = self._servers[index].log
        return f"server {self.urls[index]} {what}; the end of {log}:\n{_tail(log)}"

    def _end(self, servers: Sequence[_Server]) -> None:
        running = [s.process for s in servers if s.process is not None and s.process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)  # the supervisor then ends the group
        for process in running:
            # The supervisor takes at most the grace period twice.
            process.wait(timeout=2 * self.settings.stop_timeout_seconds + 10)
        for server in servers:
            server.process = None


def _command(
    settings: ServerSettings,
    model: Path,
    *,
    port: int,
    max_model_len: int,
    dtype: str,
    device: str,
    transport: str,
    seed: int,
) -> list[str]:
    """vLLM's command line. Defaults of a model's generation_config.json are kept out, and log-probs
    are those of the distribution that was sampled from."""
    options: dict[str, object] = {
        "--model": model,
        "--served-model-name": "policy",
        "--host": settings.host,
        "--port": port,
        "--dtype": dtype,
        "--max-model-len": max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--tensor-parallel-size": settings.tensor_parallel,
        "--seed": seed,
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": json.dumps({"backend": transport}),
    }
    flags = ["--tokens-only", "--enable-prefix-caching", "--disable-uvicorn-access-log"]
    if device == "cpu":
        options["--kv-cache-memory-bytes"] = int(settings.kv_cache_gib * GIB)
        options["--block-size"] = settings.block_size or 32
        # A seeded request whose prompt is computed in parts ends vLLM's CPU worker ("CPU Generator does
        # not use offset"): prompts are computed whole.
        options["--max-num-batched-tokens"] = max(max_model_len, settings.max_num_seqs, CPU_BATCHED_TOKENS)
        flags.append("--no-enable-chunked-prefill")
    else:
        options["--gpu-memory-utilization"] = settings.gpu_memory_utilization
        if settings.block_size is not None:
            options["--block-size"] = settings.block_size
    if settings.enforce_eager is True or (settings.enforce_eager == "auto" and device == "cpu"):
        flags.append("--enforce-eager")
    python = str(settings.python or sys.executable)
    given = [str(part) for option in options.items() for part in option]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *given, *flags, *settings.extra_args]


def _environment(settings: ServerSettings, device: str, number: int, first_device: int) -> dict[str, str]:
    """The trainer's environment without what is torchrun's, and with what vLLM needs here."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_THE_TRAINER)}
    environment.pop("OMP_NUM_THREADS", None)  # torchrun's 1 is for the ranks
    environment |= {
        "VLLM_SERVER_DEV_MODE": "1",  # the weight-transfer, pause and cache routes
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cpu":
        environment["TORCHDYNAMO_DISABLE"] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if settings.cpu_cores is not None:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = settings.cpu_cores
        return environment
    size = settings.tensor_parallel
    devices = settings.devices or list(range(first_device, first_device + settings.count * size))
    mine = devices[number * size : (number + 1) * size]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else None
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] if names else str(i) for i in mine)
    return environment


def _ports(settings: ServerSettings) -> list[int]:
    """One for each server: those of the settings, which must be free, or free ones."""
    if settings.port is not None:
        ports = list(range(settings.port, settings.port + settings.count))
        for port in ports:
            _bind(settings.host, port).close()
        return ports
    return [_free_port(settings.host) for _ in range(settings.count)]


def _free_port(host: str) -> int:
    """A port that is free and stays so until the server asks for it, which may be half a minute later.

    Below the range that the kernel gives to connections, and each only once in this process.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if port in _given:
            continue
        try:
            _bind(host, port).close()
        except ServerError:
            continue
        _given.add(port)
        return port
    raise ServerError(f"rollout.server.port: none of {_PORTS.start} to {_PORTS.stop - 1} is free on {host}")


def _bind(host: str, port: int) -> socket.socket:
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host, port))
    except OSError as error:
        probe.close()
        raise ServerError(
            f"rollout.server.port: {host}:{port} cannot be bound ({error.strerror}); choose another port, "
            "or null to have free ones chosen"
        ) from error
    return probe


def _healthy(url: str, timeout: float) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=timeout, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _tail(log: Path) -> str:
    if not log.exists():
        return "(there is none)"
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-_LOG_LINES:])
