# SPDX-License-Identifier: Apache-2.0
"""The command ``pytest-nixl``, also as ``python -m pytest_nixl``.

Nothing is imported before it can say which file hides what it needs.
"""

import sys


def main() -> int:
    """Run the command and return its exit code."""
    try:
        from pytest_nixl.cli import main as run

        return run()
    except (AttributeError, ImportError) as error:
        from pytest_nixl.core.hidden_modules import hidden_module_of_python

        fault = hidden_module_of_python(error)
        if fault is None:
            raise
        sys.stderr.write(f"pytest-nixl: {fault[0]}; remedy: {fault[1]}\n")
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
