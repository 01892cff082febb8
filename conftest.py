# SPDX-License-Identifier: Apache-2.0
"""Load the plugin in a clone where it is not installed, and pytester for the tests of the plugin."""

from __future__ import annotations

import sys

# If the plugin is installed, its entry point has loaded it before this file is read.
pytest_plugins = ["pytester"] if "pytest_nixl.plugin" in sys.modules else ["pytester", "pytest_nixl.plugin"]
