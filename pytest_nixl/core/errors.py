# SPDX-License-Identifier: Apache-2.0
"""Base classes of all errors: one sentence about the failure, and one remedy."""

from __future__ import annotations


class NixlPluginError(Exception):
    """A failure that is reported without a traceback.

    :param reason: one sentence: what failed, where and why.
    :param remedy: one sentence: what to do next.
    :param detail: evidence, such as the last lines that a process wrote to stderr.
    """

    #: Whether the only fault is that a deadline passed. On a busy machine that proves nothing.
    late: bool = False

    def __init__(self, reason: str, remedy: str = "", detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.detail = detail

    def __str__(self) -> str:
        parts = [self.reason]
        if self.remedy:
            parts.append(f"remedy: {self.remedy}")
        if self.detail:
            parts.append(self.detail)
        return "\n".join(parts)


class LateError(NixlPluginError):
    """An awaited event did not happen before its deadline."""

    late = True


class GpuMemoryError(NixlPluginError):
    """A GPU does not have enough free memory."""


class NotApplicableError(NixlPluginError):
    """The check does not apply to this machine (for example, it has no GPU). The test is skipped with this reason."""
