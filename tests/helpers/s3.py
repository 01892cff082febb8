# SPDX-License-Identifier: Apache-2.0
"""An S3 server (moto) with a bucket, and AWS's variables that name it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import boto3
import pytest

from helpers.certificates import Certificates

KEYS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "thing", "AWS_DEFAULT_REGION": "us-east-1"}


class S3Server:
    """A moto server in a process of its own, with one bucket.

    :param tls: the certificates of its URL ``https``; None: it speaks no TLS.
    :param variables: environment variables of that process.
    """

    def __init__(self, tls: Certificates | None = None, **variables: str) -> None:
        options = ["--ssl", f"--ssl-cert={tls.chain}", f"--ssl-key={tls.key}"] if tls else []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0", *options],
            env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.url = next(line.split()[-1] for line in self._process.stdout if "Running on" in line)
        self._reading = threading.Thread(target=self._process.stdout.read, daemon=True)
        self._reading.start()
        self.client: Any = boto3.client(
            "s3", endpoint_url=self.url, region_name="us-east-1", aws_access_key_id="any",
            aws_secret_access_key="thing", verify=str(tls.authority) if tls else None,
        )  # fmt: skip
        self.client.create_bucket(Bucket="bucket")

    def hold(self) -> None:
        """Stop the process: it takes no request, but the kernel accepts connections and bytes for it."""
        self._process.send_signal(signal.SIGSTOP)

    @property
    def keys(self) -> list[str]:
        """The keys of all objects."""
        return [entry["Key"] for entry in self.client.list_objects_v2(Bucket="bucket").get("Contents", ())]

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._reading.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


def use_s3(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Name the server at ``url`` and its bucket by AWS's variables, and unset all others."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    values = {**KEYS, "AWS_DEFAULT_BUCKET": "bucket", "AWS_ENDPOINT_URL": url, "AWS_EC2_METADATA_DISABLED": "true"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
