# SPDX-License-Identifier: Apache-2.0
"""An HTTP session that limits the size and the duration of every answer, whatever the server does.

``requests`` limits only the silence between two bytes. A server that sends one byte per second, or never stops, can
block its client forever. Here the limits apply to all reads of an answer: status, headers, chunks and body.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from typing import TYPE_CHECKING, Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: Maximum size of one answer, or of one message of a watch, in bytes.
LARGEST_ANSWER = 64 << 20


class TooLargeError(OSError):
    """An answer is larger than the limit; the rest of it is not read."""


class CompressedError(OSError):
    """An answer is compressed. It is refused, because its size is unknown until it is unpacked."""


class UnfinishedError(TimeoutError):
    """An answer began, but did not end before its deadline."""


class Bounds(io.RawIOBase):
    """A stream of the bytes of one answer that enforces the size limit and the deadline."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket) -> None:
        self._raw = raw
        self._connection = connection
        self._seconds = 0.0
        self._deadline = 0.0
        self._came = 0
        self._left = LARGEST_ANSWER
        # urllib3 has set the read timeout on the socket; None means no timeout.
        self.allow(connection.gettimeout() or float("inf"))

    def allow(self, seconds: float) -> None:
        """Set the deadline for the rest of the answer to ``seconds`` from now."""
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def next_message(self) -> None:
        """Restart the byte count, for the next message of a watch."""
        self._left = LARGEST_ANSWER

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise self._unfinished()
        self._connection.settimeout(None if remaining == float("inf") else remaining)
        try:
            count = self._raw.readinto(buffer)
        except TimeoutError:
            raise self._unfinished() from None
        self._came += count or 0
        self._left -= count or 0
        if self._left < 0:
            raise TooLargeError(f"its answer is larger than {LARGEST_ANSWER >> 20} MiB")
        return count

    def _unfinished(self) -> TimeoutError:
        if not self._came:
            return TimeoutError("timed out")
        return UnfinishedError(f"the answer was incomplete after {self._seconds:.3g} s ({self._came} bytes)")

    def close(self) -> None:
        super().close()
        self._raw.close()


class _Response(http.client.HTTPResponse):
    """Reads through :class:`Bounds`."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.bounds = Bounds(self.fp.detach(), sock)
        self.fp = io.BufferedReader(self.bounds)


class _Connection(HTTPConnection):
    response_class = _Response


class _TlsConnection(HTTPSConnection):
    response_class = _Response


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


class _Adapter(HTTPAdapter):
    def __init__(self, server_name: str) -> None:
        self._server_name = server_name
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        # Old releases of urllib3 give the option to a connection without TLS, too, which does not know it.
        if self._server_name:
            kwargs["assert_hostname"] = self._server_name
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}

    def build_response(self, req: requests.PreparedRequest, resp: Any) -> requests.Response:
        response = super().build_response(req, resp)
        packed = response.headers.get("Content-Encoding", "").strip().lower()
        if packed not in ("", "identity"):
            response.close()
            raise CompressedError("its answer is compressed, but the request did not allow that")
        # Otherwise requests guesses the encoding from the text, which takes minutes for a long answer.
        response.encoding = "utf-8"
        return response


class BoundedSession(requests.Session):
    """A ``requests`` session with size and time limits. It ignores proxies, ``~/.netrc``, variables and redirects.

    The second of the two times in ``timeout`` limits the whole answer.

    :param server_name: the name that a server's certificate has to contain; empty for the host of the URL.
    """

    def __init__(self, server_name: str = "") -> None:
        super().__init__()
        # Ignore proxies, ~/.netrc and REQUESTS_CA_BUNDLE, which would override the CA that the user gave.
        self.trust_env = False
        self.headers["Accept-Encoding"] = "identity"
        self.mount("http://", _Adapter(server_name))
        self.mount("https://", _Adapter(server_name))

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        return None


def bounds_of(response: requests.Response) -> Bounds:
    """Return the :class:`Bounds` of an answer that is read as a stream."""
    original = response.raw._original_response
    assert isinstance(original, _Response)
    return original.bounds
