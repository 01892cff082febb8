# SPDX-License-Identifier: Apache-2.0
"""The lowest versions that ``pyproject.toml`` declares, as a list for pip: the only place that names them is that file.

``python minimum_versions.py FILE`` writes the list, for ``tox -e lowest``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
#: What is tested at its lowest besides what is always installed.
EXTRAS = ("compare",)
_DECLARED = re.compile(r"(?P<name>[A-Za-z0-9._-]+)>=(?P<version>[0-9][0-9.]*)(?P<marker> *;.*)?")


def lowest(project: dict[str, Any]) -> list[str]:
    """Return ``NAME==VERSION`` for each dependency of a project, with its marker.

    :raises ValueError: where one declares no lowest version, or something else besides.
    """
    declared = [*project["dependencies"]]
    for extra in EXTRAS:
        declared += project["optional-dependencies"][extra]
    pins = []
    for text in declared:
        match = _DECLARED.fullmatch(text)
        if match is None:
            raise ValueError(f"pyproject.toml declares {text!r}: write NAME>=VERSION, so that VERSION is tested")
        pins.append(f"{match['name']}=={match['version']}{match['marker'] or ''}")
    return pins


def project() -> dict[str, Any]:
    """Return what ``pyproject.toml`` says of the project."""
    document: dict[str, Any] = tomllib.loads(PYPROJECT.read_text())["project"]
    return document


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(f"{pin}\n" for pin in lowest(project())))
