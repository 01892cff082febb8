# SPDX-License-Identifier: Apache-2.0
"""Facts of NIXL, its backends and their libraries: versions, files, and what is missing."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.plain import from_plain
from pytest_nixl.core.resource_limits import shortage
from pytest_nixl.host.loaded_libraries import etcd_client_among, libraries_of_nixl
from pytest_nixl.host.recorded_tree import Fact, FactsRoot
from pytest_nixl.host.ucx_rdma import UcxRdma, other_abi
from pytest_nixl.nixl.agent import NixlAgent
from pytest_nixl.nixl.backends.libraries import LOADED, lacking
from pytest_nixl.nixl.installed import wheel_damage
from pytest_nixl.processes.hosts import FACTS, LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.processes.worker_errors import WorkerDiedError

if TYPE_CHECKING:
    from pytest_nixl.processes.worker_process import Worker

#: The time that creating a backend may take, in seconds.
_BACKEND_SECONDS = 60.0
_BY_HAND = (
    "create an agent with that backend by hand, with NIXL_LOG_LEVEL=info and UCX_LOG_LEVEL=info, and read the log"
)
#: The same if the process has two copies of UCX, in seconds.
_BACKEND_SECONDS_WITH_TWO = 5.0
#: Why the telemetry of a transfer is unknown if this process made none.
NOT_TRIED = "no transfer was tried"
_HASH = re.compile(r"(?P<name>lib[\w+.-]+?)(?:-[0-9a-f]{8})?\.so(?:\.|$)")
#: What the loader says of a file of LD_PRELOAD that it ignores.
_NOT_PRELOADED = re.compile(r"object '(.*)' from LD_PRELOAD cannot be preloaded(?: \((.*)\))?: ignored")
_UNUSED = re.compile(r"UCX +WARN +unused environment variables?: (.*)")
_UCX_LINE = re.compile(r"^\[[^]]*\] *\[[^]]*\].*? UCX +(?:WARN|ERROR) +(.*?)\s*$", re.MULTILINE)
_EFA_INSTALLER = "/opt/amazon/efa_installed_packages"


@dataclass(frozen=True)
class LoadedLibrary:
    """A library that a process with NIXL has loaded, such as ``libucs`` from ``/usr/lib/libucs.so.0``."""

    name: str
    path: str


@dataclass(frozen=True)
class Lacking:
    """A library, or symbol versions of one, that a plugin needs and that are missing.

    :param versions: the missing symbol versions; empty if the library itself is missing.
    :param words: the same as a sentence.
    """

    soname: str
    versions: tuple[str, ...]
    words: str


@dataclass(frozen=True)
class BackendFacts:
    """The result of creating a backend.

    :param plugin: the path of its plugin; empty if there is none.
    :param release: the version of the package of NIXL that has the plugin; empty if none has it.
    :param missing: what its libraries lack.
    :param error: why it could not be created; empty if it was.
    :param remedy: what to do about the error.
    :param memories: the memory types that it supports, such as ``DRAM``.
    :param said: UCX's warnings and errors on stderr, without time and source position.
    :param cuda_lacks: what UCX's CUDA modules lack, in a sentence; empty if nothing.
    :param cuda_runtime: the path of the CUDA runtime, if only a worker of pytest-nixl finds it; otherwise empty.
    """

    name: str
    plugin: str
    missing: tuple[Lacking, ...]
    error: str
    remedy: str
    memories: tuple[str, ...]
    said: tuple[str, ...] = ()
    release: str = ""
    cuda_lacks: str = ""
    cuda_runtime: str = ""


@dataclass(frozen=True)
class Software:
    """The software of a host, as a worker with NIXL loaded reports it.

    :param nixl_remedy: what to do if NIXL could not be loaded.
    :param etcd_client: the path of etcd's client library.
    :param etcd_client_patched: whether that library skips the validation of addresses.
    :param plugins: the names of NIXL's plugins.
    :param backends: the result of creating each requested backend.
    :param libraries: the libraries that the worker has loaded and that NIXL uses.
    :param unused: the variables of :func:`unused_variables`.
    :param ucx_variables: all variables that this UCX knows; empty if it was not loaded.
    :param fabric_variables: all variables that this libfabric knows; empty if it was not loaded.
    :param nixl_variables: all variables that this NIXL knows; empty if it was not loaded.
    :param advertised: the IPv4 addresses that an agent's metadata contains.
    :param nixlbench: the path of nixlbench.
    :param nixlbench_fault: why nixlbench does not start; empty if it does.
    :param telemetry: the bytes in the telemetry of a transfer within one agent; why not, if it could not be read.
    :param ucx_rdma: what UCX offers of the RDMA devices; None if there are none, or if it was not asked.
    """

    python: Fact[str]
    nixl: Fact[str]
    nixl_package: Fact[str]
    nixl_file: Fact[str]
    nixl_remedy: str
    ucx: Fact[str]
    libfabric: Fact[str]
    efa_installer: Fact[str]
    etcd_client: Fact[str]
    etcd_client_patched: Fact[bool]
    plugins: tuple[str, ...]
    backends: tuple[BackendFacts, ...]
    libraries: tuple[LoadedLibrary, ...]
    unused: dict[str, str]
    ucx_variables: tuple[str, ...]
    fabric_variables: tuple[str, ...]
    nixl_variables: tuple[str, ...]
    advertised: tuple[str, ...]
    nixlbench: Fact[str]
    nixlbench_fault: str
    telemetry: Fact[int]
    ucx_rdma: UcxRdma | None

    def backend(self, name: str) -> BackendFacts | None:
        """Return the result of creating a backend; None if it was not requested."""
        return next((backend for backend in self.backends if backend.name == name), None)

    def copies(self) -> Mapping[str, tuple[str, ...]]:
        """Return the paths of libraries that the process loaded more than once, by name."""
        copies: dict[str, tuple[str, ...]] = {}
        for library in self.libraries:
            copies[library.name] = (*copies.get(library.name, ()), library.path)
        return {name: paths for name, paths in copies.items() if len(paths) > 1}


@contextlib.contextmanager
def nixl_worker(root: FactsRoot) -> Iterator[Worker | None]:
    """Start a worker, which loads NIXL while the caller goes on, and end it at the end of the block.

    :param root: this machine, or a recorded tree, for which there is no worker.
    """
    if not root.live:
        yield None
        return
    # Without etcd variables, because the agent would wait for an etcd server that it does not need.
    environment = {"NIXL_ETCD_ENDPOINTS": None, "NIXL_ETCD_NAMESPACE": None, "UCX_WARN_UNUSED_ENV_VARS": "y"}
    worker = LocalHost(supervisor()).start(FACTS, environment, _BACKEND_SECONDS)
    worker.by_option = False
    try:
        yield worker
    finally:
        worker.kill()


def read_software(
    root: FactsRoot,
    backends: Sequence[str],
    nixlbench: str = "",
    *,
    worker: Worker | None,
    loaded: Callable[[Sequence[str]], None] = lambda libraries: None,
) -> Software:
    """Create the backends in a worker, and return the facts.

    :param root: this machine, or a recorded tree.
    :param backends: the names of the backends to create.
    :param nixlbench: the path of nixlbench; empty to search PATH.
    :param worker: of this machine, from :func:`nixl_worker`; it is ended.
    :param loaded: called with the paths of all loaded libraries before the worker creates the backends.
    """
    nixl = root.ask("nixl", lambda: {} if worker is None else _ask_nixl(worker, backends, loaded))
    bench = root.ask("nixlbench", lambda: _ask_nixlbench(nixlbench))
    source, client = "a worker that loaded NIXL", nixl.get("etcd_client", {})
    reason = nixl.get("why", "")
    client_path, no_client = client.get("path") or None, reason or "NIXL was built without etcd"
    fabric = [backend["versions"].get("libfabric") for backend in nixl.get("backends", {}).values()]
    installer = re.search(r"EFA installer version:[ \t]*(\S+)", root.read(_EFA_INSTALLER) or "")
    transfer = nixl.get("telemetry", {})
    return Software(
        python=Fact.read(nixl.get("python"), source, reason),
        nixl=Fact.read(nixl.get("nixl"), source, reason),
        nixl_package=Fact.read(nixl.get("nixl_package"), source, reason),
        nixl_file=Fact.read(nixl.get("nixl_module"), source, reason),
        nixl_remedy=nixl.get("remedy", ""),
        ucx=Fact.read(nixl.get("ucx") or None, source, reason or "UCX was not loaded"),
        libfabric=Fact.read(next(filter(None, fabric), None), source, reason or "libfabric was not loaded"),
        efa_installer=Fact.read(installer and installer[1], _EFA_INSTALLER, "it is not installed"),
        etcd_client=Fact.read(client_path, source, no_client),
        etcd_client_patched=Fact.read(client.get("patched") if client_path else None, client_path or source, no_client),
        plugins=tuple(nixl.get("plugins", ())),
        backends=tuple(_backend(name, backend) for name, backend in nixl.get("backends", {}).items()),
        libraries=tuple(library(path) for path in nixl.get("libraries", ())),
        unused=nixl.get("unused", {}),
        ucx_variables=tuple(nixl.get("ucx_variables", ())),
        fabric_variables=tuple(nixl.get("fabric_variables", ())),
        nixl_variables=tuple(nixl.get("nixl_variables", ())),
        advertised=tuple(nixl.get("advertised", ())),
        nixlbench=Fact.read(bench.get("path"), bench.get("path") or "PATH", bench.get("why", "")),
        nixlbench_fault=bench.get("fault", ""),
        telemetry=Fact(
            transfer.get("bytes"),
            "get_xfer_telemetry() of a transfer by UCX",
            transfer.get("error", "" if transfer else NOT_TRIED),
        ),
        ucx_rdma=from_plain(UcxRdma, nixl["ucx_rdma"]) if nixl.get("ucx_rdma") else None,
    )


def library(path: str) -> LoadedLibrary:
    """Name a library by its path, without hash and version: ``libucs-14c218c5.so.0.0.0`` is ``libucs``."""
    name = os.path.basename(path)
    match = _HASH.match(name)
    return LoadedLibrary(match["name"] if match else name.partition(".so")[0], path)


def two_of_ucx(paths: Sequence[str]) -> bool:
    """Return whether one of UCX's libraries occurs twice."""
    names = [library(path).name for path in paths]
    return any(names.count(name) > 1 for name in ("libucs", "libucp", "libuct"))


