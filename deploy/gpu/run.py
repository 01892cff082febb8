# SPDX-License-Identifier: Apache-2.0
"""Run the whole validation from this one file: it needs no network and no compiler, and installs nothing.

It needs the Python version for which it was packed and, for GPU memory, a GPU with its driver. It does not need
PyTorch; if PyTorch is installed, one more stage makes and compares buffers with it. All results are written to one
folder: see README.md in the folder of this source.

    python3 pytest-nixl-gpu.pyz --out results
    python3 pytest-nixl-gpu.pyz --out results -- --nixl-blocks=1MiB -k bandwidth
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile

#: Patterns for the names of GPUs, and their profiles. A GH200 is not an H200: its link to the host is different.
PROFILES = ((r"\bH200\b", "h200"), (r"\bH100\b", "h100"))
SIZES = "4KiB,64KiB,1MiB,16MiB,64MiB"
#: Packed libraries that are used if the system has none.
FALLBACK = ("libz.so.1", "libcrypto.so.3", "libssl.so.3")
#: The stage that uses PyTorch instead of the bindings of the CUDA driver.
TORCH = "pytest-torch"
SUITES = ("infrastructure", "bandwidth", "metadata", "uri_validation", "faults")
#: What the driver and the fabric report of this machine. A program that is not installed says so in the file.
REPORTS = ("nvidia-smi topo -m", "nvidia-smi topo -p2p r", "nvidia-smi nvlink -s", "nvidia-smi nvlink -e",
           "nvidia-smi -q", "ibstat", "dmesg | grep Xid")  # fmt: skip
#: How the stage of a pair of GPUs begins; the numbers of the GPUs follow.
PAIR = "pytest-pair"


class NoRunError(Exception):
    """The validation cannot run on this machine; the text is one sentence that says why."""


def unpack(carried: str, folder: str) -> dict[str, str]:
    """Unpack the file, and return its manifest.

    :param carried: the path of the file.
    :param folder: the folder to unpack to.
    :raises NoRunError: if this Python cannot unpack or run it.
    """
    with zipfile.ZipFile(carried) as archive:
        manifest: dict[str, str] = json.loads(archive.read("manifest.json"))
        here = f"{sys.version_info[0]}.{sys.version_info[1]}"
        if manifest["python"] != here or sys.implementation.name != "cpython":
            raise NoRunError(
                f"this file was packed for CPython {manifest['python']}, but this is {sys.implementation.name} {here}: "
                f"run it with python{manifest['python']}, or pack it again with pack.py --python {here}"
            )
        try:
            import lzma  # noqa: F401
        except ImportError:
            raise NoRunError("this Python was built without lzma: run the file with another Python") from None
        with archive.open("tree.tar.xz") as stream, tarfile.open(fileobj=stream, mode="r|xz") as tree:
            if hasattr(tarfile, "data_filter"):
                tree.extractall(folder, filter="data")
            else:
                tree.extractall(folder)
    return manifest


def environment(folder: str, packed: str) -> tuple[dict[str, str], list[str]]:
    """Return the environment of the stages, and sentences that say which packages come from this machine.

    :param folder: where the file was unpacked.
    :param packed: the packages of NIXL, as in the manifest.
    :raises NoRunError: if a package is neither on this machine nor packed.
    """
    major = nixl_for(sorted(int(each) for each in re.findall(r"nixl-cu(\d+)", packed)), torch_cuda(), driver_cuda())
    said = [f"NIXL: nixl-cu{major}"]
    paths = [os.path.join(folder, name) for name in ("source", "site", f"nixl-cu{major}")]
    for what, module in (("numpy", "numpy"), ("cuda", "cuda.bindings.driver")):
        if imports(module):
            said.append(f"{module}: this machine's")
        elif os.path.isdir(os.path.join(folder, what)):
            paths.append(os.path.join(folder, what))
            said.append(f"{module}: carried")
        elif what == "numpy":
            raise NoRunError("NumPy is neither installed nor packed: install it, or pack without --without numpy")
        else:
            said.append(f"{module}: none")
    changed = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        # Each process would compile what it imports, and this machine keeps nothing of it.
        "PYTHONPYCACHEPREFIX": os.path.join(folder, "bytecode"),
        # Do not load pytest plugins of this machine: they may need another version of pytest.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PATH": os.pathsep.join([os.path.join(folder, "bin"), os.environ.get("PATH", os.defpath)]),
    }
    libraries = []
    for soname in FALLBACK:
        if not loads(soname) and os.path.exists(os.path.join(folder, "fallback", soname)):
            libraries.append(soname)
    # UCX watches allocations through the CUDA runtime for which NIXL was built. Use that of PyTorch if it is the same.
    runtime = runtimes(major) or glob.glob(os.path.join(folder, "fallback", f"libcudart.so.{major}"))
    extra = os.path.join(folder, "libraries")
    os.makedirs(extra)
    for soname in libraries:
        os.link(os.path.join(folder, "fallback", soname), os.path.join(extra, soname))
    if runtime:
        os.symlink(runtime[0], os.path.join(extra, os.path.basename(runtime[0])))
    changed["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), extra]))
    said.append(f"libraries carried and used: {', '.join(libraries) or 'none'}")
    said.append(f"CUDA runtime: {runtime[0] if runtime else 'none'}")
    return changed, said


def nixl_for(packed: list[int], torch: int | None, driver: int | None) -> int:
    """Return the CUDA version of the NIXL to use.

    :param packed: the CUDA versions of the packed ones, in ascending order.
    :param torch: that of this machine's PyTorch, for which NIXL loads its package and no other; None: PyTorch is not
        installed, or has no CUDA.
    :param driver: the newest that the driver supports; None: there is no driver.
    :raises NoRunError: if no packed NIXL is for PyTorch's version.
    """
    if torch is None:
        return max((each for each in packed if driver is not None and each <= driver), default=packed[0])
    if torch not in packed:
        have = " and ".join(f"nixl-cu{each}" for each in packed)
        raise NoRunError(
            f"this file has {have}, but PyTorch on this machine is built for CUDA {torch}, and beside it NIXL loads "
            f"only nixl-cu{torch}: pack the file again with pack.py --download --nixl nixl-cu{torch}"
        )
    return torch


def torch_cuda() -> int | None:
    """Return the CUDA version of this machine's PyTorch, from the file that NIXL reads; None if there is none."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        return None
    try:
        with open(os.path.join(os.path.dirname(found.origin), "version.py")) as file:
            match = re.search(r"^cuda\b[^=]*=\s*['\"](\d+)", file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def driver_cuda() -> int | None:
    """Return the newest CUDA version that the GPU driver supports; None if there is no driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else version.value // 1000


def imports(module: str) -> bool:
    """Whether the Python of this machine can import a module. It is tried in a separate process."""
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


def without_bindings(changed: dict[str, str], folder: str) -> dict[str, str]:
    """Return the environment in which NVIDIA's bindings cannot be imported, neither the packed ones nor others."""
    hidden = os.path.join(folder, "hidden")
    os.makedirs(os.path.join(hidden, "cuda"))
    with open(os.path.join(hidden, "cuda", "__init__.py"), "w") as file:
        file.write("raise ImportError('hidden from this stage')\n")
    return {**changed, "PYTHONPATH": os.pathsep.join([hidden, changed["PYTHONPATH"]])}


def loads(soname: str) -> bool:
    """Whether the loader of this machine finds a library."""
    try:
        ctypes.CDLL(soname)
    except OSError:
        return False
    return True


def runtimes(major: int) -> list[str]:
    """Return the paths of CUDA runtimes of one version in packages of this Python, such as those for PyTorch."""
    found = []
    for place in sys.path:
        for package in ("cuda_runtime", f"cu{major}"):
            found += glob.glob(os.path.join(place or ".", "nvidia", package, "lib", f"libcudart.so.{major}"))
    return found


def models() -> list[str]:
    """Return the models of the GPUs of this machine, from the driver's files, else from nvidia-smi."""
    found = []
    for place in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        with open(place) as file:
            found += re.findall(r"^Model:\s+(.*)$", file.read(), re.MULTILINE)
    if not found and shutil.which("nvidia-smi"):
        asked = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
                               capture_output=True, text=True, check=False)  # fmt: skip
        if asked.returncode == 0:
            found = [line.strip() for line in asked.stdout.splitlines() if line.strip()]
    return found


