# SPDX-License-Identifier: Apache-2.0
"""Scripts that reproduce findings with NIXL alone. ``pytest-nixl findings ID --reproduce`` prints one."""

from __future__ import annotations

from pathlib import Path


def reproduction(finding: str) -> str | None:
    """Return the script that reproduces a finding; None if there is none."""
    script = Path(__file__).parent / f"{finding.lower().replace('-', '_')}.py"
    return script.read_text(encoding="utf-8") if script.is_file() else None
