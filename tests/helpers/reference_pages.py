# SPDX-License-Identifier: Apache-2.0
"""The script that generates the pages of the reference, as a module."""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

from helpers.cli_run import ROOT

SCRIPT, REFERENCE = ROOT / "docs" / "generate.py", ROOT / "docs" / "reference"


@functools.cache
def generator() -> Any:
    """Return ``docs/generate.py`` as a module."""
    spec = importlib.util.spec_from_file_location("generate", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    sys.path.insert(0, str(SCRIPT.parent))  # of the modules that it imports
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    # Reading all of the code takes three seconds.
    vars(module)["variables_read"] = functools.cache(vars(module)["variables_read"])
    return module