def profile_of(names: list[str]) -> str:
    """Return the profile for these GPUs; ``loopback`` if there is none."""
    for word, profile in PROFILES:
        if names and all(re.search(word, name) for name in names):
            return profile
    return "loopback"


def stages(profile: str, out: str, more: list[str], gpus: int) -> list[tuple[str, list[str]]]:
    """Return the name and the command of each stage, in order. Stages named ``pytest-…`` decide the exit code.

    :param gpus: the number of GPUs. Each ordered pair of them has a stage.
    """
    python = sys.executable
    reports = "".join(f"echo '== {command}'; {command} 2>&1; " for command in REPORTS)

    def run(name: str, suites: tuple[str, ...], *options: str) -> tuple[str, list[str]]:
        return name, [
            python, "-m", "pytest", "-p", "pytest_nixl.plugin", "-p", "benchmark",
            "-p", "no:cacheprovider", *(f"suites/{suite}" for suite in suites), "--nixl-backend=UCX",
            "--nixl-etcd-server=embedded", "--nixl-ranks=1", "--nixl-op=WRITE,READ", f"--nixl-store={out}/store",
            f"--nixl-report={out}/{name}.html,{out}/{name}.csv", f"--junitxml={out}/{name}.xml",
            f"--benchmark-json={out}/{name}.json", *options, *more,
        ]  # fmt: skip

    def run_pair(one: int, other: int) -> tuple[str, list[str]]:
        return run(f"{PAIR}-{one}-{other}", ("bandwidth/test_bandwidth.py",), "--nixl-memory=VRAM:VRAM",
                   f"--nixl-devices={one}:{other}", f"--nixl-blocks={SIZES.rpartition(',')[2]}",
                   f"--nixl-profile={profile}")  # fmt: skip

    pairs = [(one, other) for one in range(gpus) for other in range(gpus) if one != other]
    return [
        ("driver", ["sh", "-c", f"{reports}true"]),
        ("near", [python, "-m", "pytest_nixl.cli", "facts", "--near"]),
        ("facts", [python, "-m", "pytest_nixl.cli", "facts", "--output", f"{out}/facts.json"]),
        ("recorded", [python, "-m", "pytest_nixl.cli", "facts", "--record", f"{out}/recorded"]),
        ("doctor", [python, "-m", "pytest_nixl.cli", "doctor", "-v", "--profile", profile]),
        # Host memory comes first: if this stage fails, the GPUs are not the cause.
        run("pytest-host", ("bandwidth",), "--nixl-memory=DRAM:DRAM", "--nixl-blocks=64KiB,4MiB"),
        run("pytest-gpu", SUITES, "--nixl-level=extended", "--nixl-memory=VRAM:VRAM,DRAM:VRAM,VRAM:DRAM",
            f"--nixl-blocks={SIZES}", f"--nixl-profile={profile}"),
        run(TORCH, ("bandwidth",), "--nixl-memory=VRAM:VRAM", "--nixl-blocks=1MiB", f"--nixl-profile={profile}"),
        *(run_pair(one, other) for one, other in pairs),
        *([("driver-after", ["sh", "-c", f"{reports}true"])] if pairs else []),
    ]  # fmt: skip


