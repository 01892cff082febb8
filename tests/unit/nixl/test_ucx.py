# SPDX-License-Identifier: Apache-2.0
"""The transports are read from UCX's protocol report."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.model.memory import HOST, MemoryPair
from pytest_nixl.nixl.backends import driver_standin, libraries, ucx
from pytest_nixl.nixl.backends.libraries import DRIVER, LACKS, LOADED, Finder, LibraryError, RequiredLibrary
from pytest_nixl.nixl.backends.ucx import BACKEND, UcxBackend, protocol, taken_for_host

RECORDED = Path(__file__).resolve().parents[3] / "fixtures" / "ucx"


@pytest.mark.parametrize(
    ("log", "op", "transports"),
    [
        ("loopback-default", "WRITE", ("cma/memory",)),
        ("loopback-default", "READ", ("cma/memory",)),
        ("loopback-tcp", "WRITE", ("tcp/lo", "tcp/eth0")),
        ("loopback-tcp", "READ", ("tcp/lo",)),
    ],
)
def test_recorded_reports_name_the_transport(log: str, op: str, transports: tuple[str, ...]) -> None:
    assert BACKEND.transports((RECORDED / f"{log}.log").read_text(), op, 65536) == transports


CUDA_IPC, STAGED = ("zero-copy", ("cuda_ipc/cuda",)), ("software emulation", ("tcp/lo",))


@pytest.mark.parametrize(
    ("nvlinks", "op", "memory", "expected"),
    [
        (0, "WRITE", "VRAM:VRAM", CUDA_IPC),
        (0, "READ", "VRAM:VRAM", STAGED),
        (18, "WRITE", "VRAM:VRAM", CUDA_IPC),
        (18, "READ", "VRAM:VRAM", CUDA_IPC),
        *(
            (links, op, memory, STAGED)
            for links in (0, 18)
            for op in ("WRITE", "READ")
            for memory in ("DRAM:VRAM", "VRAM:DRAM")
        ),
    ],
)
def test_recorded_tables_of_gpu_memory_are_read(
    nvlinks: int, op: str, memory: str, expected: tuple[str, tuple[str, ...]]
) -> None:
    """The tables of UCX 1.23 about remote memory, recorded on a stand-in for the driver with this many NVLinks."""
    log = (RECORDED / f"vram-nvlinks-{nvlinks}.log").read_text()
    pair = MemoryPair.parse(memory)
    assert (protocol(log, op, 65536, pair), BACKEND.transports(log, op, 65536, pair)) == expected
    assert BACKEND.mistaken(log, op, pair) == ""


TABLE = """
[1.0] [h:1 :0]   | {scope} cfg#1 |
[1.0] [h:1 :0]   | remote memory write by ucp_put*(multi) from host memory to host |
[1.0] [h:1 :0]   +--------------+-------------+------------------+
[1.0] [h:1 :0]   |     0..2K    | short       | {short} |
[1.0] [h:1 :0]   |  2049..64K   | copy-in     | {copy}  |
[1.0] [h:1 :0]   | 65537..inf   | zero-copy   | {zero}  |
"""


def table(scope: str, name: str) -> str:
    return TABLE.format(scope=scope, short=name, copy=name, zero=name)


RAILS = TABLE.format(
    scope="inter-node", short="rc_mlx5/mlx5_0:1", copy="ud/mlx5_0:1",
    zero="50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1",
)  # fmt: skip
FIRST, BOTH = ("rc_mlx5/mlx5_0:1",), ("rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1")
UNITS = "| inter-node |\n| remote memory write by ucp_put |\n" + "".join(
    f"| {sizes} | x | t/{name} |\n" for name, sizes in enumerate(("0", "1..1023", "1K", "2K..1M", "3M..1G", "2G..inf"))
)


#: Tables of an older release, which has scope and operation on one line.
OF_OLDER = "".join(
    f"| context {scope} cfg | remote memory write by ucp_put |\n| 0..inf | x | {name} |\n"
    for scope, name in (("inter-node", "tcp/a"), ("self", "cma/memory"))
)


@pytest.mark.parametrize(
    ("log", "block", "transports"),
    [
        *[(RAILS, block, FIRST) for block in (1, 2048)],
        *[(RAILS, block, ("ud/mlx5_0:1",)) for block in (2049, 65536)],
        *[(RAILS, block, BOTH) for block in (65537, 1 << 40)],
        *[(UNITS, block, (f"t/{name}",)) for block, name in ((0, 0), (1, 1), (1023, 1), (1024, 2), (2048, 3),
          (1 << 20, 3), (3 << 20, 4), (1 << 30, 4), (2 << 30, 5), (1 << 50, 5))],
        *[(UNITS, block, ()) for block in (1025, (1 << 20) + 1, (1 << 30) + 1)],
        # A table of another agent comes before that of the agent itself, and the last of them is used.
        (table("inter-node", "tcp/a") + table("self", "cma/memory"), 4096, ("tcp/a",)),
        (table("self", "cma/memory") + table("intra-node", "tcp/a"), 4096, ("tcp/a",)),
        (table("self", "cma/memory"), 4096, ("cma/memory",)),
        (table("inter-node", "tcp/a") + table("inter-node", "tcp/b"), 4096, ("tcp/b",)),
        (OF_OLDER, 4096, ("tcp/a",)),
        *[(log, 4096, ()) for log in ("", "no table at all\n", TABLE[:90])],
        *[(UNITS + f"| {cells} |\n", 1025, ()) for cells in ("K..1M | x | t/a", "..2K | x | t/a", "1025..K | x | t/a",
          "0..2KB | x | t/a", "x0..2K | x | t/a", "0..2K | x | 1t/a", "0..2K | x | t/")],
        (UNITS + "| 1025 | x | on t/a, a.b/c:1-d and tcp/lo |\n", 1025, ("t/a", "b/c:1-d", "tcp/lo")),
    ],
)  # fmt: skip
def test_the_transports_are_those_of_the_range_with_the_block(
    log: str, block: int, transports: tuple[str, ...]
) -> None:
    # Written by hand in the form of the recorded reports.
    assert BACKEND.transports(log, "WRITE", block) == transports
    assert BACKEND.transports(log, "READ", block) == ()
    assert protocol(log, "READ", block, HOST) == ""


def test_report_that_is_cut_off_anywhere_never_raises() -> None:
    log = (RECORDED / "loopback-tcp.log").read_text()
    for length in range(0, len(log), 7):
        assert set(BACKEND.transports(log[:length], "READ", 65536)) <= {"tcp/lo", "tcp/eth0", "tcp/l"}


#: One table of a transfer to another process, as printed by UCX 1.21 and newer, and by older releases, which print
#: scope and operation on one line. They have what was not recorded, such as RDMA. Written by hand from UCX's
#: proto_debug.c, its gtest (test_ucp_proto_mock.cc, ``{1, INF, "zero-copy", "cuda_ipc/cuda"}``) and reports in NIXL's
#: issues 1195 and 1240, without a GPU.
NEWER = """
[1.0] [h:1 :0]   | a intra-node cfg#1 |
[1.0] [h:1 :0]   | {heading} |
[1.0] [h:1 :0]   | Range  | Description | Config |
[1.0] [h:1 :0]   | 0..inf | zero-copy   | {config} |
"""
OLDER = """
[1.0] [h:1:0]   | ucp_context_0 intra-node cfg#1 | {heading}    |
[1.0] [h:1:0]   +--------------------------------+--------------+-------------+
[1.0] [h:1:0]   |                         0..inf | zero-copy    | {config} |
"""
HEADINGS = {
    "DRAM:DRAM": "remote memory write by ucp_put* from host memory to host",
    "DRAM:VRAM": "remote memory write by ucp_put*(fast-completion) from host memory to cuda/dev[0]",
    "VRAM:DRAM": "remote memory write by ucp_put*(multi) from cuda/GPU0 to host",
    "VRAM:VRAM": "remote memory write by ucp_put* from cuda/GPU0 to cuda/GPU1",
}
CONFIGS = {
    "DRAM:DRAM": ("cma/memory", ("cma/memory",)),
    "DRAM:VRAM": ("rc_mlx5/mlx5_0:1 50% on path0 and 50% on path1", ("rc_mlx5/mlx5_0:1",)),
    "VRAM:DRAM": ("72% on rc_mlx5/mlx5_2:1 and 28% on rc_mlx5/mlx5_3:1", ("rc_mlx5/mlx5_2:1", "rc_mlx5/mlx5_3:1")),
    "VRAM:VRAM": ("cuda_ipc/cuda", ("cuda_ipc/cuda",)),
}


@pytest.mark.parametrize("form", [NEWER, OLDER], ids=["newer", "older"])
@pytest.mark.parametrize("memory", HEADINGS)
def test_table_of_the_memory_is_used(form: str, memory: str) -> None:
    log = "".join(form.format(heading=HEADINGS[name], config=config) for name, (config, _) in CONFIGS.items())
    pair = MemoryPair.parse(memory)
    assert BACKEND.transports(log, "WRITE", 4096, pair) == CONFIGS[memory][1]
    assert BACKEND.transports(log, "READ", 4096, pair) == ()
    assert BACKEND.mistaken(log, "WRITE", pair) == ""


UNKNOWN_MEMORY = (
    *("into host from 1", "into /GPU0 from host", "into host  host"),
    *(" host from cuda", "host from host", "intohost from host"),
)


@pytest.mark.parametrize("form", [NEWER, OLDER], ids=["newer", "older"])
@pytest.mark.parametrize(
    ("memory", "pairs"),
    [
        ("into cuda/GPU0 from host", ["VRAM:DRAM"]),
        ("into host memory from rocm-managed/1", ["DRAM:VRAM"]),
        # If a heading does not name both memory types, its table is used for any.
        *[(text, ["VRAM:DRAM", "DRAM:VRAM", "DRAM:DRAM"]) for text in UNKNOWN_MEMORY],
    ],
)
def test_the_heading_of_a_read_also_has_the_initiators_memory_first(form: str, memory: str, pairs: list[str]) -> None:
    log = form.format(heading=f"remote memory read by ucp_get* {memory}", config="rc_mlx5/mlx5_0:1")
    used = [
        pair
        for pair in ("VRAM:DRAM", "DRAM:VRAM", "DRAM:DRAM")
        if BACKEND.transports(log, "READ", 1, MemoryPair.parse(pair))
    ]
    assert used == pairs


def moved(*memories: str) -> str:
    """Return a log with a table for each of these pairs of memory."""
    return "".join(NEWER.format(heading=HEADINGS[memory], config="cma/memory") for memory in memories)


LOOPBACK = (RECORDED / "loopback-default.log").read_text()


@pytest.mark.parametrize(
    ("log", "requested", "wrong"),
    [
        (moved("DRAM:DRAM"), "VRAM:VRAM", "initiator's VRAM and target's VRAM"),
        (moved("DRAM:DRAM"), "DRAM:VRAM", "target's VRAM"),
        (moved("DRAM:VRAM"), "VRAM:VRAM", "initiator's VRAM"),
        (moved("VRAM:VRAM"), "DRAM:DRAM", ""),
        (moved("DRAM:DRAM", "DRAM:VRAM"), "VRAM:VRAM", "initiator's VRAM"),
        (moved("DRAM:VRAM", "DRAM:DRAM"), "DRAM:VRAM", ""),
        # No table, one without memory types, and those about the agent itself.
        ("", "VRAM:VRAM", ""),
        (NEWER.format(heading="remote memory write by ucp_put*", config="cma/memory"), "VRAM:VRAM", ""),
        (LOOPBACK[: LOOPBACK.index("intra-node")], "VRAM:VRAM", ""),
        (LOOPBACK, "VRAM:VRAM", "initiator's VRAM and target's VRAM"),
    ],
)
def test_gpu_memory_that_was_moved_as_host_memory_is_reported(log: str, requested: str, wrong: str) -> None:
    text = f"UCX moved the {wrong} as host memory" if wrong else ""
    assert BACKEND.mistaken(log, "WRITE", MemoryPair.parse(requested)) == text


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("E1121 ucx_utils.cpp:674] nixlUcxContext a: VRAM memory is detected as host by UCX. UCX is likely not "
         "configured with CUDA/ROCm support. VRAM registration cannot proceed.",
         "VRAM memory is detected as host by UCX"),
        ("E1121 ucx_utils.cpp:200] failed to ucp_mem_map: Invalid parameter", ""),
        ("A memory is detected as host by UCX. B memory is detected as host by UCX.",
         "B memory is detected as host by UCX"),
    ],
)  # fmt: skip
def test_message_of_nixl_about_refused_gpu_memory_is_parsed(log: str, message: str) -> None:
    assert taken_for_host(log) == message


GRACE = "UCX_MEM_BISTRO_GRACE_DURATION"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package of NIXL, whose UCX knows no variable."""
    plugins = tmp_path / ".nixl_cu12.mesonpy.libs" / "plugins"
    plugins.mkdir(parents=True)
    (plugins / "libplugin_UCX.so").touch()
    (tmp_path / "nixl_cu12.libs").mkdir()
    (tmp_path / "nixl_cu12.libs" / "libucs-14c218c5.so.0.0.0").write_bytes(b"\0BISTRO_FORCE_FAR_JUMP\0")
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    monkeypatch.delenv(GRACE, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "before", "after"),
    [
        (b"\0BISTRO_GRACE_DURATION\x0050ms\0", None, "1ms"),
        (b"\0BISTRO_GRACE_DURATION\x0050ms\0", "20ms", "20ms"),  # the deployment's own value stays
        (b"\0BISTRO_FORCE_FAR_JUMP\0", None, None),  # an older UCX would warn
    ],
    ids=["known", "values", "unknown"],
)
def test_worker_shortens_the_wait_of_a_ucx_that_knows_how(
    content: bytes, before: str | None, after: str | None, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "nixl_cu12.libs" / "libucs-14c218c5.so.0.0.0").write_bytes(content)
    (site / "nixl_cu12.libs" / "libucs-00000000.so.0").touch()
    if before is not None:
        monkeypatch.setenv(GRACE, before)
    BACKEND.load({"nixl_package": "nixl-cu12", "nixl": "1.5.1"})
    assert os.environ.get(GRACE) == after


