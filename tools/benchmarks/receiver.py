"""A server that takes weights through shared memory and keeps them: the transport without vLLM.

    python tools/benchmarks/receiver.py --port 8000 --model FOLDER

Answers the calls of a sync and `/weight_checker`, with digests by Hugging Face name. Other arguments
of vLLM's server are taken and not looked at, so that it can stand in its place. It counts
what it copies out (`/stats`), and can be told not to (`/read`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from megatron_meds.weights.files import Checkpoint
from megatron_meds.weights.shm.memory import SharedMemory
from megatron_meds.weights.shm.plan import Entry, make_plan
from megatron_meds.weights.shm.sender import place_in

SPOILS = "RECEIVER_SPOILS"
"""Environment: the tensor whose first element the receiver gets wrong."""


class Receiver:
    """What the server holds; each method answers the POST of its name."""

    def __init__(self, folder: Path) -> None:
        self.version = "default"
        self.reads = True
        self.bytes = 0
        self.weights: dict[str, torch.Tensor] = {}
        self._memory: SharedMemory | None = None
        with Checkpoint(folder) as checkpoint:
            self.weights = {name: checkpoint.read(name) for name in checkpoint.names}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Map the sender's buffer."""
        if self._memory is not None:
            self._memory.close()
        names, shapes = init_info["names"], map(tuple, init_info["shapes"])
        rows = zip(names, shapes, init_info["dtypes"], init_info["nbytes"], strict=True)
        self._plan = make_plan([Entry(*row) for row in rows], init_info["bucket_bytes"])
        self._memory = SharedMemory.attach(init_info["path"], init_info["size"])

    def update_weights(self, update_info: dict[str, int]) -> None:
        """Copy a bucket out, each tensor to where it was before."""
        assert self._memory is not None, "init_weight_transfer_engine comes first"
        if not self.reads:
            return
        for place in self._plan.buckets[update_info["bucket"]]:
            source = place_in(self._memory.bytes, place)
            held = self.weights.get(place.name)
            if held is None or (held.shape, held.dtype) != (source.shape, source.dtype):
                held = self.weights[place.name] = torch.empty_like(source)
            held.copy_(source)
            self.bytes += held.nbytes
            if place.name == os.environ.get(SPOILS):
                held.view(-1)[0] += 1

    def finish_weight_update(self, weight_version: str) -> None:
        """The version of what has come."""
        self.version = weight_version

    def update_weight_version(self, new_version: str) -> None:
        """The version that the server says it holds."""
        self.version = new_version

    def weight_checker(self, action: str) -> dict[str, Any]:
        """Digests of all tensors."""
        assert action == "checksum"
        return {"checksums": {f"dp0:pp0:pcp0:tp0:{n}": _digest(t) for n, t in self.weights.items()}}

    def read(self, wanted: bool) -> None:
        """Whether buckets are copied out; starts the count anew."""
        self.reads = wanted
        self.bytes = 0

    def status(self) -> dict[str, Any]:
        """The answer to every GET, and to every POST that says nothing else."""
        return {
            "success": True,
            "weight_version": self.version,
            "world_size": 1,
            "bytes": self.bytes,
        }


_ANSWERED = {
    "init_weight_transfer_engine",
    "update_weights",
    "finish_weight_update",
    "update_weight_version",
    "weight_checker",
    "read",
}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def serve(port: int, folder: Path) -> None:
    """Serve on the loopback until the process is ended."""
    receiver = Receiver(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(receiver.status())

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length", 0)))
            name = urlsplit(self.path).path.strip("/")
            found = getattr(receiver, name)(**json.loads(raw)) if name in _ANSWERED else None
            self._say(found or receiver.status())

        def _say(self, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder to start from")
    given, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    serve(given.port, given.model)
