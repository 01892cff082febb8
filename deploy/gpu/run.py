# SPDX-License-Identifier: Apache-2.0
"""Run the whole validation from this one file: it needs no network and no compiler, and installs nothing.

It needs the Python version for which it was packed and, for GPU memory, a GPU with its driver. It does not need
PyTorch; if PyTorch is installed, one more stage makes and compares buffers with it. All results are written to one
folder: see README.md in the folder of this source.

    python3 pytest-nixl-gpu.pyz --out results
    python3 pytest-nixl-gpu.pyz --out results --hosts gpu-a,gpu-b     # the same on both hosts
    python3 pytest-nixl-gpu.pyz --out results -- --nixl-blocks=1MiB -k bandwidth
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import glob
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from typing import Any, NamedTuple

#: Patterns for the names of GPUs, and their profiles. A GH200 is not an H200: its link to the host is different.
PROFILES = ((r"\bB200\b", "b200"), (r"\bH200\b", "h200"), (r"\bH100\b", "h100"), (r"\bA100\b", "a100"))
SIZES = "4KiB,64KiB,1MiB,16MiB,64MiB"
#: Packed libraries that are used if the system has none.
FALLBACK = ("libz.so.1", "libcrypto.so.3", "libssl.so.3")
#: The stage that uses PyTorch instead of the bindings of the CUDA driver.
TORCH = "pytest-torch"
SUITES = ("infrastructure", "bandwidth", "metadata", "uri_validation", "faults")
#: Suites of engines' requests and of long use. The suite pattern needs two ranks.
ENGINE_SUITES = ("kv_cache", "control_path", "endurance")
#: What the driver and the fabric report of this machine. A program that is not installed says so in the file.
REPORTS = ("nvidia-smi topo -m", "nvidia-smi topo -p2p r", "nvidia-smi nvlink -s", "nvidia-smi nvlink -e",
           "nvidia-smi -q", "ibstat", "dmesg | grep Xid")  # fmt: skip
#: The exit code of pytest if the options selected no test.
NO_TESTS = 5
#: How the stage of a pair of GPUs begins; the numbers of the GPUs follow.
PAIR = "pytest-pair"
#: The block of such a stage, in KiB: the least that NVLinks count if they carry the bytes.
PAIR_KIB = 64 << 10
#: Where rank 0 of two hosts serves an etcd, and how long a rank waits for the other one at the beginning of a stage.
ETCD_PORT, JOIN_TIMEOUT = 23790, "30min"
#: Kernel modules that give network cards access to GPU memory where CUDA exports no DMA-BUF.
PEERMEM = ("/sys/module/nvidia_peermem", "/sys/module/nv_peer_mem")
#: Prints the KiB that the NVLinks of all GPUs have sent and received, or nothing if no GPU counts them. A process of
#: its own runs it, because a call into a broken driver may never return.
COUNT_LINKS = """
import ctypes
class Field(ctypes.Structure):
    _fields_ = [("field", ctypes.c_uint), ("scope", ctypes.c_uint), ("time", ctypes.c_longlong),
                ("latency", ctypes.c_longlong), ("type", ctypes.c_int), ("code", ctypes.c_int),
                ("value", ctypes.c_ulonglong)]
nvml, count, total = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint(), []
assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
for index in range(count.value):
    handle = ctypes.c_void_p()
    # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX of NVML_NVLINK_MAX_LINKS
    fields = (Field * 36)(*(Field(id, link) for id in (138, 139) for link in range(18)))
    if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
        if not nvml.nvmlDeviceGetFieldValues(handle, len(fields), fields):
            total += [field.value for field in fields if field.code == 0]
