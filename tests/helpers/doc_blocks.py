# SPDX-License-Identifier: Apache-2.0
"""The fenced blocks of README, CONTRIBUTING and docs, and what is said above each: whether a test runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.cli_run import ROOT

#: Languages of blocks that hold commands. A comment above each such block says whether a test runs it.
COMMANDS = frozenset({"console", "sh", "bash", "dockerfile"})
_BLOCK = re.compile(r"(?:^<!--([^\n]*)-->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RUN = re.compile(r"run(?:, exit code (\d)(?: or (\d))?)?")
_NOT_RUN = re.compile(r"not run: (.{10,})")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    :param page: path from the root of the clone.
    :param number: its place on the page, from 1.
    :param comment: the HTML comment on the line above; empty: there is none.
    """

    page: str
    number: int
    language: str
    text: str
    comment: str

    @property
    def is_command(self) -> bool:
        """Whether it holds commands for a shell."""
        return self.language in COMMANDS

    @property
    def runs(self) -> bool:
        """Whether the comment says that a test runs it."""
        return _RUN.fullmatch(self.comment) is not None

    @property
    def codes(self) -> tuple[int, ...]:
        """Exit codes that are right for it."""
        match = _RUN.fullmatch(self.comment)
        assert match is not None
        return tuple(int(code) for code in match.groups() if code) or (0,)

    @property
    def why_not(self) -> str:
        """Why no test runs it; empty: the comment gives no reason."""
        match = _NOT_RUN.fullmatch(self.comment)
        return match[1] if match else ""

    def __str__(self) -> str:
        return f"{self.page.removesuffix('.md')}-{self.number}"


def pages(root: Path = ROOT) -> list[Path]:
    """Return every page that a user or contributor reads."""
    named = [root / name for name in ("README.md", "CONTRIBUTING.md")]
    return [*(page for page in named if page.is_file()), *sorted((root / "docs").rglob("*.md"))]


def blocks(root: Path = ROOT) -> Iterator[Block]:
    """Yield every fenced block of every page."""
    for page in pages(root):
        for number, match in enumerate(_BLOCK.finditer(page.read_text(encoding="utf-8")), 1):
            comment, language, text = match.groups()
            yield Block(str(page.relative_to(root)), number, language, text, (comment or "").strip())
