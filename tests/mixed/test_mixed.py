# SPDX-License-Identifier: Apache-2.0
"""Two ranks with different NIXL releases work together, or the error names both releases.

``PYTEST_NIXL_OTHER`` is a folder with another release, which ``tox -e mixed`` and ``tox -e nixl101`` install.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.measure.launches import Launches
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.nixl_releases import numbers
from pytest_nixl.model.settings import Settings
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import NixlError, WorkerError
from pytest_nixl.processes.worker_process import Process
from pytest_nixl.session.benchmark import versions_of

OTHER = os.environ["PYTEST_NIXL_OTHER"]
THEIRS = next(
    distribution.version
    for distribution in importlib.metadata.distributions(path=[OTHER])
    if distribution.name == "nixl-cu12"
)
OURS = importlib.metadata.version("nixl-cu12")
DRAM = MemoryPair("DRAM", "DRAM")
#: Whether both releases meet on one host: with NIXL 1.0.1 the UCX of one of three such pairs finds a way.
MEET = numbers(OURS) >= (1, 4)
Places = tuple[LocalHost, LocalHost]


class OtherRelease(LocalHost):
    """A rank whose NIXL is the other release."""

    def _new_process(self, role: str, environment: Mapping[str, str | None], start_timeout: float) -> Process:
        """Start a worker that finds the other release first."""
        path = os.pathsep.join(filter(None, (OTHER, os.environ.get("PYTHONPATH"))))
        return super()._new_process(role, {**environment, "PYTHONPATH": path}, start_timeout)


@pytest.fixture(params=["we write", "they write"])
def places(request: pytest.FixtureRequest) -> Places:
    """Return the installed release and the other one, in both orders."""
    if request.param == "we write":
        return LocalHost(supervisor(), 0), OtherRelease(supervisor(), 1)
    return OtherRelease(supervisor(), 0), LocalHost(supervisor(), 1)


@pytest.fixture
def make(places: Places, make_settings: Callable[..., Settings]) -> Iterator[Callable[..., Launches]]:
    """Create pairs with the two releases, which end with the test."""
    opened: list[Launches] = []

    def make(**changes: Any) -> Launches:
        opened.append(Launches(places, make_settings(**changes)))
        return opened[-1]

    yield make
    for pairs in opened:
        pairs.close()


@pytest.mark.skipif(MEET, reason=f"NIXL {OURS} loads without torch")
def test_release_that_imports_torch_is_refused_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    # A worker looks where pytest does.
    without = [entry for entry in sys.path if not Path(spec.origin).is_relative_to(entry or Path.cwd())]
    monkeypatch.setattr(sys, "path", without)
    worker = LocalHost(supervisor(), 0).start("agent", {"PYTHONPATH": None}, 30.0)
    with pytest.raises(NixlPluginError, match=f"nixl-cu12 {OURS} imports torch"):
        worker.call("free_port")
    worker.kill()


@pytest.mark.parametrize(
    ("op", "tls"), [("WRITE", "tcp"), ("READ", "tcp"), ("WRITE", None)] if MEET else [("WRITE", None)]
)
def test_releases_work_together_or_both_are_named(
    make: Callable[..., Launches], monkeypatch: pytest.MonkeyPatch, op: str, tls: str | None
) -> None:
    if tls is None:
        monkeypatch.delenv("UCX_TLS", raising=False)
    else:
        monkeypatch.setenv("UCX_TLS", tls)
    pairs = make(**({} if MEET else {"timeout": 20.0}))
    error = None
    try:
        link = pairs.link("UCX", op, DRAM)
        samples = link.measure(65536)
    except WorkerError as caught:
        error = caught
    if error is not None:
        assert not MEET, error
        for version in (OURS, THEIRS):
            assert f"has nixl-cu12 {version} (UCX " in error.reason
        assert "which may be the cause" in error.reason
        assert "same release of NIXL on all ranks" in error.remedy
        return
    assert samples.corruption is None
    assert samples.bandwidth > 0
    assert not MEET or samples.transports[0].split("/")[0] in ({"tcp"} if tls else {"cma", "posix", "sysv"})
    versions = versions_of(link.initiator, link.target)
    assert {versions["nixl"], versions["target_nixl"]} == {OURS, THEIRS}


def test_remedy_for_unreadable_metadata_names_another_release(agents: Any) -> None:
    agent = agents.start("reader")
    with pytest.raises(NixlError, match="nixlMismatchError") as caught:
        agent.add_remote_agent(b"garbage of another release")
    assert "another release of NIXL" in caught.value.remedy
