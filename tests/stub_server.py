"""An HTTP server in a thread that answers as the test says: for failures a real one does not have."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

Answer = Callable[[str, Any], tuple[int, Any] | None]
"""(path, body) -> (status, content); None closes the connection without an answer."""


class StubServer:
    """`calls` holds the (path, body) of every call, in the order in which they came."""

    def __init__(self, answer: Answer) -> None:
        self.calls: list[tuple[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._serve(None)

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("content-length", 0)))
                self._serve(json.loads(raw) if raw else None)

            def _serve(self, body: Any) -> None:
                path = urlsplit(self.path).path
                outer.calls.append((path, body))
                answered = answer(path, body)
                if answered is None:
                    self.close_connection = True
                    return
                status, content = answered
                data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def paths(self) -> list[str]:
        """The paths that were called."""
        return [path for path, _ in self.calls]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
