# SPDX-License-Identifier: Apache-2.0
"""``python -m pytest_nixl`` runs the command ``pytest-nixl``."""

from pytest_nixl.cli import main

raise SystemExit(main())
