# SPDX-License-Identifier: Apache-2.0
"""An HTTP server that stands between a reader of metrics and a real endpoint, and alters what passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen

TEXT = "text/plain; version=0.0.4; charset=utf-8"


@contextmanager
def metrics_server(answer: Callable[[], bytes], *, status: int = 200, content_type: str = TEXT) -> Iterator[int]:
    """Serve what a function returns at every path; yield the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answer()
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(OSError):  # the reader may hang up first
                self.wfile.write(body)
                self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def altered(url: str, change: Callable[[str], str]) -> Callable[[], bytes]:
    """Return a function that reads the text of an endpoint and changes it."""

    def answer() -> bytes:
        with urlopen(url, timeout=30) as response:
            return change(response.read().decode()).encode()

    return answer
