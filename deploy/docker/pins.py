# SPDX-License-Identifier: Apache-2.0
"""What is installed in an image, as pip's constraints; with ``--unchanged FILE``: is all of that there as it was?"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

#: What pip takes for a version. Another one, as distributions give some of their own packages, is written as a comment.
_VERSION = re.compile(r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9.]+)?")


def installed() -> dict[str, str]:
    """Return the version of each package by its normalized name; the first one on sys.path counts."""
    found: dict[str, str] = {}
    for each in distributions():
        name, version = each.metadata["Name"], each.metadata["Version"]
        if name and version:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return found


def pins() -> list[str]:
    """Return a line for each package."""
    versions = sorted(installed().items())
    return [f"{'' if _VERSION.fullmatch(version) else '# '}{name}=={version}" for name, version in versions]


def main(arguments: list[str]) -> int:
    """Print pins, or compare with those of a file: 0 where nothing has changed, 1 where something has."""
    if arguments[:1] != ["--unchanged"]:
        print(*pins(), sep="\n")
        return 0
    lost = sorted(set(Path(arguments[1]).read_text(encoding="utf-8").splitlines()) - set(pins()))
    if lost:
        print(f"this layer has replaced or removed {', '.join(lost)}", file=sys.stderr)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
