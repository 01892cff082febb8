# SPDX-License-Identifier: Apache-2.0
"""Where the documentation describes a check or a finding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata

from pytest_nixl.model.findings import FINDINGS
from pytest_nixl.model.results import Result
from pytest_nixl.session.suites import suite_checks

#: The name in ``[project.urls]`` of the address of the site.
_URL_NAME = "Documentation"


@dataclass(frozen=True)
class DocsLink:
    """A section of the documentation.

    :param page: its file in the clone and its anchor, such as ``docs/reference/checks.md#memlock``.
    :param address: its address on the site; empty: the distribution names no site.
    """

    page: str
    address: str


def docs_of(results: Sequence[Result]) -> list[DocsLink]:
    """Return the sections for the findings and checks of results, each once. A check of another package has none."""
    checks = {check.id for check in suite_checks()}
    sections: dict[tuple[str, str], None] = {}
    for result in results:
        if result.finding in FINDINGS:
            sections["findings", result.finding.lower()] = None
        if result.check in checks:
            sections["checks", result.check] = None
    return [_link(page, anchor) for page, anchor in sections]


def _link(page: str, anchor: str) -> DocsLink:
    site = _site()
    address = f"{site.rstrip('/')}/reference/{page}.html#{anchor}" if site else ""
    return DocsLink(f"docs/reference/{page}.md#{anchor}", address)


def _site() -> str:
    """Return the address of the site that the installed distribution names; empty: it names none."""
    try:
        urls = metadata("pytest-nixl").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    address = dict(url.split(", ", 1) for url in urls if ", " in url).get(_URL_NAME, "")
    return address if address.startswith(("https://", "http://")) else ""