#: Print the functions of libc whose code changes when the plugin is loaded.
REPLACED = """
import ctypes, json, sys
libc = ctypes.CDLL(None)
names = ("mmap", "munmap", "mremap", "madvise", "shmat", "shmdt", "brk", "sbrk")
def code():
    return {name: ctypes.string_at(ctypes.cast(getattr(libc, name), ctypes.c_void_p).value, 8) for name in names}
before = code()
ctypes.CDLL(sys.argv[1])
after = code()
print(json.dumps([name for name in names if before[name] != after[name]]))
"""


def test_real_ucx_replaces_the_same_functions_whatever_the_wait() -> None:
    package = importlib.util.find_spec("nixl_cu12")  # pytest's process does not load NIXL
    if package is None or package.origin is None:
        pytest.skip("this environment has no package nixl-cu12")
    [plugin] = Path(package.origin).parents[1].glob(".nixl_cu12.mesonpy.libs/plugins/libplugin_UCX.so")
    replaced = []
    for variables in ({}, {GRACE: "1ms"}):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")} | variables
        done = subprocess.run(
            [sys.executable, "-c", REPLACED, str(plugin)], env=environment, capture_output=True, text=True, check=True
        )
        replaced.append(json.loads(done.stdout))
    assert replaced[0] == replaced[1]
    assert "munmap" in replaced[0]


