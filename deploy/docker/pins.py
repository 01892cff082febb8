# SPDX-License-Identifier: Apache-2.0
"""Print the packages of an image as pip's constraints; with ``--unchanged FILE``, check that none has changed."""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

#: The versions that pip accepts. Some packages of distributions have another form; these are written as comments.
_VERSION = re.compile(r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9.]+)?")


def installed() -> dict[str, str]:
    """Return the version of each package by its normalized name; the first one on sys.path counts."""
    versions: dict[str, str] = {}
    for distribution in distributions():
        name, version = distribution.metadata["Name"], distribution.metadata["Version"]
        if name and version:
            versions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return versions


def pins() -> list[str]:
    """Return one constraint for each package."""
    versions = sorted(installed().items())
    return [f"{'' if _VERSION.fullmatch(version) else '# '}{name}=={version}" for name, version in versions]


def main(arguments: list[str]) -> int:
    """Print the pins, or compare them with those of a file; return 0 if none has changed, else 1."""
    if arguments[:1] != ["--unchanged"]:
        print(*pins(), sep="\n")
        return 0
    lost = sorted(set(Path(arguments[1]).read_text(encoding="utf-8").splitlines()) - set(pins()))
    if lost:
        print(f"this layer replaced or removed {', '.join(lost)}", file=sys.stderr)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
