# SPDX-License-Identifier: Apache-2.0
"""The ways in which a worker fails."""

from __future__ import annotations

from pytest_nixl.core.errors import NixlPluginError

#: The remedy if a worker on another rank gives an answer that this version does not expect.
SAME_VERSION = "install the same pytest-nixl on every rank"


class WorkerError(NixlPluginError):
    """A worker died, hung, or could not run a command."""

    @property
    def ending(self) -> str:
        """How the worker ended, without its name and its step; the whole reason if that is not known."""
        return self.reason.partition(") ")[2].partition(" during ")[0] or self.reason


class WorkerDiedError(WorkerError):
    """The worker's process ended, but pytest had not ended it."""

    #: The last line that it wrote before what Python or UCX writes of a crash; empty if it wrote none.
    last_line: str = ""

    @property
    def with_last_line(self) -> str:
        """The reason with the last line, if there is one."""
        return f"{self.reason}; its last line: {self.last_line}" if self.last_line else self.reason


class GpuFullError(WorkerError):
    """A GPU of the worker does not have enough free memory for a buffer."""


class NixlAbsentError(WorkerError):
    """NIXL cannot be loaded in a worker; nor can it in the next one of that rank."""


class WorkerHungError(WorkerError):
    """The worker missed its deadline, and pytest ended it."""

    late = True


class WorkerLateError(WorkerError):
    """The worker stopped a step at its deadline, and still runs."""

    late = True


class NixlError(WorkerError):
    """NIXL reported an error.

    :param type_name: NIXL's error class, such as ``nixlNotFoundError``.
    """

    def __init__(self, reason: str, remedy: str, detail: str, type_name: str) -> None:
        super().__init__(reason, remedy, detail)
        self.type_name = type_name