def unused_variables(log: str) -> dict[str, str]:
    """Return the variables in UCX's warning about unused variables, each with the name that UCX suggests or nothing.

    LD_PRELOAD is among them, with the loader's reason, if the loader ignores a file of it.

    :param log: the stderr of a process with UCX.
    """
    unused: dict[str, str] = {}
    for file, reason in _NOT_PRELOADED.findall(log):
        unused["LD_PRELOAD"] = f"{file} ({reason})" if reason else file
    for listed in _UNUSED.findall(log):
        for part in listed.split(";"):
            match = re.match(r"\s*(UCX_\w+)(?: \(maybe: (\w+)\?\))?", part)
            if match:
                unused[match[1]] = match[2] or ""
    return unused


def ucx_warnings(log: str) -> list[str]:
    """Return UCX's warnings and errors, each once, except those about unused variables.

    :param log: the stderr of a process with UCX.
    """
    return [line for line in dict.fromkeys(_UCX_LINE.findall(log)) if not line.startswith("unused environment")]


def _backend(name: str, answer: dict[str, Any]) -> BackendFacts:
    versions = answer["versions"]
    derived = {"name": name, "cuda_lacks": lacking(versions), "cuda_runtime": versions.get(LOADED, "")}
    return from_plain(BackendFacts, {**{key: answer[key] for key in answer if key != "versions"}, **derived})


