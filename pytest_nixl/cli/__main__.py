# SPDX-License-Identifier: Apache-2.0
"""``python -m pytest_nixl.cli`` runs the command ``pytest-nixl`` from a clone, where no script is installed."""

from pytest_nixl.cli import main

raise SystemExit(main())
