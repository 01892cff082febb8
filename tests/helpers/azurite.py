# SPDX-License-Identifier: Apache-2.0
"""A storage account of Azure (Azurite, Microsoft's emulator) with a container, and Azure's variables that name it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from helpers.certificates import Certificates
from helpers.needs import program
from pytest_nixl.core.free_ports import free_ports

#: The account and the key that Azurite has, as its documentation says: they are no secret.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "container"


def connection_string(url: str, key: str = KEY) -> str:
    """Return the connection string of an account.

    :param url: the server, such as ``http://127.0.0.1:10000``.
    """
    scheme = url.partition(":")[0]
    return f"DefaultEndpointsProtocol={scheme};AccountName={ACCOUNT};AccountKey={key};BlobEndpoint={url}/{ACCOUNT};"


class Azurite:
    """An Azurite in a process of its own, with one container.

    :param folder: an empty folder for its files.
    :param tls: the certificates of its URL ``https``; None: it speaks no TLS.
    """

    def __init__(self, folder: Path, tls: Certificates | None = None) -> None:
        from azure.storage.blob import ContainerClient

        [port] = free_ports(1)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        options = [f"--cert={tls.chain}", f"--key={tls.key}"] if tls else []
        self._process = subprocess.Popen(
            [program("azurite-blob"), "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck",
             "--blobHost=127.0.0.1", f"--blobPort={port}", *options],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        verify = {"connection_verify": str(tls.authority)} if tls else {}
        self.client: Any = ContainerClient.from_connection_string(connection_string(self.url), CONTAINER, **verify)
        assert self._process.stdout is not None
        self._reading = threading.Thread(target=self._process.stdout.read, daemon=True)
        try:
            output = []
            for line in self._process.stdout:
                output.append(line)
                if "successfully listens" in line:
                    break
            else:
                raise AssertionError("".join(output))
            self._reading.start()
            self.client.create_container()
        except BaseException:
            self.kill()
            raise

    def hold(self) -> None:
        """Stop the process: it takes no request, but the kernel accepts connections and bytes for it."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    @property
    def keys(self) -> list[str]:
        """The names of all blobs."""
        return sorted(self.client.list_blob_names())

    def kill(self) -> None:
        """End the process, which may have ended."""
        self.client.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # a script of npm may have started node
        self._process.wait()
        if self._reading.ident is not None:
            self._reading.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


def use_azure(monkeypatch: pytest.MonkeyPatch, url: str, **changes: str) -> None:
    """Name the account at ``url`` and its container by Azure's variables, and unset all others.

    :param changes: other values of variables.
    """
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    variables = {"AZURE_STORAGE_CONNECTION_STRING": connection_string(url), "AZURE_STORAGE_CONTAINER_NAME": CONTAINER}
    for name, value in {**variables, **changes}.items():
        monkeypatch.setenv(name, value)
