"""vLLM's control API for reinforcement learning, spoken to several servers as if they were one.

Start, update, finish, pause, resume, versions: each call goes to all servers at once and comes back
when the last has answered. Has the four methods that vLLM's trainer engines ask of a client. Knows
HTTP and addresses; nothing of tensors, transports or processes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

UPDATING = "updating"
"""The weight version that a server reports from the start of a sync until it has succeeded."""
INITIAL = "default"
"""The weight version of a server that has received nothing since it started (vLLM's own label)."""


class SyncError(RuntimeError):
    """A server refused or failed a part of a sync; the message names the server."""


class ControlClient:
    """All servers of a run, in a fixed order.

    `deadline` bounds the calls: each may take what is left until then. Set it with `within`.
    """

    def __init__(self, urls: Sequence[str], timeout: float) -> None:
        """
        Args:
            urls: base URLs of the servers.
            timeout: seconds that a call may take, and with `within` all calls until the next `within`.
        """
        self.urls = list(urls)
        self.timeout = timeout
        self.version: int | None = None
        """What `finish_weight_update` names the weights that arrived."""
        self._deadline: float | None = None
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # Servers are on this machine or in this cluster: a proxy from the environment is not meant for them.
        self._http = httpx.Client(trust_env=False, limits=limits)
        self._pool = ThreadPoolExecutor(max_workers=max(len(self.urls), 1), thread_name_prefix="servers")

    def within(self, seconds: float | None = None) -> None:
        """From now on, all calls together may take `seconds` (None: the timeout)."""
        self._deadline = time.monotonic() + (self.timeout if seconds is None else seconds)

    def close(self) -> None:
        """End the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    # What vLLM's trainer engines call.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Rendezvous. Where `init_info` has a rank offset, each server gets its own: the workers of a
        server follow those of the server before it."""
        if "rank_offset" not in init_info:
            self.post("init_weight_transfer_engine", {"init_info": init_info})
            return
        bodies, offset = [], init_info["rank_offset"]
        for size in self.world_sizes():
            bodies.append({"init_info": {**init_info, "rank_offset": offset}})
            offset += size
        self.post("init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        """The servers prepare their layers."""
        self.post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """The servers receive and load; returns when all have."""
        self.post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The servers take the weights into use, as version `weight_version` or `self.version`."""
        label = weight_version if weight_version is not None else str(self.version)
        self.post("finish_weight_update", {"weight_version": label})

    # What a sync needs around that.

    def shutdown_weight_transfer_engine(self) -> None:
        """The servers let go of the last rendezvous."""
        self.post("shutdown_weight_transfer_engine")

    def world_sizes(self) -> list[int]:
        """Workers of each server."""
        return [int(answer["world_size"]) for answer in self.get("get_world_size")]

    def versions(self) -> list[str]:
        """The weight version each server reports: a number, `updating` or `default`."""
        return [str(answer["weight_version"]) for answer in self.get("weight_info")]

    def begin(self) -> None:
        """Mark the servers as being updated, let requests in flight end, and hold new ones back."""
        self.post("update_weight_version", {"new_version": UPDATING})
        self.post("pause", params={"mode": "wait"})

    def end(self) -> None:
        """Forget cached prefixes of the old weights and take requests again.

        Raises:
            SyncError: a server could not drop its cache: requests hold on to it.
        """
        for url, answer in zip(self.urls, self.post("reset_prefix_cache"), strict=True):
            if not answer["success"]:
                raise SyncError(
                    f"server {url} could not drop its prefix cache: requests still hold blocks of it"
                )
        self.post("resume")

    def abandon(self) -> None:
        """After a failed sync: end what is open on the servers that still answer, so that a next one
        can start. They stay paused and report `updating`, and so are not asked for samples.

        Answers are not looked at: on some servers nothing is open, and some are gone.
        """
        self.within(min(self.timeout, 30.0))
        self._fan_out("POST", "finish_weight_update", None, None)
        self._fan_out("POST", "update_weight_version", {"new_version": UPDATING}, None)

    def post(
        self, path: str, body: dict[str, Any] | list[dict[str, Any]] | None = None, params: dict | None = None
    ) -> list[dict[str, Any]]:
        """POST to all servers at once; a list of bodies has one for each.

        Raises:
            SyncError: a server did not answer in time, or with a failure; names all that did not.
        """
        return self._checked(self._fan_out("POST", path, body, params))

    def get(self, path: str) -> list[dict[str, Any]]:
        """GET from all servers at once; raises as `post`."""
        return self._checked(self._fan_out("GET", path, None, None))

    def _fan_out(
        self, method: str, path: str, body: dict | list | None, params: dict | None
    ) -> list[dict[str, Any] | SyncError]:
        bodies = body if isinstance(body, list) else [body] * len(self.urls)
        calls = [
            self._pool.submit(self._call, method, url, path, one, params)
            for url, one in zip(self.urls, bodies, strict=True)
        ]
        return [call.result() for call in calls]

    def _checked(self, answers: list[dict[str, Any] | SyncError]) -> list[dict[str, Any]]:
        failures = [answer for answer in answers if isinstance(answer, SyncError)]
        if failures:
            raise SyncError("; ".join(str(failure) for failure in failures))
        return [answer for answer in answers if not isinstance(answer, SyncError)]

    def _call(
        self, method: str, url: str, path: str, body: dict | None, params: dict | None
    ) -> dict[str, Any] | SyncError:
        left = self.timeout if self._deadline is None else max(self._deadline - time.monotonic(), 0.1)
        try:
            response = self._http.request(method, f"{url}/{path}", json=body, params=params, timeout=left)
        except httpx.TimeoutException:
            return SyncError(
                f"server {url} did not answer /{path} within {left:.1f} s (weights.timeout_seconds is "
                f"{self.timeout:g})"
            )
        except httpx.TransportError as error:
            return SyncError(f"server {url} is not there for /{path} ({type(error).__name__}: {error})")
        if response.status_code != httpx.codes.OK:
            return SyncError(f"server {url} failed /{path} with {response.status_code}: {_reason(response)}")
        return response.json()


def _reason(response: httpx.Response) -> str:
    """The message in vLLM's answer, or the answer."""
    if response.headers.get("content-type", "").startswith("application/json"):
        content = response.json()
        error = content.get("error", content) if isinstance(content, dict) else content
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return response.text[:500]
