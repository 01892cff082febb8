# SPDX-License-Identifier: Apache-2.0
"""A client of an S3 server that shares nothing with NIXL, to write, read and check the objects that NIXL moves."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import os
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from urllib.parse import quote, urlsplit
from xml.sax.saxutils import unescape

from pytest_nixl.core.redaction import redact
from pytest_nixl.nixl.worker.object_stores import (
    SECONDS,
    SYSTEM_BUNDLE,
    ObjectStoreError,
    StoreClient,
    clock_ahead,
    fault_of,
)
from pytest_nixl.nixl.worker.s3_faults import BY_CODE, BY_STATUS, CONNECTION_FAULTS, UNKNOWN, trusted_by

_CODE = re.compile(rb"<Code>([A-Za-z]{1,60})</Code>")
_KEY = re.compile(rb"<Key>([^<]+)</Key>")


@dataclass(frozen=True)
class ObjectStore:
    """A bucket of an S3 server, and the key to it.

    :param scheme: ``http`` or ``https``.
    :param address: ``HOST`` or ``HOST:PORT``.
    :param authority: the file with the certificates that sign the server's; empty for those of the system.
    :param told: whether NIXL has that file from the parameter ``ca_bundle``. It reads no variable that names one.
    """

    scheme: str
    address: str
    bucket: str
    region: str
    key_id: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)
    authority: str = ""
    told: bool = False

    @property
    def bundle(self) -> str:
        """The file with the certificates that this client trusts; empty: none is known."""
        known = (self.authority, ssl.get_default_verify_paths().cafile, SYSTEM_BUNDLE)
        return next((path for path in known if path and os.path.isfile(path)), "")

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"{self.scheme}://{self.address}"

    @classmethod
    def of(cls, parameters: Mapping[str, str], environ: Mapping[str, str]) -> ObjectStore:
        """Return the bucket that NIXL's OBJ backend uses with these parameters and variables.

        :raises ObjectStoreError: there is no bucket or no key, or the endpoint is not a URL.
        """
        bucket = parameters.get("bucket") or environ.get("AWS_DEFAULT_BUCKET", "")
        if not bucket:
            raise ObjectStoreError(
                "no bucket is named for OBJ",
                "set AWS_DEFAULT_BUCKET=BUCKET, or --nixl-backend-params=OBJ:bucket=BUCKET",
            )
        region = (
            parameters.get("region") or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        )
        usual = f"https://s3.{region}.amazonaws.com"
        told = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or usual
        told = parameters.get("endpoint_override") or told
        url = told if "://" in told else f"{parameters.get('scheme', 'https')}://{told}"
        try:
            scheme, address = parse_server(url)
        except ValueError as error:
            raise ObjectStoreError(
                f"the endpoint {error}", "correct AWS_ENDPOINT_URL, or the parameter endpoint_override"
            ) from None
        missing = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if not environ.get(name)]
        if missing:
            raise ObjectStoreError(
                f"{' and '.join(missing)} is not set: pytest-nixl checks the objects with its own client",
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_SESSION_TOKEN for a temporary key",
            )
        return cls(
            scheme, address, bucket, region,
            environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"], environ.get("AWS_SESSION_TOKEN", ""),
            parameters.get("ca_bundle") or environ.get("AWS_CA_BUNDLE", ""), bool(parameters.get("ca_bundle")),
        )  # fmt: skip


def parse_server(text: str) -> tuple[str, str]:
    """Return the scheme and the address of an S3 server, such as ``http`` and ``HOST:PORT``.

    :raises ValueError: the text is not such a URL.
    """
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        valid = valid and parts.path in ("", "/") and not parts.query and not parts.fragment
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"{redact(text)!r} is not http://HOST[:PORT] or https://HOST[:PORT]")
    return parts.scheme, parts.netloc.rpartition("@")[2]


class ObjectClient(StoreClient):
    """Put, get and delete objects, one request at a time. It connects with the first request.

    :param store: the bucket.
    """

    def __init__(self, store: ObjectStore) -> None:
        where, transport = f"the S3 server {store.url}", f"{store.scheme}/{store.address}"
        clock = BY_CODE["RequestTimeTooSkewed"]
        super().__init__(where, f"bucket {store.bucket}", transport, clock, CONNECTION_FAULTS)
        self.store = store
        self._connection: http.client.HTTPConnection | None = None

    def put(self, key: str, content: bytes) -> None:
        self._request("PUT", key, content)

    def get(self, key: str, offset: int, size: int) -> bytes:
        """Return ``size`` bytes of an object from ``offset``. :raises ObjectStoreError: as :meth:`put`."""
        return self._request("GET", key, headers={"range": f"bytes={offset}-{offset + size - 1}"})

    def delete(self, key: str) -> None:
        """Delete an object. :raises ObjectStoreError: as :meth:`put`."""
        self._request("DELETE", key)

    def keys(self) -> list[str]:
        """Return the keys of the bucket's objects, at most 1000. :raises ObjectStoreError: as :meth:`put`."""
        listed = self._request("GET", "", query="list-type=2")
        return [unescape(key.decode()) for key in _KEY.findall(listed)]

    def create_bucket(self) -> None:
        """Create the bucket. :raises ObjectStoreError: as :meth:`put`."""
        region = self.store.region
        where = f"<LocationConstraint>{region}</LocationConstraint>"
        body = f"<CreateBucketConfiguration>{where}</CreateBucketConfiguration>"
        self._request("PUT", "", b"" if region == "us-east-1" else body.encode())

    def remove_bucket(self) -> None:
        """Delete the bucket with all its objects. :raises ObjectStoreError: as :meth:`put`."""
        while keys := self.keys():
            for key in keys:
                self.delete(key)
        self._request("DELETE", "")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def abandon(self) -> None:
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def doubt(self) -> ObjectStoreError | None:
        """Return that NIXL may not trust the server's certificate, if it was told none that it trusts."""
        if self.store.scheme == "http" or self.store.told:
            return None
        remedy = trusted_by(self.store.bundle)
        reason = (
            f"{self.server} answers another client, but NIXL's plugin OBJ may not trust its certificate, because it "
            "reads neither AWS_CA_BUNDLE nor, in a wheel, the certificates of Debian or Ubuntu"
        )
        return ObjectStoreError(reason, remedy, kind="tls")

    def _request(
        self, method: str, key: str, body: bytes = b"", headers: Mapping[str, str] | None = None, query: str = ""
    ) -> bytes:
        store = self.store
        path = "/" + quote(f"{store.bucket}/{key}" if key else store.bucket)
        signed = _signed(store, method, path, body, headers or {}, datetime.now(timezone.utc), query)
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.request(method, f"{path}?{query}" if query else path, body=body or None, headers=signed)
            answer = self._connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            words, fault = fault_of(error, CONNECTION_FAULTS)
            raise ObjectStoreError(f"{self.server} {words}", fault.remedy, kind=fault.kind) from None
        self.ahead = clock_ahead(answer.getheader("date"))
        if answer.status // 100 != 2:
            match = _CODE.search(content)
            code = match[1].decode() if match else f"HTTP {answer.status} {answer.reason}"
            fault = BY_CODE.get(code) or BY_STATUS.get(answer.status, UNKNOWN)
            what = f"an object in {self.space}" if key else self.space
            raise ObjectStoreError(
                f"{self.server} answered {code} to {method} of {what}", fault.remedy, kind=fault.kind
            )
        return content

    def _connect(self) -> http.client.HTTPConnection:
        store = self.store
        if store.scheme == "http":
            return http.client.HTTPConnection(store.address, timeout=SECONDS)
        context = ssl.create_default_context(cafile=store.authority or None)
        return http.client.HTTPSConnection(store.address, timeout=SECONDS, context=context)


def _signed(
    store: ObjectStore,
    method: str,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    now: datetime,
    query: str = "",
) -> dict[str, str]:
    """Return the headers of a request with AWS's signature, version 4."""
    moment, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    digest = hashlib.sha256(body).hexdigest()
    told = {**headers, "host": store.address, "x-amz-content-sha256": digest, "x-amz-date": moment}
    if store.token:
        told["x-amz-security-token"] = store.token
    names = ";".join(sorted(told))
    listed = "".join(f"{name}:{told[name]}\n" for name in sorted(told))
    request = "\n".join((method, path, query, listed, names, digest))
    scope = f"{day}/{store.region}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{store.secret}".encode()
    for part in (day, store.region, "s3", "aws4_request", text):
        signature = hmac.new(key, part.encode(), hashlib.sha256)
        key = signature.digest()
    credential = f"AWS4-HMAC-SHA256 Credential={store.key_id}/{scope}"
    told["authorization"] = f"{credential}, SignedHeaders={names}, Signature={signature.hexdigest()}"
    return told