def _ask_nixl(worker: Worker, backends: Sequence[str], loaded: Callable[[Sequence[str]], None]) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = {**worker.versions, "backends": {}}
        agent = NixlAgent.within(worker, backends=[], name="pytest-nixl-facts", telemetry=True)
    except NixlPluginError as error:
        reason, damage = _reason(error), wheel_damage() or shortage()
        if damage is None or damage[0] in reason:
            return {"why": reason, "remedy": error.remedy}
        return {"why": f"{reason}; {damage[0]}", "remedy": damage[1]}
    try:
        nixl = {name: answer[name] for name in ("nixl", "nixl_package")}
        for name in backends:
            prepared = _run(agent, answer, "prepare", name=name, nixl=nixl)
            answer["backends"][name] = prepared["backend"]
            answer["libraries"] = prepared["libraries"]
        loaded(answer.get("libraries", []))
        ucx = answer["backends"].get("UCX")
        if ucx is not None and ucx["plugin"] and not ucx["missing"]:
            answer["ucx_rdma"] = _run(agent, answer, "ask_rdma", plugin=ucx["plugin"])
        for name, backend in answer["backends"].items():
            if not backend["error"]:
                backend |= _run(agent, answer, "make", name=name)
        if answer["backends"].get("UCX", {}).get("memories"):
            answer["telemetry"] = _run(agent, answer, "telemetry", name="UCX")
        plugins = [answer_of["plugin"] for answer_of in answer["backends"].values()]
        answer |= _run(agent, answer, "look", plugins=plugins)
    except NixlPluginError as error:
        # The worker ended: the error applies to the backend that was being created, and to those not tried.
        failure = {
            "error": _reason(error),
            "remedy": _BY_HAND if " below" in error.remedy else error.remedy or _BY_HAND,
        }
        untold = {"plugin": "", "missing": [], "memories": [], "versions": {}, "error": "", "remedy": ""}
        for name in backends:
            backend = answer["backends"].setdefault(name, untold)
            if not (backend["memories"] or backend["error"]):
                answer["backends"][name] = {**backend, **failure}
    finally:
        worker.kill()
    faulty = [backend for backend in answer["backends"].values() if backend["error"] or backend["missing"]]
    if faulty and (damage := wheel_damage() or shortage()):
        for backend in faulty:
            if damage[0] not in backend["error"]:
                backend["error"] = "; ".join(filter(None, (backend["error"], damage[0])))
            backend["remedy"] = damage[1]
    client = etcd_client_among(answer.get("libraries", []))
    library = {"path": client.path, "patched": client.patched} if client else {"path": "", "patched": False}
    if "UCX" in answer["backends"]:
        answer["backends"]["UCX"]["said"] = ucx_warnings(worker.output())
    if answer.get("ucx_rdma"):
        answer["ucx_rdma"]["other_abi"] = other_abi(worker.output())
    return {**answer, "etcd_client": library, "unused": unused_variables(worker.output())}