print(sum(total) if total else "")
"""


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
        ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
        if manifest["python"] != ours or sys.implementation.name != "cpython":
            raise NoRunError(
                f"this file was packed for CPython {manifest['python']}, but this is {sys.implementation.name} {ours}: "
                f"run it with python{manifest['python']}, or pack it again with pack.py --python {ours}"
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
    major = nixl_for(sorted(int(text) for text in re.findall(r"nixl-cu(\d+)", packed)), torch_cuda(), driver_cuda())
    remarks = [f"NIXL: nixl-cu{major}"]
    paths = [os.path.join(folder, name) for name in ("source", "site", f"nixl-cu{major}")]
    for package, module in (("numpy", "numpy"), ("cuda", "cuda.bindings.driver")):
        if imports(module):
            remarks.append(f"{module}: this machine's")
        elif os.path.isdir(os.path.join(folder, package)):
            paths.append(os.path.join(folder, package))
            remarks.append(f"{module}: carried")
        elif package == "numpy":
            raise NoRunError("NumPy is neither installed nor packed: install it, or pack without --without numpy")
        else:
            remarks.append(f"{module}: none")
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
    remarks.append(f"libraries carried and used: {', '.join(libraries) or 'none'}")
    remarks.append(f"CUDA runtime: {runtime[0] if runtime else 'none'}")
    return changed, remarks


def nixl_for(packed: list[int], torch: int | None, driver: int | None) -> int:
    """Return the CUDA version of the NIXL to use.

    :param packed: the CUDA versions of the packed ones, in ascending order.
    :param torch: that of this machine's PyTorch, for which NIXL loads its package and no other; None: PyTorch is not
        installed, or has no CUDA.
    :param driver: the newest that the driver supports; None: there is no driver.
    :raises NoRunError: if no packed NIXL is for PyTorch's version.
    """
    if torch is None:
        return max((major for major in packed if driver is not None and major <= driver), default=packed[0])
    if torch not in packed:
        have = " and ".join(f"nixl-cu{major}" for major in packed)
        raise NoRunError(
            f"this file has {have}, but PyTorch on this machine is built for CUDA {torch}, and beside it NIXL loads "
            f"only nixl-cu{torch}: pack the file again with pack.py --download --nixl nixl-cu{torch}"
        )
    return torch


def torch_cuda() -> int | None:
    """Return the CUDA version of this machine's PyTorch, from the file that NIXL reads; None if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
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
    paths = []
    for place in sys.path:
        for package in ("cuda_runtime", f"cu{major}"):
            paths += glob.glob(os.path.join(place or ".", "nvidia", package, "lib", f"libcudart.so.{major}"))
    return paths


def models() -> list[str]:
    """Return the models of the GPUs of this machine, from the driver's files, else from nvidia-smi."""
    names = []
    for place in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        with open(place) as file:
            names += re.findall(r"^Model:\s+(.*)$", file.read(), re.MULTILINE)
    if not names and shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
                               capture_output=True, text=True, check=False)  # fmt: skip
        if listed.returncode == 0:
            names = [line.strip() for line in listed.stdout.splitlines() if line.strip()]
    return names


def profile_of(names: list[str]) -> str:
    """Return the profile for these GPUs; ``loopback`` if there is none."""
    for pattern, profile in PROFILES:
        if names and all(re.search(pattern, name) for name in names):
            return profile
    return "loopback"


def rank_here(hosts: list[str]) -> int:
    """Return which of two hosts this is: the one whose address this machine has.

    :raises NoRunError: both are, or neither is.
    """
    local = []
    for rank, host in enumerate(hosts):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
            local.append(rank)
    if len(local) != 1:
        reason = "both are addresses" if local else "neither is an address"
        raise NoRunError(
            f"--hosts={','.join(hosts)}: {reason} of this host; add --rank=0 on the first and --rank=1 on the second"
        )
    return local[0]


class Stage(NamedTuple):
    """One stage. Those named ``pytest-…`` decide the exit code.

    :param environment: the variables that only this stage has.
    """

    name: str
    command: list[str]
    environment: dict[str, str]


