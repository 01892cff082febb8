# SPDX-License-Identifier: Apache-2.0
"""HTTP servers that answer as a test says, because no real one does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HttpDouble(BaseHTTPRequestHandler):
    """Answers each request with its method :meth:`reply`, and writes no log."""

    def reply(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.reply()

    do_POST = do_PUT = do_GET  # noqa: N815 - names of http.server

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(self, status: int, document: Any) -> None:
        """Answer with a text, or with a value as JSON."""
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status, "refused" if status >= 400 else None)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(double: type[HttpDouble]) -> Iterator[int]:
    """Serve requests on loopback until the block ends; yield the port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), double) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
