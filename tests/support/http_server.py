"""A server on the loopback interface that answers as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, bytes] | tuple[int, bytes, dict[str, str]]


@contextmanager
def http_server(answer: Callable[[str, str, Any, bytes], Answer]) -> Iterator[str]:
    """Start a server and yield its URL. `answer` is called with a request's method, path, headers and body, and returns
    the status, body and further headers of the reply."""

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            given = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body, *further = answer(self.command, self.path, self.headers, given)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(further[0] if further else {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = reply

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
