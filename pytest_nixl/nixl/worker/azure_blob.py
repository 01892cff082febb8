# SPDX-License-Identifier: Apache-2.0
"""A client of Azure Blob Storage that shares nothing with NIXL: Microsoft's own for Python.

It is the package ``azure-storage-blob`` of the extra ``azure``, and for an account without a connection string also
``azure-identity``, which finds the same credentials as NIXL's plugin.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pytest_nixl.core.extras import pip_install
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.redaction import redact
from pytest_nixl.core.texts import Entries
from pytest_nixl.nixl.worker.object_stores import (
    SECONDS,
    SYSTEM_BUNDLE,
    ObjectStoreError,
    StoreClient,
    StoreFault,
    cause_of,
    clock_ahead,
    connection_faults,
    fault_of,
    faults_by_code,
    faults_by_status,
)

if TYPE_CHECKING:
    from azure import identity
    from azure.core import exceptions
    from azure.storage import blob
else:  # only the extra azure installs them
    identity = lazy_module("azure.identity")
    exceptions = lazy_module("azure.core.exceptions")
    blob = lazy_module("azure.storage.blob")

_CONNECTION, _ACCOUNT = "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_URL"
_CONTAINER = "AZURE_STORAGE_CONTAINER_NAME"
_BUNDLE = "AZURE_CA_BUNDLE"
_FAULTS = Entries("store-faults", StoreFault, "azure")
BY_CODE, _BY_STATUS, CONNECTION_FAULTS = faults_by_code(_FAULTS), faults_by_status(_FAULTS), connection_faults(_FAULTS)
_KEY, _CLOCK, _UNKNOWN = _FAULTS["credentials"], _FAULTS["clock"], _FAULTS["unknown"]


class BlobClient(StoreClient):
    """Put, get and delete blobs of one container.

    :param container: a ``ContainerClient`` of ``azure-storage-blob``.
    """

    def __init__(self, container: Any) -> None:
        parts = urlsplit(container.primary_endpoint)
        host = parts.netloc.rpartition("@")[2]
        account = f"the Azure storage account {parts.scheme}://{host}"
        space = f"container {container.container_name}"
        super().__init__(account, space, f"{parts.scheme}/{host}", _CLOCK, CONNECTION_FAULTS)
        self._container = container

    @classmethod
    def of(cls, parameters: Mapping[str, str], environ: Mapping[str, str]) -> BlobClient:
        """Return a client of the container that NIXL's plugin uses with these parameters and variables.

        :raises ObjectStoreError: no container or account is named, the connection string is malformed, or a package of
            the extra ``azure`` is missing.
        """
        name = parameters.get("container_name") or environ.get(_CONTAINER, "")
        connection, url = environ.get(_CONNECTION, ""), environ.get(_ACCOUNT, "")
        if not name:
            raise ObjectStoreError(
                "no container is named for AZURE_BLOB",
                f"set {_CONTAINER}=NAME, or --nixl-backend-params=AZURE_BLOB:container_name=NAME",
            )
        if not connection and not url:
            raise ObjectStoreError(
                f"neither {_CONNECTION} nor {_ACCOUNT} is set",
                f"set {_CONNECTION} to the account's connection string, or {_ACCOUNT} to its URL",
            )
        options: dict[str, Any] = {"retry_total": 0, "connection_timeout": SECONDS, "read_timeout": SECONDS}
        options |= _trusted(parameters.get("ca_bundle") or environ.get(_BUNDLE, ""))
        try:
            if connection:
                return cls(blob.ContainerClient.from_connection_string(connection, name, **options))
            return cls(blob.ContainerClient(url, name, credential=_credential(), **options))
        except ImportError as error:
            raise ObjectStoreError(
                f"blobs are compared with Microsoft's client for Python, but {error.name} cannot be imported",
                f"run {pip_install('azure')} in the environment of every rank",
            ) from None
        except ValueError as error:
            variable = _CONNECTION if connection else _ACCOUNT
            raise ObjectStoreError(f"{variable} is malformed: {redact(str(error))}", f"correct {variable}") from None

    def put(self, key: str, content: bytes) -> None:
        """Store a blob. :raises ObjectStoreError: the account cannot be reached, or refuses it."""
        with self._named("PUT of a blob"):
            self._container.upload_blob(key, content, overwrite=True, raw_response_hook=self._heard)

    def get(self, key: str, offset: int, size: int) -> bytes:
        """Return ``size`` bytes of a blob from ``offset``. :raises ObjectStoreError: as :meth:`put`."""
        with self._named("GET of a blob"):
            content: bytes = self._container.download_blob(
                key, offset=offset, length=size, raw_response_hook=self._heard
            ).readall()
        return content

    def delete(self, key: str) -> None:
        """Delete a blob, which may be missing. :raises ObjectStoreError: as :meth:`put`."""
        with self._named("DELETE of a blob"):
            try:
                self._container.delete_blob(key, raw_response_hook=self._heard)
            except exceptions.ResourceNotFoundError as error:
                if getattr(error, "error_code", "") != "BlobNotFound":
                    raise

    def close(self) -> None:
        self._container.close()

    def _heard(self, answer: Any) -> None:
        self.ahead = clock_ahead(answer.http_response.headers.get("date"))

    @contextlib.contextmanager
    def _named(self, action: str) -> Iterator[None]:
        """Turn an error of the package into one with the fault and its remedy."""
        try:
            yield
        except exceptions.HttpResponseError as error:
            if error.response is None:
                raise self._unanswered(error) from None
            self.ahead = clock_ahead(error.response.headers.get("date"))
            error_code = getattr(error, "error_code", None) or f"HTTP {error.status_code}"
            code = str(getattr(error_code, "value", error_code))  # the package has a member for each code that it knows
            fault = BY_CODE.get(code) or _BY_STATUS.get(error.status_code or 0, _UNKNOWN)
            raise ObjectStoreError(
                f"{self.server} answered {code} to {action} in {self.space}", fault.remedy, kind=fault.kind
            ) from None
        except (exceptions.AzureError, OSError) as error:
            raise self._unanswered(error) from None

    def _unanswered(self, error: Exception) -> ObjectStoreError:
        """Return what a request means to which the account gave no whole answer."""
        if not isinstance(error, exceptions.ClientAuthenticationError):
            description, fault = fault_of(cause_of(error), CONNECTION_FAULTS)
            return ObjectStoreError(f"{self.server} {description}", fault.remedy, kind=fault.kind)
        first = redact(str(error.message).strip().partition("\n")[0])
        if type(error).__name__ == "AzureSigningError":  # it is exported by no public module
            return ObjectStoreError(f"the key for {self.server} is malformed: {first}", _KEY.remedy, kind=_KEY.kind)
        return ObjectStoreError(
            f"no credentials for {self.server} were found: {first}",
            f"set {_CONNECTION}, or give this host an identity: run `az login`",
            kind="credentials",
        )


def _trusted(bundle: str) -> dict[str, str]:
    """Return the option with the certificates that NIXL's plugin trusts too: it knows the system's file.

    :param bundle: the file that the deployment names; empty: none.
    """
    if bundle and not os.path.isfile(bundle):
        fault = CONNECTION_FAULTS.untrusted
        raise ObjectStoreError(f"{_BUNDLE} names no file: {bundle}", fault.remedy, kind=fault.kind)
    if not bundle and not os.path.isfile(SYSTEM_BUNDLE):
        return {}
    return {"connection_verify": bundle or SYSTEM_BUNDLE}


def _credential() -> Any:
    """Return the credentials that this host has. :raises ObjectStoreError: a variable that chooses them is wrong."""
    try:
        return identity.DefaultAzureCredential()
    except ValueError as error:
        raise ObjectStoreError(
            f"azure-identity refuses its settings: {redact(str(error))}",
            "correct the variable AZURE_… that the message names",
            kind="credentials",
        ) from None
