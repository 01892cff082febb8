# SPDX-License-Identifier: Apache-2.0
"""The shipped Dockerfile, built whole by a real engine on an image with Python and NIXL, and then run."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.dockerfile import build
from helpers.needs import lack
from helpers.python_image import PYTHON, import_image, packages, python
from packaging.requirements import Requirement

from pytest_nixl.processes.container import ContainerError, container_engine

pytestmark = pytest.mark.long

BASE, BUILT = "localhost/pytest-nixl-base:test", "localhost/pytest-nixl-layer:test"
#: pip finds the packages that it installs there, because builds have no network.
WHEELS = "/wheels"
PROGRAMS = ("sh", "ls", "rm", "env")
#: A third of the bytes, which no step reads: modules of NIXL for several versions of torch, and tests of numpy.
LEFT_OUT = re.compile(r"/nixl_ep_cpp_torch|/numpy/.*/tests/")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine that has the image ``BASE``: Python, pip, numpy, NIXL, and the wheels that the layer needs."""
    try:
        with container_engine() as results:
            results.api.timeout = 600  # a busy machine takes long to remove images
            wheels = tmp_path_factory.mktemp("wheels")
            download(wheels)
            site = sysconfig.get_path("purelib", vars={"base": sys.base_prefix, "platbase": sys.base_prefix})
            nixl = [
                distribution.name
                for distribution in importlib.metadata.distributions()
                if distribution.name.startswith("nixl")
            ]
            files = dict([*python(), *packages(["pip", "numpy", *nixl], site)])
            files = {name: path for name, path in files.items() if not LEFT_OUT.search(name)}
            files |= {f"/bin/{name}": Path(os.path.realpath(shutil.which(name) or "")) for name in PROGRAMS}
            files |= {name: Path(name) for name in ("/etc/passwd", "/etc/group")}
            files |= {f"{WHEELS}/{path.name}": path for path in wheels.iterdir()}
            search = f"/bin:{Path(PYTHON).parent}"
            changes = [f"ENV PATH={search}", f"ENV PIP_FIND_LINKS={WHEELS}", "ENV PIP_NO_INDEX=1", "ENV HOME=/tmp"]
            import_image(results, BASE, files, changes)
            yield results
            results.images.remove(BASE, force=True)
    except ContainerError as error:
        lack(f"a container engine: {error.reason}")


def download(folder: Path) -> None:
    """Download what the layer installs, and what builds its wheel."""
    expected = [Requirement(text) for text in importlib.metadata.requires("pytest-nixl") or ()]
    messages = [
        f"{message.name}{message.specifier}"
        for message in expected
        if message.marker is None or message.marker.evaluate({"extra": "embedded"})
    ]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run([*command, *messages, "setuptools>=77", "wheel"], check=True)


@pytest.fixture(scope="module")
def built(engine: Any) -> Iterator[str]:
    """The image ``BUILT``; yields what was printed."""
    with build(engine, BASE, BUILT, PYTHON=PYTHON, EXTRAS="embedded", BACKENDS="UCX") as (error, output):
        assert not error, output[-3000:]
        yield output


def test_the_layer_is_built_checked_and_run(engine: Any, built: str) -> None:
    assert re.search(r"^NIXL doctor: PASS", built.rpartition("doctor --image --gate")[2], re.MULTILINE)
    # The smoke test: the suites in a container, with the NIXL of the image and an etcd of the layer.
    command = [
        PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "pytest_nixl.suites", "--nixl-level=quick",
        "--nixl-gate", "--nixl-backend=UCX", "--nixl-profile=loopback", "--nixl-op=WRITE", "--nixl-blocks=64KiB",
        "-k", "test_bandwidth or test_machine or loads or etcd_answers or finds_another or well_formed",
    ]  # fmt: skip
    run = engine.containers.create(BUILT, command, network_mode="none", cap_add=["SYS_PTRACE"], shm_size="1g")
    try:
        run.start()
        code = run.wait(timeout=600)["StatusCode"]
        output = run.logs().decode()
    finally:
        run.remove(force=True)
    # A row that other tests disturb may be undecided, and then the gate is not passed. Nothing else may be wrong.
    remainder = "WARN|INCONCLUSIVE|NOT-APPLICABLE"
    match = re.search(rf"^NIXL gate: .* \(\d+ PASS((?:, \d+ (?:{remainder}))*); 1 row measured", output, re.MULTILINE)
    assert match is not None, output[-6000:]
    assert code == ("INCONCLUSIVE" in match[1]), output[-6000:]


def test_a_build_ends_if_the_image_lacks_a_library(engine: Any, built: str) -> None:
    """The steps before the check are those of the image that was built."""
    with build(engine, BASE, cached=True, PYTHON=PYTHON, EXTRAS="embedded", BACKENDS="UCX,LIBFABRIC") as (
        error,
        output,
    ):
        assert output.count("Using cache") > 15, output
        assert error.endswith("returned a non-zero code: 1")
        last = output.rpartition("doctor --image --gate")[2]
        assert re.search(r"^FAIL +plugin-libraries .*libfabric\.so\.1, which libplugin_LIBFABRIC", last, re.MULTILINE)
        assert re.search(r"^NIXL doctor: FAIL", last, re.MULTILINE)
