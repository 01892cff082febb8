# SPDX-License-Identifier: Apache-2.0
"""A client of an S3 server that shares nothing with NIXL: AWS's own for Python (botocore, which boto3 brings).

It finds credentials where NIXL's plugin finds them: in AWS's variables, a profile, a web-identity token, SSO, or the
role of a container or of an instance.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pytest_nixl.core.extras import pip_install
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.redaction import redact
from pytest_nixl.nixl.worker.object_stores import (
    BY_CODE,
    BY_STATUS,
    CONNECTION_FAULTS,
    SECONDS,
    SYSTEM_BUNDLE,
    UNKNOWN,
    ObjectStoreError,
    StoreClient,
    cause_of,
    clock_ahead,
    fault_of,
    trusted_by,
)

if TYPE_CHECKING:
    from botocore import config, exceptions
    from botocore import session as botocore_session
else:  # only the extra s3 installs it
    config = lazy_module("botocore.config")
    exceptions = lazy_module("botocore.exceptions")
    botocore_session = lazy_module("botocore.session")

_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


@dataclass(frozen=True)
class ObjectStore:
    """A bucket of an S3 server.

    :param scheme: ``http`` or ``https``.
    :param address: ``HOST`` or ``HOST:PORT``.
    :param authority: the file with the certificates that sign the server's; empty for those of the system.
    :param told: whether NIXL has that file from the parameter ``ca_bundle``. It reads no variable that names one.
    """

    scheme: str
    address: str
    bucket: str
    region: str
    authority: str = ""
    told: bool = False

    @property
    def bundle(self) -> str:
        """The file with the certificates that this client trusts; empty: none is known."""
        candidates = (self.authority, ssl.get_default_verify_paths().cafile, SYSTEM_BUNDLE)
        return next((path for path in candidates if path and os.path.isfile(path)), "")

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"{self.scheme}://{self.address}"


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
    :param key: the access key and its secret; None: the credentials that AWS's variables, files and services give.
    :raises ObjectStoreError: there are no credentials, or botocore is not installed.
    """

    def __init__(self, store: ObjectStore, key: tuple[str, str] | None = None) -> None:
        server, transport = f"the S3 server {store.url}", f"{store.scheme}/{store.address}"
        clock = BY_CODE["RequestTimeTooSkewed"]
        super().__init__(server, f"bucket {store.bucket}", transport, clock, CONNECTION_FAULTS)
        self.store = store
        self._session = _open_session(store.region)
        if key is not None:
            self._session.set_credentials(*key)
        _ = self.environment  # a missing credential is an error now
        self._client = self._session.create_client(
            "s3", endpoint_url=store.url, verify=store.authority or store.bundle or None
        )
        self._client.meta.events.register("response-received.s3", self._receive)

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> ObjectClient:
        """Return a client of the bucket that NIXL's OBJ backend uses with these parameters and AWS's variables.

        :raises ObjectStoreError: there is no bucket or no key, or the endpoint is not a URL.
        """
        environ = os.environ
        bucket = parameters.get("bucket") or environ.get("AWS_DEFAULT_BUCKET", "")
        if not bucket:
            raise ObjectStoreError(
                "no bucket is named for OBJ",
                "set AWS_DEFAULT_BUCKET=BUCKET, or --nixl-backend-params=OBJ:bucket=BUCKET",
            )
        region = parameters.get("region") or environ.get("AWS_REGION") or _configured_region() or "us-east-1"
        usual = f"https://s3.{region}.amazonaws.com"
        endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or usual
        endpoint = parameters.get("endpoint_override") or endpoint
        url = endpoint if "://" in endpoint else f"{parameters.get('scheme', 'https')}://{endpoint}"
        try:
            scheme, address = parse_server(url)
        except ValueError as error:
            raise ObjectStoreError(
                f"the endpoint {error}", "correct AWS_ENDPOINT_URL, or the parameter endpoint_override"
            ) from None
        bundle = parameters.get("ca_bundle", "")
        return cls(
            ObjectStore(scheme, address, bucket, region, bundle or environ.get("AWS_CA_BUNDLE", ""), told=bool(bundle))
        )

    @property
    def environment(self) -> dict[str, str]:
        """AWS's variables with the key and its token, as they are now.

        :raises ObjectStoreError: there are no credentials.
        """
        with _credential_faults():
            credentials = self._session.get_credentials()
            key = credentials and credentials.get_frozen_credentials()
        if not key:
            raise ObjectStoreError(
                "no AWS credentials: the variables, files and services that AWS's clients ask have none",
                f"{_KEYS}, or AWS_PROFILE, or give this pod or instance a role",
                kind="credentials",
            )
        return {
            "AWS_ACCESS_KEY_ID": key.access_key,
            "AWS_SECRET_ACCESS_KEY": key.secret_key,
            "AWS_SESSION_TOKEN": key.token or "",
        }

    def put(self, key: str, content: bytes) -> None:
        with self._named("PUT of an object in"):
            self._client.put_object(Bucket=self.store.bucket, Key=key, Body=content)

    def get(self, key: str, offset: int, size: int) -> bytes:
        """Return ``size`` bytes of an object from ``offset``. :raises ObjectStoreError: as :meth:`put`."""
        with self._named("GET of an object in"):
            part = f"bytes={offset}-{offset + size - 1}"
            answer = self._client.get_object(Bucket=self.store.bucket, Key=key, Range=part)
            content: bytes = answer["Body"].read()
        return content

    def delete(self, key: str) -> None:
        """Delete an object. :raises ObjectStoreError: as :meth:`put`."""
        with self._named("DELETE of an object in"):
            self._client.delete_object(Bucket=self.store.bucket, Key=key)

    def keys(self) -> list[str]:
        """Return the keys of the bucket's objects, at most 1000. :raises ObjectStoreError: as :meth:`put`."""
        with self._named("GET of"):
            answer = self._client.list_objects_v2(Bucket=self.store.bucket)
        return [entry["Key"] for entry in answer.get("Contents", ())]

    def create_bucket(self) -> None:
        """Create the bucket. :raises ObjectStoreError: as :meth:`put`."""
        region = self.store.region
        place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        with self._named("PUT of"):
            self._client.create_bucket(Bucket=self.store.bucket, **place)

    def remove_bucket(self) -> None:
        """Delete the bucket with all its objects. :raises ObjectStoreError: as :meth:`put`."""
        while keys := self.keys():
            for key in keys:
                self.delete(key)
        with self._named("DELETE of"):
            self._client.delete_bucket(Bucket=self.store.bucket)

    def close(self) -> None:
        self._client.close()

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

    def _receive(self, parsed_response: Mapping[str, Any] | None, **_: object) -> None:
        """Note the server's clock, and end a refused request here: botocore would go on to the bucket's region."""
        if parsed_response is not None:
            answer = parsed_response["ResponseMetadata"]
            self.ahead = clock_ahead(answer["HTTPHeaders"].get("date"))
            if answer["HTTPStatusCode"] // 100 != 2:
                raise exceptions.ClientError(parsed_response, "")

    @contextlib.contextmanager
    def _named(self, request: str) -> Iterator[None]:
        """Turn an error of botocore into one with the fault and its remedy."""
        try:
            yield
        except exceptions.ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            code = error.response.get("Error", {}).get("Code", "")
            if not code or code == str(status):
                code = " ".join(filter(None, ("HTTP", str(status), http.client.responses.get(status))))
            fault = BY_CODE.get(code) or BY_STATUS.get(status, UNKNOWN)
            raise ObjectStoreError(
                f"{self.server} answered {code} to {request} {self.space}", fault.remedy, kind=fault.kind
            ) from None
        except (exceptions.BotoCoreError, OSError, http.client.HTTPException) as error:
            problem, fault = fault_of(cause_of(error), CONNECTION_FAULTS)
            raise ObjectStoreError(f"{self.server} {problem}", fault.remedy, kind=fault.kind) from None


