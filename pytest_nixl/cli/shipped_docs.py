# SPDX-License-Identifier: Apache-2.0
"""The texts of the documentation that come with the package: faults of checks, and errors by their text."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from pytest_nixl.session.suites import suites_folder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def shipped_text(name: str) -> dict[str, Any]:
    """Return a file of texts: the wheel has it in the package, a clone in ``docs``; empty: the package is alone.

    Its commands are for a clone. Where the package is installed without one, they name the suites by ``--pyargs``.

    :param name: its name without ``.toml``.
    """
    package = Path(__file__).parents[1]
    inside = package / "docs" / f"{name}.toml"
    path = inside if inside.is_file() else package.parent / "docs" / "reference" / f"{name}.toml"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if suites_folder().parent == package:
        text = re.sub(r"\bpytest suites/(\w+)", r"pytest --pyargs pytest_nixl.suites.\1", text)
    return tomllib.loads(text)


def faults() -> list[dict[str, Any]]:
    """Return the faults that the checks find."""
    found: list[dict[str, Any]] = shipped_text("checks").get("fault", [])
    return found
