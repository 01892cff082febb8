# SPDX-License-Identifier: Apache-2.0
"""The texts of the documentation that come with the package: faults of checks, and errors by their text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pytest_nixl.core.texts import parse_texts, text_file
from pytest_nixl.session.suites import suites_folder


def shipped_text(name: str) -> dict[str, Any]:
    """Return a file of texts. Its commands are for a clone; without one they name the suites by ``--pyargs``.

    :param name: its name without ``.toml``.
    """
    text = text_file(name)
    if suites_folder().parent == Path(__file__).parents[1]:
        text = re.sub(r"\bpytest suites/(\w+)", r"pytest --pyargs pytest_nixl.suites.\1", text)
    return parse_texts(text)


def faults() -> list[dict[str, Any]]:
    """Return the faults that the checks find."""
    found: list[dict[str, Any]] = shipped_text("checks").get("fault", [])
    return found
