# SPDX-License-Identifier: Apache-2.0
"""What must hold before any test runs: the options of agents, and the checks that the profile requires."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.model.agent_options import AgentOptions
from pytest_nixl.model.settings import OPTIONS, Settings
from pytest_nixl.model.tools import own_variables
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.backends import BACKENDS
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import NixlError, WorkerError
from pytest_nixl.processes.worker_process import Worker
from pytest_nixl.session.outcome import check_of
from pytest_nixl.session.selection import ENDPOINTS, INFRASTRUCTURE, suite_of

if TYPE_CHECKING:
    from pytest_nixl.model.results import Result
    from pytest_nixl.session.run import Run


#: A line with an error of NIXL in a worker's output.
_NIXL_ERROR = re.compile(r"^E\d{4} [^]]*\] (.+)", re.MULTILINE)
#: The fields of the settings that are tried here. A progress thread needs no trial: every NIXL has one.
_TRIED = ("threads", "sync_mode", "backend_params")

#: The file with the checks of the etcd endpoints that this deployment uses.
DEPLOYMENT = "test_deployment.py"


def refuse_agent_options(settings: Settings) -> None:
    """Create an agent with each backend and the options of the run in a worker of this host.

    :raises pytest.UsageError: an agent can be created without the options, but not with them. If it cannot be created
        without them either, the checks say why.
    """
    options = replace(settings.agents[0], progress_thread=None)
    if options == AgentOptions():
        return
    for backend in settings.backend:
        if not options.variant(backend, BACKENDS[backend].PLUGIN) and options.sync_mode == "auto":
            continue
        if (fault := _fault(settings, backend, options)) and not _fault(settings, backend, AgentOptions()):
            raise pytest.UsageError(f"{' '.join(_typed_options(settings))}: {fault}")


def _typed_options(settings: Settings) -> Iterator[str]:
    """Yield the options that are not the default, as typed."""
    for item in OPTIONS:
        if item.field in _TRIED and settings.sources.get(item.field) != "default":
            yield f"{item.flag}={item.show(getattr(settings, item.field))}"


def _fault(settings: Settings, backend: str, options: AgentOptions) -> str:
    """Return in one sentence why an agent cannot be created; empty if it can."""
    worker: Worker | None = None
    try:
        variables = own_variables(settings.programs, memory=settings.memory)
        worker = LocalHost(supervisor(), own=variables).start(
            "agent", {"NIXL_ETCD_ENDPOINTS": None}, settings.timeout, settings.start_timeout
        )
        NixlAgent.within(worker, backends=[backend], progress_thread=False, agent_options=options)
    except NixlError as error:
        lines = _NIXL_ERROR.findall(worker.output()) if worker is not None else []
        return f"NIXL cannot create the backend {backend} with these options: {lines[0] if lines else error.type_name}"
    except WorkerError as error:
        return error.reason.partition(" (in ")[0]
    finally:
        if worker is not None:
            worker.kill()
    return ""


class Preconditions:
    """A pytest plugin that orders the tests of a run, and ends the run if a failed check makes the rest meaningless.

    The order is: the infrastructure checks that the profile requires, ``etcd-answers`` last; all checks of the etcd
    endpoints, if the profile requires one of them; the other infrastructure checks; all other tests. A required check
    of the first two groups that fails ends the run. An infrastructure check ends it at once. An endpoint check ends it
    after the last endpoint check, because only together they show what is wrong with an endpoint.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._session: pytest.Session | None = None
        #: Node ids in the order in which they run, and the number of those that have ended.
        self._order: list[str] = []
        self._ended = 0
        #: Node ids of the checks that end the run if they fail, and node ids of the endpoint checks.
        self._required: set[str] = set()
        self._endpoints: set[str] = set()
        #: The first required check that failed, and its reason; None: no such check failed.
        self._failed: tuple[str, str] | None = None

    @pytest.hookimpl(trylast=True)  # after every plugin that shuffles or deselects tests
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        run = self._run
        if not run.collected.used or run.parallel or not run.usable:
            return
        profile = load_profile(run.settings.profile)
        suites = {item.nodeid: suite_of(item.path) for item in items}
        checks = {item.nodeid: check_of(item) or "" for item in items}
        required = {id for id, check in checks.items() if check in profile.required}
        endpoints = {item.nodeid for item in items if suites[item.nodeid] == ENDPOINTS and item.path.name == DEPLOYMENT}
        if endpoints.isdisjoint(required):
            endpoints = set()
        self._required = {id for id in required if suites[id] == INFRASTRUCTURE or id in endpoints}
        self._endpoints = endpoints

        def place(item: pytest.Item) -> int:
            if item.nodeid in endpoints:
                return 1
            if suites[item.nodeid] == INFRASTRUCTURE:
                if item.nodeid not in required:
                    return 2
                # A run that lacks both NIXL and an etcd names NIXL.
                return 0 if checks[item.nodeid] == "etcd-answers" else -1
            return 3

        items.sort(key=place)  # a stable sort keeps the order within each group
        self._order = [item.nodeid for item in items]
        self._session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid in self._required and self._failed is None:
            result: Result | None = getattr(report, "nixl_result", None)
            check, reason = (result.check, result.reason) if result is not None else (report.nodeid, "")
            self._failed = check, reason or "see above"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._ended += 1
        remaining = len(self._order) - self._ended
        if self._session is None or self._failed is None or remaining < 1 or self._run.settings.keep_going:
            return
        if nodeid in self._endpoints and self._order[self._ended] in self._endpoints:
            return
        check, reason = self._failed
        tests = "1 test did not run" if remaining == 1 else f"{remaining} tests did not run"
        ended = (
            f"the run ended because the check {check!r} failed, which the profile {self._run.settings.profile!r} "
            f"requires: {tests}"
        )
        self._run.record.end(ended)
        self._session.shouldfail = f"{ended}; {reason}"