def matrix(out: str, gpus: int) -> list[str]:
    """Return the lines of a table for each operation: GB/s from each GPU (line) to each other one (column).

    :param out: the folder of the results; a pair without a result has a dash.
    """
    rates: dict[str, dict[tuple[int, int], str]] = {}
    for one in range(gpus):
        for other in range(gpus):
            try:
                with open(os.path.join(out, f"{PAIR}-{one}-{other}.json")) as file:
                    rows = json.load(file)["benchmarks"]
            except (OSError, ValueError, LookupError):
                continue
            for row in rows:
                figures = row["extra_info"]
                rates.setdefault(figures["key"].split("/")[1], {})[one, other] = f"{figures['GB/s']:.3g}"
    lines = []
    for op, cells in rates.items():
        lines.append(f"{op}, GB/s" + "".join(f"{f'to {other}':>8}" for other in range(gpus)))
        lines += [f"from GPU {one:<2}" + "".join(f"{cells.get((one, other), '-'):>8}" for other in range(gpus))
                  for one in range(gpus)]  # fmt: skip
    return lines


def carry_out(name: str, command: list[str], changed: dict[str, str], folder: str, out: str) -> int:
    """Run one stage, write its output to the terminal and to a file, and return its exit code.

    :raises SystemExit: after Ctrl-C or SIGTERM. The signal is passed on to the stage, which cleans up first.
    """
    print(f"== {name}: {' '.join(command[1:])}", flush=True)
    libc, stopped = ctypes.CDLL(None), []

    def end_with_us() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

    with open(os.path.join(out, f"{name}.txt"), "w") as log:
        process = subprocess.Popen(command, cwd=os.path.join(folder, "source"), env=changed, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
                                   preexec_fn=end_with_us)  # fmt: skip

        def pass_on(number: int, _: object) -> None:
            stopped.append(number)
            process.send_signal(number)

        previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                log.flush()
                sys.stdout.write(line)
                sys.stdout.flush()
        finally:
            code = process.wait()
            for number, handler in previous.items():
                signal.signal(number, handler)
    if stopped:
        raise SystemExit(128 + stopped[0])
    return code


