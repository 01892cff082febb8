# SPDX-License-Identifier: Apache-2.0
"""An etcd that repeats a password in its error does not get it into a message."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pytest_nixl.etcd.client import connect
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.etcd.errors import EtcdError

PASSWORD = 'Sw0rd"fish;1'


class Echo(BaseHTTPRequestHandler):
    """Refuses each request with the request itself as the message, and as the reason if it has a status of its own."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        password = json.loads(body).get("password", "")
        answers = {"message": json.dumps({"code": 2, "message": f"refused {password} of {body}"}), "reason": "{}"}
        data = answers[self.server.kind].encode()  # type: ignore[attr-defined]
        self.send_response(500, f"refused {password}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=["message", "reason"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    server.kind = request.param  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def test_an_error_that_repeats_the_password_is_shown_without_it(port: int) -> None:
    endpoints = [Endpoint("http", "127.0.0.1", port)]
    with connect(endpoints, user="me", password=PASSWORD) as client, pytest.raises(EtcdError) as caught:
        client.get("/x")
    text = str(caught.value)
    assert "refused ***" in text
    assert "fish" not in text
    assert "Sw0rd" not in text