def _open_session(region: str = "") -> Any:
    """Return a session of botocore whose requests are made once, with the time that a request has, and by no proxy.

    :param region: the region of its clients; empty: that of AWS's variables and files.
    :raises ObjectStoreError: botocore is not installed.
    """
    try:
        session = botocore_session.Session()
    except ImportError as error:
        raise ObjectStoreError(
            f"objects are compared with AWS's client for Python, but {error.name} cannot be imported",
            f"run {pip_install('s3')} in the environment of every rank",
        ) from None
    if region:
        session.set_config_variable("region", region)
    session.set_default_client_config(
        config.Config(
            connect_timeout=SECONDS,
            read_timeout=SECONDS,
            retries={"total_max_attempts": 1},
            proxies={},
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
    )
    return session


def _configured_region() -> str:
    """Return the region that ``AWS_DEFAULT_REGION`` or the profile names; empty: neither does."""
    session = _open_session()
    with _credential_faults():
        return session.get_config_variable("region") or ""


@contextlib.contextmanager
def _credential_faults() -> Iterator[None]:
    """Turn an error of AWS's variables, files and services that give credentials into one with a remedy."""
    try:
        yield
    except (exceptions.BotoCoreError, exceptions.ClientError, OSError) as error:
        raise ObjectStoreError(
            f"AWS credentials cannot be read: {redact(str(error))}",
            f"correct AWS's variables and files, or {_KEYS}",
            kind="credentials",
        ) from None
