# SPDX-License-Identifier: Apache-2.0
"""What went wrong, in one sentence, and what to do about it."""

from __future__ import annotations


class NixlPluginError(Exception):
    """A failure that is reported without a traceback.

    :param reason: one sentence: what failed, where, and why.
    :param remedy: one sentence: what to do next.
    :param detail: text that proves it, such as the last lines that a process wrote to its stderr.
    """

    #: Whether all that went wrong is that a deadline passed: on a busy machine that proves nothing.
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
    """What was waited for did not come before its deadline."""

    late = True


class NotApplicableError(NixlPluginError):
    """The question does not arise on this machine (no GPU, say): the test is skipped with this reason."""
