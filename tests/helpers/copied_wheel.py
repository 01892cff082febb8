# SPDX-License-Identifier: Apache-2.0
"""A copy of the installed wheel of NIXL, from which a test may remove files."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

from pytest_nixl.nixl.installed import nixl_packages

_LIBNIXL = """
import nixl._api
print(next(line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps") if "/libnixl.so" in line))
"""


def link(source: str, target: str) -> None:
    """Link a file, or copy it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class CopiedWheel:
    """The files of a wheel of NIXL in another folder.

    :param site: the folder, which a test may put on ``sys.path``.
    :param library: NIXL's library in it.
    :param package: the name of the wheel, such as ``nixl-cu12``.
    """

    def __init__(self, site: Path, library: Path, package: str) -> None:
        self.site, self.library, self.package = site, library, package

    @property
    def plugins(self) -> Path:
        """The folder of the plugins."""
        return self.library.parent / "plugins"

    def copy(self, site: Path, plugin: str) -> CopiedWheel:
        """Return another copy that has only one plugin."""
        shutil.copytree(self.site, site, copy_function=link)
        copied = CopiedWheel(site, site / self.library.relative_to(self.site), self.package)
        for path in copied.plugins.glob("libplugin_*.so"):
            if path.name != f"libplugin_{plugin}.so":
                path.unlink()
        return copied

    def remove(self, pattern: str) -> str:
        """Remove the only library that a pattern matches, wherever it is, and return its name."""
        results = list(self.site.rglob(pattern))
        [name] = {path.name for path in results}
        for path in results:
            path.unlink()
        return name


def copy_wheel(site: Path) -> CopiedWheel:
    """Copy the wheel of the NIXL that Python loads.

    :param site: a folder that does not exist.
    """
    output = subprocess.run([sys.executable, "-c", _LIBNIXL], capture_output=True, text=True, check=True).stdout
    library = Path(output.strip())
    original, folder = library.parents[1], library.parent.name
    module = folder.removeprefix(".").partition(".")[0]  # .nixl_cu12.mesonpy.libs
    version = importlib.metadata.version(module.replace("_", "-"))
    for name in (folder, f"{module}.libs", module, f"{module}-{version}.dist-info"):
        shutil.copytree(original / name, site / name, copy_function=link)
    return CopiedWheel(site, site / folder / library.name, module.replace("_", "-"))


def installed_library(pattern: str) -> Path:
    """Return a library of the installed packages of NIXL that a pattern matches."""
    for name in nixl_packages():
        for file in importlib.metadata.files(name) or ():
            if file.match(pattern):
                return Path(str(file.locate()))
    raise FileNotFoundError(pattern)