def main() -> int:
    """Run every stage; return the first exit code of pytest that is not 0."""
    parser = argparse.ArgumentParser(prog=os.path.basename(sys.argv[0]), description=(__doc__ or "").split("\n\n")[0],
                                     epilog="options after -- are passed on to pytest")  # fmt: skip
    parser.add_argument("--out", default=os.environ.get("OUT") or "pytest-nixl-results", metavar="DIR",
                        help="the folder of the results (default: $OUT, else pytest-nixl-results)")  # fmt: skip
    parser.add_argument("--profile", default="", help="the profile to judge by (default: by the model of the GPUs)")
    parser.add_argument("--only", default="", metavar="STAGE[,STAGE]", help="run only these stages")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    arguments = parser.parse_args(given[:cut])
    out, names = os.path.abspath(arguments.out), models()
    profile = arguments.profile or profile_of(names)
    chosen = stages(profile, out, given[cut + 1 :], len(names))
    wanted = arguments.only.split(",") if arguments.only else [name for name, _ in chosen]
    unknown = [name for name in wanted if name not in dict(chosen)]
    if unknown:
        parser.error(f"--only={','.join(unknown)} is not a stage: expected {', '.join(name for name, _ in chosen)}")
    os.makedirs(out, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="pytest-nixl-gpu-")
    try:
        manifest = unpack(os.path.abspath(sys.argv[0]), folder)
        changed, said = environment(folder, manifest["nixl"])
        print(f"packed: {manifest}; GPUs: {', '.join(names) or 'none'}; profile: {profile}")
        print("; ".join(said), flush=True)
        done = []
        for name, command in chosen:
            if name not in wanted:
                continue
            if name == TORCH and not imports("torch"):
                print(f"== {name}: skipped: this machine has no PyTorch")
            else:
                start = time.monotonic()
                variables = without_bindings(changed, folder) if name == TORCH else changed
                code = carry_out(name, command, variables, folder, out)
                done.append({"stage": name, "exit": code, "seconds": round(time.monotonic() - start, 1)})
                summary = {"packed": manifest, "gpus": names, "profile": profile, "libraries": said, "stages": done}
                with open(os.path.join(out, "summary.json"), "w") as file:
                    json.dump(summary, file, indent=1)
    except NoRunError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for each in done:
        print(f"{each['stage']:<12} exit {each['exit']:>3} after {each['seconds']} s")
    for line in matrix(out, len(names)):
        print(line)
    print(f"all results are in {out}")
    return next((int(each["exit"]) for each in done if each["stage"].startswith("pytest-") and each["exit"]), 0)


if __name__ == "__main__":
    raise SystemExit(main())