@pytest.mark.parametrize(
    ("version", "transport", "cuda", "reason"),
    [
        ("1.5.0", "", "no CUDA memory", "no CUDA memory: NIXL refuses UCX (another cause)"),
        ("1.4.1", "", "no CUDA memory", ""),
        ("1.4.1", "no transport", "no CUDA memory", "no transport: NIXL refuses UCX (another cause)"),
        ("1.5.0", "no transport", "no CUDA memory", "no transport: NIXL refuses UCX (another cause)"),
        ("1.5.0", "", "", ""),
    ],
)
def test_a_value_of_ucx_tls_is_blamed_only_if_this_nixl_refuses_it(
    version: str, transport: str, cuda: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx, "cuda_fault", lambda environ: (cuda, "add it"))
    monkeypatch.setattr(ucx, "transport_fault", lambda environ: transport)
    backend = UcxBackend()
    backend.load({"nixl": version, "nixl_package": "no-such-package"})
    with backend.creating():
        pass
    with pytest.raises(NixlPluginError if reason else RuntimeError) as caught, backend.creating():
        raise RuntimeError("another cause")
    if isinstance(caught.value, NixlPluginError):
        assert (caught.value.reason, caught.value.remedy) == (reason, "`unset UCX_TLS`" if transport else "add it")
    assert backend.environment({}) == {"UCX_PROTO_INFO": "y"}


