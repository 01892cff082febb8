# SPDX-License-Identifier: Apache-2.0
"""``python -m pytest_nixl.cli``: the command ``pytest-nixl`` where no script is installed."""

from pytest_nixl.cli import main

raise SystemExit(main())
