# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus and a real Pushgateway, each on a loopback port that the kernel gives it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from helpers.needs import program
from pytest_nixl.core.polling import wait_until

#: Long enough for a machine on which other tests use every core.
SECONDS = 240.0
_LISTENING = re.compile(r'msg="Listening on" address=(\S+)')


def promtool(*arguments: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool with ``text`` as its input; its two outputs are one."""
    return subprocess.run(
        [program("promtool", package="prometheus"), *map(str, arguments)], input=text, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


@contextmanager
def _serving(name: str, log: Path, *options: str) -> Iterator[str]:
    """Start a server on a free port of the loopback interface; yield the address that it says in its log."""
    command = [program(name), "--web.listen-address=127.0.0.1:0", *options]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:

        def address() -> str:
            if process.poll() is not None:
                pytest.fail(f"{name} ended with code {process.returncode}:\n{log.read_text()}")
            match = _LISTENING.search(log.read_text())
            return match[1] if match else ""

        try:
            yield wait_until(address, f"{name} to listen", seconds=SECONDS, remedy=log.read_text)
        finally:
            process.terminate()
            try:
                process.wait(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def pushgateway(directory: Path) -> Iterator[str]:
    """Start a Pushgateway; yield its URL."""
    with _serving("prometheus-pushgateway", directory / "pushgateway.log") as address:
        yield f"http://{address}"


class Prometheus:
    """The API of a Prometheus.

    :param url: its URL.
    :param http: the session for all requests.
    """

    def __init__(self, url: str, http: requests.Session) -> None:
        self._url = url
        self._http = http
        self._http.trust_env = False  # a proxy of the machine may not know its loopback interface

    def is_ready(self) -> bool:
        """Whether it answers queries: it listens before it has read its data."""
        return self._http.get(f"{self._url}/-/ready", timeout=SECONDS).ok

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer.

        :raises AssertionError: the server refuses the request.
        """
        answer = self._http.get(f"{self._url}/api/v1/{path}", params=parameters, timeout=SECONDS)
        assert answer.ok, answer.text
        return answer.json()["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples that an expression has now."""
        return list(self.get("query", query=expression)["result"])

    def eventually(self, condition: Callable[[], Any], expected: Any) -> None:
        """Wait until ``condition`` returns what is expected."""
        last: list[Any] = [None]

        def reached() -> bool:
            last[0] = condition()
            return bool(last[0] == expected)

        wait_until(reached, f"{expected!r}", seconds=SECONDS, remedy=lambda: f"the last value is {last[0]!r}")


@contextmanager
def prometheus(config: Path, directory: Path) -> Iterator[Prometheus]:
    """Start a Prometheus that keeps its data in a directory; yield its API."""
    options = (f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}")
    with _serving("prometheus", directory / "prometheus.log", *options) as address:
        with requests.Session() as http:
            server = Prometheus(f"http://{address}", http)
            server.eventually(server.is_ready, True)
            yield server
