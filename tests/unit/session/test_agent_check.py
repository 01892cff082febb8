# SPDX-License-Identifier: Apache-2.0
"""A bad option of agents ends the run before a test, in one sentence: with the real NIXL, and with doubles of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.pytester_run import run_pytest

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.model.agent_options import AgentOptions, BackendParameter, ThreadCounts
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.tools import own_variables
from pytest_nixl.processes.worker_errors import NixlError, WorkerError
from pytest_nixl.session.preconditions import refuse_agent_options

MakeSettings = Callable[..., Settings]


def parameter(name: str, value: str) -> dict[str, Any]:
    sources = {"threads": "default", "sync_mode": "default", "backend_params": "option"}
    return {"backend_params": (BackendParameter("UCX", name, value),), "sources": sources}


class Workers:
    """A double of this host: what its workers write, and the error with which agents with options are not created.

    :param always: whether none is created without options either.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, error: NixlPluginError | None = None, output: str = "", *, always: bool = False
    ) -> None:
        self.calls: list[object] = []
        self._error, self._output, self._always = error, output, always
        for name, value in (("supervisor", lambda: "supervisor"), ("LocalHost", self.host), ("NixlAgent", self)):
            patch.setattr(f"pytest_nixl.session.preconditions.{name}", value)

    def host(self, supervisor: str, **own: object) -> Any:
        self.calls.append((supervisor, own))
        return SimpleNamespace(start=self.start)

    def start(self, *arguments: object) -> Any:
        self.calls.append(arguments)
        return SimpleNamespace(output=lambda: self._output, kill=lambda: self.calls.append("killed"))

    def within(self, _: object, **arguments: Any) -> None:
        self.calls.append(arguments)
        if self._error is not None and (self._always or arguments["agent_options"] != AgentOptions()):
            raise self._error


REFUSED = NixlError("NIXL refused it", "do it", "", "nixlBackendError")
CANNOT = "NIXL cannot create the backend UCX with these options: "


@pytest.mark.parametrize(
    ("error", "output", "reason"),
    [
        (REFUSED, "", f"{CANNOT}nixlBackendError"),
        (REFUSED, "I1127 10:00 a.cpp:1] fine\nE1127 10:00 a.cpp:2] no [a] thing \nE1127 10:00 b.cpp:3] nor this\n",
         f"{CANNOT}no [a] thing "),
        (REFUSED, "a line with E1127 10:00 a.cpp:2] in it\nE112 10:00 a.cpp:2] short\nE1127 10:00 a.cpp:2] \n",
         f"{CANNOT}nixlBackendError"),
        (WorkerError("the worker died (in step 2) (in step 1)"), "", "the worker died"),
    ],
)  # fmt: skip
def test_options_are_refused_if_an_agent_can_be_created_without_them_only(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, error: NixlPluginError, output: str, reason: str
) -> None:
    settings = make_settings(**parameter("a", "1"))
    workers = Workers(monkeypatch, error, output)
    with pytest.raises(pytest.UsageError) as refused:
        refuse_agent_options(settings)
    assert str(refused.value) == f"--nixl-backend-params=UCX:a=1: {reason}"
    start = "agent", {"NIXL_ETCD_ENDPOINTS": None}, settings.timeout, settings.start_timeout
    assert workers.calls == [
        call for options in (settings.agents[0], AgentOptions())
        for call in (("supervisor", {"own": own_variables({})}), start,
                     {"backends": ["UCX"], "progress_thread": False, "agent_options": options}, "killed")
    ]  # fmt: skip
    Workers(monkeypatch, error, output, always=True)
    refuse_agent_options(settings)


@pytest.mark.parametrize(
    ("changes", "tried"),
    [
        ({}, []),
        ({"progress_thread": ("on",)}, []),  # every NIXL has one
        ({"backend": ("POSIX", "UCX"), "threads": ThreadCounts(2, 0)}, ["UCX"]),
        ({"backend": ("POSIX", "UCX"), "sync_mode": "none"}, ["POSIX", "UCX"]),
        ({"backend": ("POSIX",), **parameter("a", "1")}, []),
    ],
    ids=["defaults", "progress-thread", "threads", "sync-mode", "of-another-backend"],
)
def test_each_backend_that_an_option_concerns_is_tried(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], tried: list[str]
) -> None:
    workers = Workers(monkeypatch)
    refuse_agent_options(make_settings(**changes))
    assert [call["backends"] for call in workers.calls if isinstance(call, dict)] == [[name] for name in tried]


def test_all_typed_options_are_named(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    Workers(monkeypatch, REFUSED)
    sources = {"threads": "option", "sync_mode": "default", "backend_params": "ini", "blocks": "option"}
    changes = {**parameter("a", "1"), "threads": ThreadCounts(2, 0), "sync_mode": "strict", "sources": sources}
    with pytest.raises(pytest.UsageError, match=r"^--nixl-threads=2:0 --nixl-backend-params=UCX:a=1: NIXL cannot"):
        refuse_agent_options(make_settings(**changes))


@pytest.mark.long
def test_a_value_that_the_backend_refuses_is_reported_in_its_words(make_settings: MakeSettings) -> None:
    with pytest.raises(
        pytest.UsageError, match=r"NIXL cannot create the backend UCX with these options: .*'many'.* num_workers"
    ):
        refuse_agent_options(make_settings(**parameter("num_workers", "many")))


@pytest.mark.long
def test_the_run_ends_before_its_first_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(nixl_settings): pass")
    result = run_pytest(pytester, "--nixl-backend-params=UCX:banana=1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --nixl-backend-params=UCX:banana=1: UCX of NIXL * has no parameter 'banana'*"])
    assert "passed" not in result.stdout.str()
