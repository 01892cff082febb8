# SPDX-License-Identifier: Apache-2.0
"""The shipped Dockerfile and the files that it copies, as a build's context."""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helpers.cli_run import ROOT

DOCKERFILE = "deploy/docker/Dockerfile"


def copied() -> list[str]:
    """Return the files and folders of a clone that the Dockerfile copies."""
    text = (ROOT / DOCKERFILE).read_text(encoding="utf-8")
    return [name for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE) for name in line.split()]


def context() -> io.BytesIO:
    """Return an archive of these files, and of the Dockerfile itself."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in [*copied(), DOCKERFILE]:
            archive.add(ROOT / name, name, filter=lambda each: None if "__pycache__" in each.name else each)
    buffer.seek(0)
    return buffer


@contextmanager
def build(
    engine: Any, base: str, tag: str | None = None, *, cached: bool = False, **arguments: str
) -> Iterator[tuple[str, str]]:
    """Build the Dockerfile without a network, and remove the images that this made at the end.

    :param engine: the client of the container engine.
    :param base: the image to which the layer is added.
    :param tag: a name of the built image.
    :param cached: whether steps of an earlier build, whose images are still there, are not made again.
    :param arguments: further arguments of the build.
    :yields: the error, empty for none, and everything that was printed.
    """
    import docker

    output = error = ""
    try:
        for part in engine.api.build(
            fileobj=context(), custom_context=True, dockerfile=DOCKERFILE, tag=tag, rm=True, forcerm=True,
            nocache=not cached, network_mode="none", buildargs={"BASE": base, **arguments}, decode=True,
        ):  # fmt: skip
            output += str(part.get("stream", ""))
            error += str(part.get("error", ""))
        yield error, output
    finally:
        base_id = engine.images.get(base).id.removeprefix("sha256:")
        printed = re.sub(r"---> Using cache\n ---> [0-9a-f]{12}", "", output)
        matches = [
            match
            for match in re.findall(r"---> ([0-9a-f]{12})$", printed, re.MULTILINE)
            if not base_id.startswith(match)
        ]
        for identity in reversed(matches):
            with contextlib.suppress(docker.errors.ImageNotFound):  # it went with the one that was made of it
                engine.images.remove(identity, force=True)