def stages(profile: str, out: str, more: list[str], gpus: int, hosts: list[str], rank: int) -> list[Stage]:
    """Return the stages, in order.

    :param gpus: the number of GPUs. Each ordered pair of them has a stage.
    :param hosts: the two hosts of the stages that need two; empty: there are no such stages.
    :param rank: which of them this one is.
    """
    python = sys.executable
    reports = "".join(f"echo '== {command}'; {command} 2>&1; " for command in REPORTS)
    peer = ["--peer", hosts[1 - rank]] if hosts else []

    def run(name: str, suites: tuple[str, ...], *options: str, ranks: int = 1, **variables: str) -> Stage:
        group = ["--nixl-etcd-server=embedded"]
        if ranks > 1:
            group = [f"--nixl-rank={rank}", f"--nixl-etcd-listen=0.0.0.0:{ETCD_PORT}",
                     f"--nixl-join-timeout={JOIN_TIMEOUT}"]  # fmt: skip
            variables["MASTER_ADDR"] = hosts[0]
        return Stage(name, [
            python, "-m", "pytest", "-p", "pytest_nixl.plugin", "-p", "benchmark",
            "-p", "no:cacheprovider", *(f"suites/{suite}" for suite in suites), "--nixl-backend=UCX", *group,
            f"--nixl-ranks={ranks}", "--nixl-op=WRITE,READ", f"--nixl-store={out}/store",
            f"--nixl-report={out}/{name}.html,{out}/{name}.csv", f"--junitxml={out}/{name}.xml",
            f"--benchmark-json={out}/{name}.json", *options, *more,
        ], variables)  # fmt: skip

    def run_pair(initiator: int, target: int) -> Stage:
        return run(f"{PAIR}-{initiator}-{target}", ("bandwidth/test_bandwidth.py",), "--nixl-memory=VRAM:VRAM",
                   f"--nixl-devices={initiator}:{target}", f"--nixl-blocks={PAIR_KIB}KiB",
                   f"--nixl-profile={profile}")  # fmt: skip

    def run_direct(name: str, dma_buf: str, *options: str) -> Stage:
        """A stage in which nothing but RDMA can carry bytes between the GPUs of two hosts."""
        suites = ("bandwidth/test_bandwidth.py", "bandwidth/test_integrity.py")
        return run(f"pytest-hosts-{name}", suites, "--nixl-memory=VRAM:VRAM", *options, ranks=2, UCX_TLS="rc,cuda",
                   UCX_CUDA_COPY_DMABUF=dma_buf)  # fmt: skip

    small = ("--nixl-blocks=4KiB", "--nixl-iterations=1000000", "--nixl-op=WRITE")
    on_two_hosts = [
        run("pytest-hosts-host", ("bandwidth",), "--nixl-memory=DRAM:DRAM", "--nixl-blocks=64KiB,64MiB", ranks=2),
        run("pytest-hosts-gpu", ("bandwidth",), "--nixl-memory=VRAM:VRAM,DRAM:VRAM,VRAM:DRAM",
            f"--nixl-blocks={SIZES}", ranks=2),
        run_direct("dma-buf", "yes", f"--nixl-blocks={SIZES}"),
        *([run_direct("peermem", "no", f"--nixl-blocks={SIZES}")] if any(map(os.path.exists, PEERMEM)) else []),
        run_direct("small-notified", "try", *small, "--nixl-notify=each"),
        run_direct("small", "try", *small, "--nixl-notify=last"),
        run("pytest-hosts-engine", (*ENGINE_SUITES, "pattern"), "--nixl-memory=VRAM:VRAM", "--nixl-pattern=alltoall",
            ranks=2),
    ] if hosts else []  # fmt: skip
    pairs = [(initiator, target) for initiator in range(gpus) for target in range(gpus) if initiator != target]
    return [
        Stage("driver", ["sh", "-c", f"{reports}true"], {}),
        Stage("near", [python, "-m", "pytest_nixl.cli", "facts", "--near"], {}),
        Stage("facts", [python, "-m", "pytest_nixl.cli", "facts", "--output", f"{out}/facts.json"], {}),
        Stage("recorded", [python, "-m", "pytest_nixl.cli", "facts", "--record", f"{out}/recorded"], {}),
        Stage("doctor", [python, "-m", "pytest_nixl.cli", "doctor", "-v", "--profile", profile, *peer], {}),
        # Two hosts come first, while the other one waits the least.
        *on_two_hosts,
        # Host memory comes first: if this stage fails, the GPUs are not the cause.
        run("pytest-host", ("bandwidth",), "--nixl-memory=DRAM:DRAM", "--nixl-blocks=64KiB,4MiB"),
        run("pytest-gpu", SUITES, "--nixl-level=extended", "--nixl-memory=VRAM:VRAM,DRAM:VRAM,VRAM:DRAM",
            f"--nixl-blocks={SIZES}", f"--nixl-profile={profile}"),
        run("pytest-engine", ENGINE_SUITES, "--nixl-memory=VRAM:VRAM", f"--nixl-profile={profile}"),
        run(TORCH, ("bandwidth",), "--nixl-memory=VRAM:VRAM", "--nixl-blocks=1MiB", f"--nixl-profile={profile}"),
        *(run_pair(initiator, target) for initiator, target in pairs),
        *([Stage("driver-after", ["sh", "-c", f"{reports}true"], {})] if pairs or hosts else []),
    ]  # fmt: skip


