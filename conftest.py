# SPDX-License-Identifier: Apache-2.0
"""In a clone: the plugin also where it is not installed, and pytester for our own tests."""

from __future__ import annotations

import sys

# An installed plugin has been loaded by its entry point when this file is read.
pytest_plugins = ["pytester"] if "pytest_nixl.plugin" in sys.modules else ["pytester", "pytest_nixl.plugin"]
