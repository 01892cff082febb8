# SPDX-License-Identifier: Apache-2.0
"""An image with moto's server, as ``motoserver/moto`` is, made of this Python and its packages: CI can pull none."""

from __future__ import annotations

import json
import sys
from pathlib import PurePath
from typing import Any

import pytest

from helpers.needs import lack
from helpers.python_image import PYTHON, import_image, packages, python, with_dependencies
from pytest_nixl.processes.container import ContainerError, container_engine

IMAGE = "localhost/pytest-nixl-moto:test"
#: Of botocore's models of services, those that moto's server needs. The others are most of botocore.
_SERVICES = ("s3", "s3control", "ec2", "iam", "sts")
_SITE = "/packages"


def moto_image() -> str:
    """Return an image with moto's server in a real engine; make it if it does not exist."""
    docker = pytest.importorskip("docker")
    pytest.importorskip("testcontainers")
    pytest.importorskip("moto")
    try:
        with container_engine() as engine:
            try:
                engine.images.get(IMAGE)
            except docker.errors.ImageNotFound:
                _import_image(engine)
    except ContainerError as error:
        lack(f"a container engine: {error.reason}")
    return IMAGE


def _import_image(engine: Any) -> None:
    command = [PYTHON, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000"]
    changes = [
        f"ENV PYTHONPATH={_SITE}",
        f"ENV PYTHONHOME={sys.base_prefix}",
        "EXPOSE 5000",
        f"ENTRYPOINT {json.dumps(command)}",
    ]
    results = packages(with_dependencies("moto[s3,server]"), _SITE)
    import_image(engine, IMAGE, dict([*python(), *((name, path) for name, path in results if _needed(name))]), changes)


def _needed(name: str) -> bool:
    parts = PurePath(name).relative_to(_SITE).parts
    return not (parts[:2] == ("botocore", "data") and len(parts) > 3 and parts[2] not in _SERVICES)