def matrix(out: str, gpus: int) -> list[str]:
    """Return the lines of a table for each operation: GB/s from each GPU (line) to each other one (column).

    :param out: the folder of the results; a pair without a result has a dash.
    """
    rates: dict[str, dict[tuple[int, int], str]] = {}
    for initiator in range(gpus):
        for target in range(gpus):
            try:
                with open(os.path.join(out, f"{PAIR}-{initiator}-{target}.json")) as file:
                    rows = json.load(file)["benchmarks"]
            except (OSError, ValueError, LookupError):
                continue
            for row in rows:
                figures = row["extra_info"]
                cells = rates.setdefault(figures["key"].split("/")[1], {})
                cells[initiator, target] = f"{figures['GB/s']:.3g}"
    return [line for op, cells in rates.items() for line in table(f"{op}, GB/s", cells, gpus)]


def table(title: str, cells: dict[tuple[int, int], str], gpus: int) -> list[str]:
    """Return the lines of a table with a cell for each ordered pair of GPUs."""
    lines = [title + "".join(f"{f'to {target}':>8}" for target in range(gpus))]
    for initiator in range(gpus):
        row = "".join(f"{cells.get((initiator, target), '-'):>8}" for target in range(gpus))
        lines.append(f"from GPU {initiator:<2}{row}")
    return lines


def nvlink_kib() -> int | None:
    """Return the KiB that the NVLinks of this host have carried; None if NVML does not say it."""
    command = [sys.executable, "-c", COUNT_LINKS]
    try:
        counted = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return None
    return int(counted.stdout) if counted.stdout.strip() else None


def nvlinks(results: list[dict[str, Any]], gpus: int) -> list[str]:
    """Return the lines of a table that says of each pair whether NVLinks counted its bytes, which cuda_ipc moved.

    Without NVLink, cuda_ipc moves them over PCIe. What another process moves at that time is counted as well.
    """
    cells = {}
    for result in results:
        if result.get("nvlink_kib") is not None:
            initiator, target = map(int, result["stage"].split("-")[2:])
            cells[initiator, target] = "NVLink" if result["nvlink_kib"] >= PAIR_KIB else "PCIe"
    return table("carried by  ", cells, gpus) if cells else []


