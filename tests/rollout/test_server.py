"""Starting and ending servers, with small programs in place of vLLM's; a real one in test_server_vllm.py."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from megatron_meds.rollout.server import ServerError, _command, _environment
from tests.fixtures_vllm import server_settings, start_servers

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

TREE = """
import subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
print(child.pid, flush=True)
time.sleep(600)
"""

PARENT = """
import os, subprocess, sys, time
supervisor = [sys.executable, "-m", "megatron_meds.rollout.supervisor", str(os.getpid()), "0.5"]
supervisor = subprocess.Popen([*supervisor, sys.executable, "-c", sys.argv[1]])
print(supervisor.pid, flush=True)
time.sleep(600)
"""


def interpreter(tmp_path: Path, program: str) -> Path:
    """A stand-in for `server.python`: runs the program whatever module it is asked for."""
    script = tmp_path / "program.py"
    script.write_text(program)
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    path.chmod(0o755)
    return path


def wait_gone(pids: list[int], seconds: float) -> list[int]:
    """The processes that still run after that time at most."""
    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=seconds)
    return [p.pid for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_servers_start_answer_and_end_with_all_their_processes(tmp_path):
    others = set(psutil.Process().children(recursive=True))
    with start_servers(tmp_path, tmp_path, python=interpreter(tmp_path, HEALTHY), count=2) as servers:
        assert len(set(servers.urls)) == 2
        assert servers.check() == []
        pids = [p.pid for p in set(psutil.Process().children(recursive=True)) - others]
        assert len(pids) >= 4  # two supervisors, two servers
    assert wait_gone(pids, 10) == []


def test_a_dead_server_is_found_and_comes_back_at_the_same_address(tmp_path):
    with start_servers(
        tmp_path, tmp_path, python=interpreter(tmp_path, HEALTHY), count=2, restarts=1
    ) as servers:
        urls = list(servers.urls)
        _kill_server(servers.urls[1])
        assert servers.check() == [1]
        servers.restart(1)
        assert servers.check() == []
        assert servers.urls == urls
        _kill_server(servers.urls[1])
        with pytest.raises(ServerError, match=r"died 2 times, more than rollout.server.restarts = 1"):
            servers.restart(1)


def _kill_server(url: str) -> None:
    port = url.rsplit(":", 1)[1]
    for process in psutil.Process().children(recursive=True):
        command = process.cmdline()
        if (
            "--port" in command
            and command[command.index("--port") + 1] == port
            and "supervisor" not in str(command)
        ):
            process.kill()
            process.wait(10)


def test_a_server_that_dies_while_starting_shows_the_end_of_its_log(tmp_path):
    program = 'import sys; print("no such model"); sys.exit(3)'
    with pytest.raises(ServerError, match=r"(?s)ended while starting.*server_0.log.*no such model"):
        start_servers(tmp_path, tmp_path, python=interpreter(tmp_path, program))


def test_a_server_that_is_not_ready_in_time_is_ended_and_its_log_shown(tmp_path):
    program = 'import os, time; print("loading", os.getpid(), flush=True); time.sleep(600)'
    with pytest.raises(ServerError, match=r"(?s)start_timeout_seconds = 1.*loading"):
        start_servers(tmp_path, tmp_path, python=interpreter(tmp_path, program), start_timeout_seconds=1)
    pid = int((tmp_path / "servers" / "server_0.log").read_text().split()[1])
    assert wait_gone([pid], 10) == []


def test_a_port_in_use_is_refused_naming_the_setting(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=rf"rollout.server.port: 127.0.0.1:{port} cannot be bound"):
            start_servers(tmp_path, tmp_path, port=port)


def test_external_servers_must_answer_and_are_left_alone(tmp_path):
    with start_servers(tmp_path, tmp_path, python=interpreter(tmp_path, HEALTHY)) as own:
        external = start_servers(tmp_path, tmp_path, placement="external", urls=own.urls)
        assert external.urls == own.urls
        external.stop()
        assert own.check() == []
    with pytest.raises(ServerError, match=rf"{own.urls[0]} \(rollout.server.urls\) was not ready"):
        start_servers(tmp_path, tmp_path, placement="external", urls=own.urls, start_timeout_seconds=1)


@pytest.mark.parametrize("victim", ["parent", "supervisor"])
def test_nothing_is_left_of_a_server_when_its_trainer_is_killed(victim):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, TREE], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    supervisor, child = int(parent.stdout.readline()), int(parent.stdout.readline())
    server = psutil.Process(child).ppid()
    os.kill(parent.pid if victim == "parent" else supervisor, signal.SIGKILL)
    try:
        # A supervisor that is killed takes the server with it; what the server started is then vLLM's own
        # to end, as it does when it loses its parent.
        assert wait_gone([server] if victim == "supervisor" else [server, child, supervisor], 10) == []
    finally:
        parent.kill()
        parent.wait()
        if psutil.pid_exists(child):
            psutil.Process(child).kill()


def test_the_supervisor_leaves_with_the_status_of_its_command():
    run = [sys.executable, "-m", "megatron_meds.rollout.supervisor", str(os.getpid()), "1"]
    assert subprocess.run([*run, sys.executable, "-c", "raise SystemExit(5)"]).returncode == 5
    killed = textwrap.dedent("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert subprocess.run([*run, sys.executable, "-c", killed]).returncode == 128 + signal.SIGKILL


def command_line(device="cpu", transport="shm", **changes):
    return _command(
        server_settings(**changes),
        Path("/model"),
        port=8000,
        max_model_len=512,
        dtype="bfloat16",
        device=device,
        transport=transport,
        seed=3,
    )


def test_nothing_that_colours_samples_is_left_to_the_model_folder():
    line = command_line()
    for option, value in {
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--dtype": "bfloat16",
        "--seed": "3",
        "--max-model-len": "512",
        "--block-size": "32",
        "--weight-transfer-config": '{"backend": "shm"}',
        "--kv-cache-memory-bytes": str(2**27),
    }.items():
        assert line[line.index(option) + 1] == value
    assert "--enforce-eager" in line


def test_a_gpu_server_captures_graphs_and_takes_its_share_of_memory():
    line = command_line(
        device="cuda", transport="nccl", gpu_memory_utilization=0.5, extra_args=["--max-log-len", "1"]
    )
    assert "--enforce-eager" not in line
    assert "--block-size" not in line
    assert line[line.index("--gpu-memory-utilization") + 1] == "0.5"
    assert line[-2:] == ["--max-log-len", "1"]


def test_servers_do_not_take_torchruns_variables_for_theirs(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    environment = _environment(server_settings(cpu_cores="0-1"), "cpu", 0, 0)
    assert not {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "OMP_NUM_THREADS",
    } & set(environment)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"


def test_gpus_of_servers_follow_those_of_the_actor(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = server_settings(count=2, tensor_parallel=2)
    assert [_environment(settings, "cuda", n, 4)["CUDA_VISIBLE_DEVICES"] for n in (0, 1)] == ["4,5", "6,7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,9,11,13")
    given = server_settings(count=1, tensor_parallel=2, devices=[1, 2])
    assert _environment(given, "cuda", 0, 0)["CUDA_VISIBLE_DEVICES"] == "5,7"


def test_ended_servers_can_be_ended_again(tmp_path):
    servers = start_servers(tmp_path, tmp_path, python=interpreter(tmp_path, HEALTHY))
    servers.stop()
    servers.stop()
    assert servers.check() == [0]
