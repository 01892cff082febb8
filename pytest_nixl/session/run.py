# SPDX-License-Identifier: Apache-2.0
"""The run in one pytest process: what is asked of it, and the way to what it collected and found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import pytest

from pytest_nixl.cluster.placement import ALONE, ask
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.signals import sigterm_ends_in_order
from pytest_nixl.session.given_options import hider_of
from pytest_nixl.session.live_record import LiveRecord
from pytest_nixl.session.options import uses_options
from pytest_nixl.session.requested_links import requested_links
from pytest_nixl.session.settings import read_settings

if TYPE_CHECKING:
    from pytest_nixl.cluster.placement import Placement
    from pytest_nixl.cluster.rank_session import RankSession
    from pytest_nixl.model.row_key import RowKey
    from pytest_nixl.model.settings import Settings

RUN = pytest.StashKey["Run"]()
_RANK_SESSION: pytest.StashKey[RankSession] = pytest.StashKey()


@dataclass
class Collected:
    """Which of the collected tests concern the plugin, even if they were deselected later.

    :param used: whether a test that uses the plugin was selected.
    :param checks: whether a test that makes a check was collected.
    :param suites: the suites of which a test was collected.
    :param places: by node id the place of each test in the order of collection, which another plugin may shuffle.
    """

    used: bool = False
    checks: bool = False
    suites: set[str] = field(default_factory=set)
    places: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Run:
    """A run in this pytest process. What is asked of it is computed on first use and does not change."""

    config: pytest.Config
    collected: Collected = field(default_factory=Collected)

    @classmethod
    def of(cls, config: pytest.Config) -> Run:
        """Return the run that ``config`` belongs to; create it if necessary."""
        if RUN not in config.stash:
            config.stash[RUN] = cls(config)
        return config.stash[RUN]

    @cached_property
    def settings(self) -> Settings:
        """The settings, read on first use. :raises pytest.UsageError: if one of them is bad."""
        return read_settings(self.config)

    @cached_property
    def configured(self) -> bool:
        """Whether an option or ini value of the plugin is given, so that a bad value ends the run at once."""
        return uses_options(self.config)

    @property
    def parallel(self) -> bool:
        """Whether this is a worker of pytest-xdist."""
        return hasattr(self.config, "workerinput")

    @property
    def usable(self) -> bool:
        """Whether all settings are valid."""
        try:
            return bool(self.settings and self.placement)
        except pytest.UsageError:
            return False

    @property
    def placement(self) -> Placement:
        """The ranks of this run. :raises pytest.UsageError: if options and launcher contradict each other."""
        return self._placement if self._for_us else ALONE

    @cached_property
    def _placement(self) -> Placement:
        return ask(self.settings)

    @property
    def links(self) -> list[RowKey]:
        """The requested links, each as the key of one of its rows. :raises pytest.UsageError: if a setting is bad."""
        return requested_links(self.settings, self.placement)

    @property
    def in_cluster(self) -> bool:
        """Whether this process is one of several ranks. A run that does not use the plugin never reads the settings."""
        return self._for_us and self.usable and self.placement.several

    @property
    def rank_session(self) -> RankSession | None:
        """The membership of this process in a group of several ranks; None: it is alone, or has not joined yet."""
        return self.config.stash.get(_RANK_SESSION, None)

    def join(self, rank_session: RankSession) -> None:
        """Make this process one of several ranks."""
        self.config.stash[_RANK_SESSION] = rank_session

    @property
    def serves(self) -> bool:
        """Whether this process is a peer, which serves rank 0 and runs no tests itself."""
        return self.rank_session is not None and not self.rank_session.drives

    @cached_property
    def hide(self) -> Callable[[str], str]:
        """Hides the secrets of this run in a text. Every result, note and traceback passes through it."""
        return hider_of(self.config)

    @cached_property
    def record(self) -> LiveRecord:
        """What the run found so far."""
        return LiveRecord(self.hide)

    @property
    def _for_us(self) -> bool:
        return self.configured or self.collected.checks


def exit_code(config: pytest.Config) -> int | None:
    """Return pytest's exit code so far; None: it has no session."""
    session = config.pluginmanager.get_plugin("session")
    return None if session is None else int(session.exitstatus)


@contextmanager
def settings_in_use(config: pytest.Config) -> Iterator[Settings]:
    """Yield the settings of a run; meanwhile SIGTERM ends pytest like Ctrl-C, so that fixtures are torn down.

    :raises NixlPluginError: they are refused.
    """
    try:
        settings = Run.of(config).settings
    except pytest.UsageError as error:
        raise NixlPluginError(str(error)) from None
    with sigterm_ends_in_order():
        yield settings