def carry_out(stage: Stage, changed: dict[str, str], folder: str, out: str) -> int:
    """Run one stage, write its output to the terminal and to a file, and return its exit code.

    :raises SystemExit: after Ctrl-C or SIGTERM. The signal is passed on to the stage, which cleans up first.
    """
    extra = "".join(f"{name}={value} " for name, value in stage.environment.items())
    print(f"== {stage.name}: {extra}{' '.join(stage.command[1:])}", flush=True)
    libc, stopped = ctypes.CDLL(None), []

    def end_with_us() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

    with open(os.path.join(out, f"{stage.name}.txt"), "w") as log:
        process = subprocess.Popen(stage.command, cwd=os.path.join(folder, "source"),
                                   env={**changed, **stage.environment}, stdout=subprocess.PIPE,
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
    """Run every stage; return the first exit code of pytest that says that something failed."""
    parser = argparse.ArgumentParser(prog=os.path.basename(sys.argv[0]), description=(__doc__ or "").split("\n\n")[0],
                                     epilog="options after -- are passed on to pytest")  # fmt: skip
    parser.add_argument("--out", default=os.environ.get("OUT") or "pytest-nixl-results", metavar="DIR",
                        help="the folder of the results (default: $OUT, else pytest-nixl-results)")  # fmt: skip
    parser.add_argument("--profile", default="", help="the profile to judge by (default: by the model of the GPUs)")
    parser.add_argument("--hosts", default="", metavar="FIRST,SECOND",
                        help="two hosts that both run this command: measure between them as well")  # fmt: skip
    parser.add_argument("--rank", type=int, choices=(0, 1),
                        help="which of --hosts this is (default: the one whose address this host has)")  # fmt: skip
    parser.add_argument("--only", default="", metavar="STAGE[,STAGE]", help="run only these stages")
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    arguments = parser.parse_args(argv[:cut])
    hosts = arguments.hosts.split(",") if arguments.hosts else []
    if hosts and (len(hosts) != 2 or not all(hosts)):
        parser.error(f"--hosts={arguments.hosts}: expected two hosts, such as gpu-a,gpu-b")
    if hosts and not os.environ.get("NIXL_GROUP_TOKEN"):
        parser.error("--hosts needs a secret that both hosts share: `export NIXL_GROUP_TOKEN=some-secret` on both")
    out, names, folder = os.path.abspath(arguments.out), models(), ""
    profile = arguments.profile or profile_of(names)
    results: list[dict[str, Any]] = []
    try:
        rank = rank_here(hosts) if hosts and arguments.rank is None else arguments.rank or 0
        chosen = stages(profile, out, argv[cut + 1 :], len(names), hosts, rank)
        if arguments.only:
            by_name = {stage.name: stage for stage in chosen}
            unknown = [name for name in arguments.only.split(",") if name not in by_name]
            if unknown:
                parser.error(f"--only={','.join(unknown)} is not a stage: expected {', '.join(by_name)}")
            chosen = [stage for stage in chosen if stage.name in arguments.only.split(",")]
        os.makedirs(out, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="pytest-nixl-gpu-")
        manifest = unpack(os.path.abspath(sys.argv[0]), folder)
        changed, libraries = environment(folder, manifest["nixl"])
        print(f"packed: {manifest}; GPUs: {', '.join(names) or 'none'}; profile: {profile}")
        print("; ".join(libraries), flush=True)
        for stage in chosen:
            if stage.name == TORCH and not imports("torch"):
                print(f"== {stage.name}: skipped: this machine has no PyTorch")
                continue
            before, start = nvlink_kib() if stage.name.startswith(PAIR) else None, time.monotonic()
            variables = without_bindings(changed, folder) if stage.name == TORCH else changed
            code = carry_out(stage, variables, folder, out)
            result = {"stage": stage.name, "exit": code, "seconds": round(time.monotonic() - start, 1)}
            after = nvlink_kib() if before is not None else None
            if before is not None and after is not None:
                result["nvlink_kib"] = after - before
            results.append(result)
            summary = {"packed": manifest, "gpus": names, "profile": profile, "libraries": libraries, "stages": results}
            with open(os.path.join(out, "summary.json"), "w") as file:
                json.dump(summary, file, indent=1)
    except NoRunError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for result in results:
        print(f"{result['stage']:<12} exit {result['exit']:>3} after {result['seconds']} s")
    for line in [*matrix(out, len(names)), *nvlinks(results, len(names))]:
        print(line)
    print(f"all results are in {out}")
    codes = [result["exit"] for result in results if result["stage"].startswith("pytest-")]
    # A stage from which the options after -- take every test has checked nothing; that is a fault if no stage did.
    return next((code for code in codes if code not in (0, NO_TESTS)), 0 if 0 in codes or not codes else NO_TESTS)


if __name__ == "__main__":
    raise SystemExit(main())
