# SPDX-License-Identifier: Apache-2.0
"""A proxy before an object store that makes the faults of other servers, which moto and Azurite do not have."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from email.message import Message
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: Takes method, path and headers of a request; returns the code of a refusal, or an empty text.
Refuse = Callable[[str, str, Message], str]


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: str, refuse: Refuse, skew: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.refuse, self.skew = upstream.partition("//")[2], refuse, skew
        self.requests: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Proxy

    def _forward(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        body = self._body()
        code = self.server.refuse(self.command, self.path, self.headers)
        if code:
            error_headers = {"x-ms-error-code": code}  # Azure's servers say it there
            busy = code in ("SlowDown", "ServerBusy")
            self._answer(503 if busy else 403, error_headers, f"<Error><Code>{code}</Code></Error>".encode())
            return
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        forwarded = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
        upstream.request(self.command, self.path, body=body, headers=forwarded)
        answer = upstream.getresponse()
        hop = ("transfer-encoding", "connection", "content-length", "date", "server")
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in hop}
        content = answer.read()
        upstream.close()
        self._answer(answer.status, headers, content, answer.getheader("content-length"))

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, headers: dict[str, str], content: bytes, length: str | None = None) -> None:
        self.send_response_only(status)
        date = datetime.now(timezone.utc) + timedelta(seconds=self.server.skew)
        self.send_header("date", format_datetime(date, usegmt=True))
        for name, value in headers.items():
            self.send_header(name, value)
        head = self.command == "HEAD"
        self.send_header("content-length", (length or "0") if head else str(len(content)))
        self.end_headers()
        if not head:
            self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _forward  # noqa: N815 - names of http.server

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def faulty_s3(upstream: str, refuse: Refuse = lambda *_: "", *, skew: float = 0) -> Iterator[tuple[str, list[str]]]:
    """Serve a proxy, and yield its URL and the list of the requests that it got.

    :param upstream: the URL of the S3 server, or of Azurite.
    :param refuse: decides on each request.
    :param skew: the seconds by which the server's clock is ahead.
    """
    proxy = _Proxy(upstream, refuse, skew)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}", proxy.requests
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
