# SPDX-License-Identifier: Apache-2.0
"""Modules of Python itself that a file elsewhere hides. This module imports nothing else that a file could hide."""

import os
import sys


def hidden_module_of_python(error: BaseException) -> "tuple[str, str] | None":
    """Return that a file hides the module which an error names, and what to do; None if no file does.

    :param error: what an import, or the first use of a module, raised.
    """
    library = os.path.dirname(os.__file__) + os.sep
    for name in {*str(error).split("'")} & sys.stdlib_module_names:
        file = getattr(error, "path", None) or getattr(sys.modules.get(name), "__file__", None) or library
        if not file.startswith(library):
            folder = os.path.dirname(file)
            return (
                f"{file} hides the module {name} of Python",
                f"rename {file}, or take {folder} out of PYTHONPATH and do not start in it",
            )
    return None