@pytest.mark.parametrize("standin", [False, True])
def test_the_libraries_of_the_plugin_are_loaded_before_those_of_its_modules(
    site: Path, monkeypatch: pytest.MonkeyPatch, standin: bool
) -> None:
    log: list[object] = []
    plugin = str(site / ".nixl_cu12.mesonpy.libs/plugins/libplugin_UCX.so")
    origin = {driver_standin.RECORDED: "a stand-in"} if standin else {"origin": "here"}

    def locate(finder: Finder, library: object, soname: str, of: str) -> tuple[list[str], dict[str, str]]:
        log.append((finder.backend, soname, of == plugin))
        if soname == "libgone.so":
            raise LibraryError("it is gone", "install it")
        return [f"/lib/{soname}", "/lib/other"], origin

    monkeypatch.setattr(ucx, "needed", lambda path: [(DRIVER, "libcuda.so.1")])
    monkeypatch.setattr(ucx, "locate", locate)
    monkeypatch.setattr(ucx, "open_library", lambda library, path, backend: log.append((library, path, backend)))

    def load(finder: Finder, *values: str) -> dict[str, str]:
        log.append(values)
        return {"modules": "loaded"}

    monkeypatch.setattr(libraries, "load", load)
    nixl, name = {"nixl_package": "nixl-cu12", "nixl": "0.9.0"}, "UCX of nixl-cu12 0.9.0"
    assert UcxBackend().load(nixl) == (origin if standin else {**origin, "modules": "loaded"})
    opened = (DRIVER, "/lib/libcuda.so.1", name)
    modules = [] if standin else [(plugin, "nixl-cu12", name)]
    assert log == [(name, "libcuda.so.1", True), opened, *modules]
    monkeypatch.setattr(ucx, "needed", lambda path: [(DRIVER, "libgone.so")])
    with pytest.raises(LibraryError) as caught:
        UcxBackend().load(nixl)
    assert (caught.value.reason, caught.value.remedy) == (
        "it is gone", "install it; or install NIXL 0.10 or newer, whose UCX does not need it"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loaded", "named", "missing", "expected", "opened"),
    [
        ((), {}, (), {}, []),
        (("libcuda.so",), {}, (), {LOADED: "/lib/libcudart.so.12"}, ["libcudart.so.12", "libnvidia-ml.so.1"]),
        (("libcuda.so", "libcudart", "libnvidia-ml"), {}, (), {}, []),
        (("libcuda.so", "libcudart"), {"PYTEST_NIXL_LIBCUDART": "/mine"}, (), {LOADED: "/lib/libcudart.so.12"},
         ["libcudart.so.12", "libnvidia-ml.so.1"]),
        (("libcuda.so",), {}, ("libcudart", "libnvidia-ml"),
         {LACKS: "libucm_cuda needs libcudart.so.12, libuct_cuda needs libnvidia-ml.so.1"}, []),
        (("libcuda.so",), {}, ("libnvidia-ml",),
         {LOADED: "/lib/libcudart.so.12", LACKS: "libuct_cuda needs libnvidia-ml.so.1"}, ["libcudart.so.12"]),
    ],
)  # fmt: skip
def test_what_the_cuda_modules_of_ucx_lack_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: tuple[str, ...], named: dict[str, str],
    missing: tuple[str, ...], expected: dict[str, str], opened: list[str],
) -> None:  # fmt: skip
    paths: list[str] = []

    def candidates(library: RequiredLibrary, soname: str) -> list[str]:
        if soname.startswith(missing):
            raise LibraryError("it is gone")
        return [f"/lib/{soname}", "/lib/other"]

    for module, soname in (("libucm_cuda", "libcudart.so.12"), ("libuct_cuda", "libnvidia-ml.so.1")):
        (tmp_path / f"{module}.so.0").write_bytes(b"\0%b\0" % soname.encode())
        (tmp_path / f"{module}.so.0.0.0").write_bytes(b"only the first counts")
    finder: Any = SimpleNamespace(environ={"UCX_MODULE_DIR": str(tmp_path), **named}, candidates=candidates)
    monkeypatch.setattr(libraries, "loader_finds", lambda soname: bool(loaded) and soname.startswith(loaded))
    monkeypatch.setattr(libraries, "open_library", lambda _, path, backend: paths.append(f"{path} {backend}"))
    assert libraries.load(finder, "/p.so", "nixl-cu12", "UCX") == expected
    assert paths == [f"/lib/{soname} UCX" for soname in opened]
    text = libraries.lacking(expected)
    lacks = expected.get(LACKS, "")
    assert text == (f"UCX cannot load its CUDA modules: {lacks}, which cannot be found or loaded" if lacks else "")
    remedy = libraries.remedy(text)
    advice = [
        phrase for phrase in ("pip install nvidia-cuda-runtime", "NVIDIA_DRIVER_CAPABILITIES") if phrase in remedy
    ]
    assert len(advice) == len(missing)
