# SPDX-License-Identifier: Apache-2.0
"""A run whose hooks are called by a test: what they call are doubles, which keep their calls in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from pytest_nixl import run_hooks
from pytest_nixl.run_hooks import RunHooks
from pytest_nixl.session.run import Collected

#: What the hooks import and use as it is; doubles take the place of all else.
REAL = ("EtcdError", "Result", "SupervisorError", "printable")


class Scene:
    """A run, and what is called during it.

    :ivar log: the doubles, which keep their calls in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = MagicMock()
        for name, value in list(vars(run_hooks).items()):
            module = getattr(value, "__module__", None) or ""
            if module.startswith("pytest_nixl.") and module != run_hooks.__name__ and name not in REAL:
                monkeypatch.setattr(run_hooks, name, getattr(self.log, name))
        monkeypatch.setattr(run_hooks, "etcd_container", self.log.etcd_container)
        monkeypatch.setattr(run_hooks, "cluster_hooks", self.log)
        self.log.BriefOutput.name, self.log.RowProgress.name = "brief", "progress"
        self.log.load_profile.return_value = self.profile = SimpleNamespace(
            required=["a", "b"], expectations=["c"], path_or_origin="its path"
        )
        self.log.missing_results.return_value = self.log.unchecked_requests.return_value = ["missing"]
        self.log.failing_results.return_value = []
        self.log.completeness_of.return_value.interruption.return_value = ""
        self.config = MagicMock()
        self.config.option.collectonly = self.config.option.no_header = False
        self.config.get_verbosity.return_value = 0
        settings = SimpleNamespace(
            gate=False, judged_by=(), profile="a profile", store="", etcd_server="embedded", etcd_image="an image"
        )
        self.run: Any = SimpleNamespace(
            config=self.config,
            settings=settings,
            collected=Collected(),
            usable=True,
            configured=False,
            parallel=False,
            serves=False,
            in_cluster=False,
            rank_session=None,
            placement=SimpleNamespace(several=False),
            links=["a link"],
            record=self.log.record,
        )
        self.run.record.results, self.run.record.interrupted, self.run.record.ended = (), "", ""
        self.log.record.interrupt.side_effect = self.interrupt
        self.session: Any = SimpleNamespace(config=self.config, exitstatus=0, items=[])
        monkeypatch.setattr(run_hooks, "Run", SimpleNamespace(of={self.config: self.run}.__getitem__))

    def interrupt(self, how_far: str) -> None:
        self.run.record.interrupted = self.run.record.interrupted or how_far

    def hooks(self) -> RunHooks:
        """Return the hooks; the log begins after they were made."""
        hooks = RunHooks(self.run)
        self.log.reset_mock()
        return hooks

    def set(self, **values: Any) -> None:
        """Set values of the run, its settings, its record, the session or the options of pytest, by their names."""
        for name, value in values.items():
            owners = (self.run, self.run.settings, self.session)
            owner: Any = next((owner for owner in owners if name in vars(owner)), None)
            if owner is None:
                owner = self.run.record if name in ("results", "interrupted", "ended") else self.config.option
            setattr(owner, name, value)
