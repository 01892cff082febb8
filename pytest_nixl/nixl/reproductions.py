# SPDX-License-Identifier: Apache-2.0
"""The scripts beside the documentation that reproduce findings with NIXL alone."""

from __future__ import annotations

from pathlib import Path


def reproduction(finding: str) -> str | None:
    """Return the script that reproduces a finding; None if there is none."""
    package = Path(__file__).parents[1]
    # The wheel has the scripts in the package, a clone in docs/reproductions.
    folders = (package / "docs" / "reproductions", package.parent / "docs" / "reproductions")
    scripts = (folder / f"{finding.lower().replace('-', '_')}.py" for folder in folders)
    return next((script.read_text(encoding="utf-8") for script in scripts if script.is_file()), None)
