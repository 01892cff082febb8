#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the sdist, the wheel and their SBOM, the same bytes each time.

The same commit, Python, setuptools and zlib give the same bytes in any folder, at any time, by any user. The time in
the archives is that of the commit. setuptools writes the times, modes and owners of the machine into an sdist, so that
it is packed again without them, and the wheel is built from the packed sdist.

    python deploy/release/build.py dist --sbom   # build for a release
    python deploy/release/build.py dist --twice  # also check that a second build has the same bytes

It needs the packages build, setuptools and, with --sbom, cyclonedx-bom.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


#: The time in the archives if neither git nor SOURCE_DATE_EPOCH says one: the first that a wheel can have.
FIRST_TIME = 315532800
#: Without git, the folders that are no part of the source.
LEFT_OUT = re.compile(r"(^|/)(\.(?!ci/|github/)[^/]+|build|dist|site|__pycache__|[^/]+\.egg-info)/")


def git(*arguments: str) -> str:
    """Return the output of git in this clone; empty: this is no clone, or there is no git."""
    command = ["git", "-c", f"safe.directory={ROOT}", *arguments]
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return ""
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def call(command: Sequence[str | Path], folder: Path, **environment: str) -> None:
    """Run a program with the usual file modes; its output is shown only if it fails.

    :raises SystemExit: if it fails.
    """
    done = subprocess.run(
        [*command], cwd=folder, env={**os.environ, **environment}, umask=0o022, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(map(str, command))} ended with exit code {done.returncode}")


def copy_tree(target: Path) -> None:
    """Copy the files that git tracks, and new ones that it does not ignore, as they are now."""
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    if names == [""]:
        every = (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*"))
        names = [name for name in every if not LEFT_OUT.search(name)]
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def pack_again(sdist: Path, when: int) -> None:
    """Write an sdist again, sorted, with one time and without owners.

    :param when: the time, in seconds since 1970.
    """
    with tarfile.open(sdist) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        contents = [(member, archive.extractfile(member)) for member in members]
        packed = sdist.with_suffix(".packed")
        with packed.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, when) as stream:
            with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as again:
                for member, content in contents:
                    member.mtime, member.uid, member.gid, member.uname, member.gname = when, 0, 0, "", ""
                    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                    member.pax_headers = {}
                    again.addfile(member, content)
    packed.replace(sdist)


def build(folder: Path, when: int, **environment: str) -> list[Path]:
    """Build from a copy of the clone in ``folder``, and return the paths of the sdist and the wheel."""
    tree, out, unpacked = folder / "tree", folder / "dist", folder / "unpacked"
    copy_tree(tree)
    environment = {"SOURCE_DATE_EPOCH": str(when), **environment}
    command: list[str | Path] = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out]
    call([*command, "--sdist", tree], folder, **environment)
    (sdist,) = out.glob("*.tar.gz")
    pack_again(sdist, when)
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    call([*command, "--wheel", source], folder, **environment)
    (wheel,) = out.glob("*.whl")
    return [sdist, wheel]


def build_elsewhere(folder: Path, when: int) -> list[Path]:
    """Build again in another folder, with other file modes, in another time zone and another locale."""
    before = os.umask(0o077)
    try:
        deeper = folder / "another" / "folder"
        deeper.mkdir(parents=True)
        return build(deeper, when, TZ="Pacific/Auckland", LC_ALL="C", PYTHONHASHSEED="1")
    finally:
        os.umask(before)


def write_sbom(wheel: Path, path: Path, when: int, folder: Path) -> None:
    """Install the wheel by itself, start its program, and write what was installed as CycloneDX 1.6.

    cyclonedx-py checks the file by the schema of CycloneDX.
    """
    python = folder / "installed" / "bin" / "python"
    venv.create(python.parents[1], with_pip=True)
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
    call([*pip, "install", "--quiet", "--no-compile", wheel], folder)
    call([python.with_name("pytest-nixl"), "--version"], folder)
    # pip came with the environment, and is no dependency.
    call([*pip, "uninstall", "--quiet", "--yes", "pip", "setuptools"], folder)
    program: list[str | Path] = [sys.executable, "-m", "cyclonedx_py", "environment"]
    options = ("--mc-type=library", "--output-reproducible", "--validate", f"--pyproject={ROOT}/pyproject.toml")
    call([*program, *options, "--output-file", path, python], folder, SOURCE_DATE_EPOCH=str(when))
    sbom = json.loads(path.read_text())
    names = [component["name"] for component in sbom["components"]]
    print(f"{path.name}: {sbom['metadata']['component']['name']} and {len(names)} packages that it needs")


def main() -> None:
    """Build, and print the SHA-256 of each file."""
    parser = argparse.ArgumentParser(description="Build the sdist, the wheel and their SBOM, the same bytes each time.")
    parser.add_argument("dist", type=Path, help="the folder for the files")
    parser.add_argument("--twice", action="store_true", help="build a second time elsewhere, and compare the bytes")
    parser.add_argument("--sbom", action="store_true", help="install the wheel, and write the SBOM beside it")
    arguments = parser.parse_args()
    when = int(os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct") or FIRST_TIME)
    arguments.dist.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "first").mkdir()
        built = build(folder / "first", when)
        if arguments.twice:
            for first, second in zip(built, build_elsewhere(folder, when), strict=True):
                if first.read_bytes() != second.read_bytes():
                    sys.exit(f"two builds of {first.name} differ")
            print("two builds in two folders have the same bytes")
        files = [Path(shutil.copy(path, arguments.dist)) for path in built]
        if arguments.sbom:
            sbom = arguments.dist.resolve() / f"{files[1].name.removesuffix('-py3-none-any.whl')}.cdx.json"
            write_sbom(files[1].resolve(), sbom, when, folder)
            files.append(sbom)
    for path in files:
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")


if __name__ == "__main__":
    main()
