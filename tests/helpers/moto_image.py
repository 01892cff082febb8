# SPDX-License-Identifier: Apache-2.0
"""An image with moto's server, as ``motoserver/moto`` is, made of this Python and its packages: CI can pull none."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.needs import lack
from pytest_nixl.processes.container import ContainerError, container_engine
from pytest_nixl.processes.supervisor import supervisor

IMAGE = "localhost/pytest-nixl-moto:test"
_LIBRARY = re.compile(r"(/\S+) \(0x")
_SERVICES = ("s3", "s3control", "ec2", "iam", "sts")
_LEFT_OUT = ("/site-packages", "/config-", "/test", "/idlelib", "/ensurepip", "/__pycache__")


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
    repository, tag = IMAGE.rsplit(":", 1)
    python, site = os.path.realpath(sys.executable), "/packages"
    command = [python, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000"]
    changes = [
        f"ENV PYTHONPATH={site}",
        f"ENV PYTHONHOME={sys.base_prefix}",
        "EXPOSE 5000",
        f"ENTRYPOINT {json.dumps(command)}",
    ]
    archive = supervisor().directory / "moto.tar"
    files = {python: Path(python)}
    files |= {name: path for path, name in (*_standard_library(), *_packages(site))}
    linked = [str(path) for name, path in files.items() if path.suffix == ".so" or name == python]
    found = subprocess.run(["ldd", *linked], capture_output=True, text=True, check=False).stdout
    files |= {os.path.normpath(library): Path(os.path.realpath(library)) for library in _LIBRARY.findall(found)}
    with tarfile.open(archive, "w") as tar:
        for name, path in files.items():
            tar.add(path, name, recursive=False)
    answer = engine.api.import_image_from_file(str(archive), repository=repository, tag=tag, changes=changes)
    archive.unlink()
    assert "sha256" in str(json.loads(answer.splitlines()[-1])), answer


def _standard_library() -> Iterator[tuple[Path, str]]:
    """Yield each file of the standard library, and its name in the image, which is its path."""
    for top in sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}):
        root = Path(sys.base_prefix, Path(top).relative_to(sys.prefix)) if top.startswith(sys.prefix) else Path(top)
        for path in sorted(root.rglob("*")):
            inner = f"/{path.relative_to(root)}"
            if path.is_file() and not any(f"{part}/" in inner or inner.startswith(part) for part in _LEFT_OUT):
                yield path, str(path)


def _packages(site: str) -> Iterator[tuple[Path, str]]:
    """Yield each file of moto and of what it needs, and its name in the image."""
    waiting, seen = [Requirement("moto[s3,server]")], set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        for needed in map(Requirement, distribution.requires or ()):
            extras = ({"extra": extra} for extra in ("", *wanted.extras))
            if needed.marker is None or any(map(needed.marker.evaluate, extras)):
                waiting.append(needed)
        for file in distribution.files or ():
            # The models of other services are most of botocore.
            other = file.parts[:2] == ("botocore", "data") and len(file.parts) > 3 and file.parts[2] not in _SERVICES
            if ".." not in file.parts and "__pycache__" not in file.parts and not other:
                path = Path(str(file.locate()))
                if path.is_file():
                    yield path, f"{site}/{file}"