def _reason(error: NixlPluginError) -> str:
    """Return the reason of an error, with the last line of a worker that has died."""
    return error.with_last_line if isinstance(error, WorkerDiedError) else error.reason


def _run(agent: NixlAgent, answer: dict[str, Any], function: str, **arguments: Any) -> Any:
    """Call a function of ``worker_probe`` in the worker, and keep the list of its loaded libraries in case it dies."""
    worker = agent.worker
    pending = worker.request(
        "run", agent=agent.ref, function=f"pytest_nixl.host.worker_probe:{function}", arguments=arguments
    )
    maps, hurried = Path(f"/proc/{worker.pid}/maps"), False
    while not select.select([worker], [], [], 0.1)[0] and time.monotonic() < pending.deadline:
        with contextlib.suppress(OSError):  # it has ended
            answer["libraries"] = libraries_of_nixl(maps.read_text()) or answer.get("libraries", [])
        if two_of_ucx(answer.get("libraries", [])) and not hurried:
            # Two copies of UCX usually hang the worker.
            hurried, pending.deadline = True, min(pending.deadline, time.monotonic() + _BACKEND_SECONDS_WITH_TWO)
    return pending.result()


def _ask_nixlbench(requested: str) -> dict[str, str]:
    path = requested or shutil.which("nixlbench")
    if not path:
        return {"why": "nixlbench is not on PATH"}
    try:
        done = subprocess.run(
            [path, "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            check=False,
        )
    except OSError as error:
        return {"path": path, "fault": error.strerror or str(error)}
    except subprocess.TimeoutExpired:
        return {"path": path, "fault": "it did not print its help within 20 s"}
    if "etcd" in done.stdout + done.stderr and done.returncode in (0, 1):  # gflags exits with 1 after --help
        return {"path": path}
    output = (done.stderr or done.stdout).strip().splitlines()
    return {"path": path, "fault": output[-1] if output else f"it exited with code {done.returncode} and no output"}
