# SPDX-License-Identifier: Apache-2.0
"""Which libraries of NIXL a process has loaded or would load, from texts of /proc and of ldd."""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path

import pytest

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.host.loaded_libraries import (
    EtcdLibrary,
    LiveNixl,
    etcd_client_among,
    libraries_of_nixl,
    linked_etcd_client,
    live_nixl,
    loaded_etcd_client,
)

#: The form of proc(5): addresses, permissions, offset, device, inode and path.
MAPS = """\
560000000000-560000001000 r-xp 00000000 fe:00 11 /usr/lib/libfabric.so.1/python3.so
7f0000000000-7f0000001000 r--p 00000000 fe:00 12                         /opt/with space/libucp.so.0.0.0
7f0000001000-7f0000002000 r-xp 00001000 fe:00 12                         /opt/with space/libucp.so.0.0.0
7f0000002000-7f0000003000 r-xp 00000000 fe:00 13                         /opt/libnixl.so (deleted)
7f0000003000-7f0000004000 r--p 00000000 fe:00 14                         /usr/lib/locale/libcuda
7f0000004000-7f0000005000 r--p 00000000 fe:00 15                         /usr/lib/notlibucs.so.0
7f0000005000-7f0000006000 rw-p 00000000 00:00 0
7f0000006000-7f0000007000 r-xp 00000000 fe:00 16                         /libucs.so.0
7f0000007000-7f0000008000 rw-p 00000000 00:00 0                          [anon:/libuct.so]
"""
NAMES = (
    "nixl plugin_UCX ucp ucs uct ucm fabric ibverbs mlx5 efa rdmacm nl-route-3 etcd-cpp-api cuda cudart gdrapi hwloc "
    "grpc++ nvidia-ml"
)


def test_libraries_are_named_once_by_their_whole_paths_in_the_order_of_their_addresses() -> None:
    libraries = libraries_of_nixl(MAPS)
    assert libraries == ["/opt/with space/libucp.so.0.0.0", "/opt/libnixl.so (deleted)", "/libucs.so.0"]
    paths = [f"/lib/lib{name}.so.1" for name in NAMES.split()]
    assert libraries_of_nixl("".join(f"7f-80 r-xp 0 0:0 1 {path}\n" for path in (*paths, "/lib/libucx.so"))) == paths


def library(folder: Path, name: str = "libetcd-cpp-api-core.so", content: bytes = b"\x7fELF") -> EtcdLibrary:
    """Write a file, and return what is read of it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    patched = b"ETCD_CPP_API_DISABLE_URI_VALIDATION" in content
    return EtcdLibrary(str(folder / name), hashlib.sha256(content).hexdigest(), patched)


def test_the_etcd_client_that_a_process_has_loaded_is_read(tmp_path: Path) -> None:
    assert loaded_etcd_client(os.getpid()) is None
    expected = library(tmp_path / "with space", content=b"\x7fELF ETCD_CPP_API_DISABLE_URI_VALIDATION\0")
    with open(expected.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert loaded_etcd_client(os.getpid()) == expected
        os.unlink(expected.path)
        updated = library(tmp_path / "with space")
        assert loaded_etcd_client(os.getpid()) == updated
        os.unlink(expected.path)
        with pytest.raises(NixlPluginError) as refused:
            loaded_etcd_client(os.getpid())
    reason = f"{expected.path} cannot be read (No such file or directory)"
    assert (refused.value.reason, refused.value.remedy) == (reason, "run pytest as the user that runs NIXL")


def test_the_etcd_client_among_loaded_libraries_is_read(tmp_path: Path) -> None:
    first, other = library(tmp_path), library(tmp_path, "libetcd-cpp-api.so", b"other")
    assert etcd_client_among([f"{tmp_path}/libetcd.so", first.path, other.path]) == first
    assert etcd_client_among(["/libetcd-cpp-api/libucp.so"]) is None


LDD = "#!/bin/sh\n[ $1 = nixlbench ] && printf '\tlibc.so.6 => /libc.so.6 (0x00007f5c)\n%s\n'"


@pytest.mark.parametrize("line", ["\t{} => {}", "\t{} => {} (0x00007f5c00a00000)", "{} => {}"])
def test_the_etcd_client_that_a_program_would_load_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for folder in ("a (good)  lib", "other"):
        expected = library(tmp_path / folder)
        text = line.format("libetcd-cpp-api-core.so", expected.path)
        (tmp_path / "ldd").write_text(LDD.replace("%s", text.replace("\t", "\\t")))
        (tmp_path / "ldd").chmod(0o755)
        assert linked_etcd_client("nixlbench") == expected


def test_a_program_needs_no_etcd_client_or_one_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ldd = tmp_path / "ldd"
    with pytest.raises(NixlPluginError) as refused:
        linked_etcd_client("nixlbench")
    reason = "ldd nixlbench failed: [Errno 2] No such file or directory: 'ldd'"
    assert (refused.value.reason, refused.value.remedy) == (reason, "install ldd (package libc-bin) and put it on PATH")
    for text in ("\tlibx.so => /libx.so", "warning: libetcd-cpp-api.so => /x", "\tmylibetcd-cpp-api.so => /x"):
        ldd.write_text(LDD.replace("%s", text))
        ldd.chmod(0o755)
        assert linked_etcd_client("nixlbench") is None
    ldd.write_text(LDD.replace("%s", "\tlibetcd-cpp-api.so => not found\n\tlibm.so.6 => /libm.so.6"))
    with pytest.raises(NixlPluginError) as refused:
        linked_etcd_client("nixlbench")
    reason = "nixlbench needs libetcd-cpp-api.so, which was not found"
    assert (refused.value.reason, refused.value.remedy) == (reason, "set LD_LIBRARY_PATH as for runs of nixlbench")


LIVE = LiveNixl(11, "vllm serve", ("UCX", "POSIX"), ("mlx5_0", "uverbs2"), {"UCX_TLS": "rc"}, 3, 1024, "2 in /dev")


@pytest.mark.parametrize(
    ("changes", "uses"),
    [
        ({}, "UCX, POSIX; it has opened mlx5_0, uverbs2, UCX_TLS=rc"),
        ({"backends": ("POSIX",), "devices": ()}, "POSIX; it has opened no RDMA device, UCX_TLS=rc"),
        (
            {"devices": (), "variables": {"UCX_TLS": "tcp", "X": "1"}},
            "UCX, POSIX; it has opened no RDMA device, so its transfers between hosts use TCP, UCX_TLS=tcp, X=1",
        ),
        (
            {"backends": ("LIBFABRIC",), "devices": (), "variables": {}},
            "LIBFABRIC; it has opened no RDMA device, so its transfers between hosts use TCP",
        ),
        ({"backends": (), "variables": {}}, "no backend; it has opened mlx5_0, uverbs2"),
        ({"open_files": 80, "most_files": 100}, "UCX, POSIX; it has opened mlx5_0, uverbs2, UCX_TLS=rc"),
        ({"open_files": 80, "most_files": 0}, "UCX, POSIX; it has opened mlx5_0, uverbs2, UCX_TLS=rc"),
        (
            {"open_files": 81, "most_files": 100, "variables": {}},
            "UCX, POSIX; it has opened mlx5_0, uverbs2, and 81 of at most 100 files open (2 in /dev): soon it cannot "
            "open the next one, as if it leaks them",
        ),
    ],
)
def test_what_a_process_with_nixl_uses_is_one_line(changes: dict[str, object], uses: str) -> None:
    live = LiveNixl(**{**LIVE.__dict__, **changes})
    assert str(live) == f"NIXL of pid 11 (vllm serve) uses {uses}"


def process(proc: Path, pid: int, parent: int, **files: str | tuple[str, ...]) -> None:
    """Write what the kernel shows of a process; ``links`` are those of its descriptors."""
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    links = files.pop("links", ())
    for number, link in enumerate(links):
        (folder / "fd" / str(number)).symlink_to(link)
    texts = {"maps": "", "environ": "", "comm": "engine\n", "cmdline": "", "status": f"Name:\tx\nPPid:\t{parent}\n"}
    for name, text in {**texts, **files}.items():
        (folder / name).write_text(str(text))


NIXL = "".join(
    f"7f00-7f01 r-xp 0 0:0 1 /n/{name}\n"
    for name in ("libplugin_UCX.so", "libplugin_POSIX.so", "libplugin_.so", "libplugin_X.so.1", "libnixl.so")
)
PORT = "header\n   0: 0100007F:1F90 0:0 0A 0:0 0:0 0 0 0 4242 1\n"
LIMIT = "Limit Soft Hard\n{}            {}                 4096                 files\n"
DEVICES = tuple(f"/dev/infiniband/{name}" for name in ("uverbs2", "uverbs1", "uverbs1", "", "uverbs3 (x)"))
#: The variables that are shown, with what is shown of their values; and others.
VARIABLES = {
    "FI_PROVIDER=password=Sw0rdfish-1": "password=***",
    "NIXL_BACKEND=U\x1bX": "U\\x1bX",
    "SGLANG_NIXL_BACKEND=e=f": "e=f",
    f"UCX_NET_DEVICES={300 * 'd'}": 200 * "d",
    "UCX_TLS=b": "b",
    "X_NIXL_KVCACHE_BACKEND=f": "f",
}
OTHERS = ("HF_TOKEN=secret", "MY_UCX_TLS=x", "UCX_TLSX=x", "", "FI_PROVIDER", "PATH=/bin", "X_NIXL_Y_BACKEND=x")


def test_a_process_of_the_engine_that_listens_is_read_as_far_as_it_can_be_seen(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(PORT)
    sys = tmp_path / "sys"
    for name, text in {"uverbs1": "mlx5_1\n", "uverbs2": "\n"}.items():
        (sys / "class/infiniband_verbs" / name).mkdir(parents=True)
        (sys / "class/infiniband_verbs" / name / "ibdev").write_text(text)
    process(tmp_path, 10, 2, links=("socket:[4242]",), cmdline="serve\0--port\x008080\0")
    assert live_nixl(8080, tmp_path, sys) == ([], "no process of pid 10 (serve --port 8080) has loaded NIXL")
    nobody = "no process that this user may read listens on this port here: run the command beside the engine"
    assert live_nixl(8081, tmp_path, sys) == ([], nobody)
    # A child of the server's parent counts only if the server and those below it have no NIXL.
    process(
        tmp_path,
        14,
        2,
        maps=NIXL,
        links=("pipe:[1]", "pipe:[2]", "/dev/null"),
        limits=LIMIT.format("My Max open files", 7),
    )
    sibling = LiveNixl(14, "engine", ("POSIX", "UCX"), (), {}, 3, 0, "2 of pipe")
    assert live_nixl(8080, tmp_path, sys) == ([sibling], "")
    files = {"environ": "\0".join((*OTHERS, *reversed(VARIABLES))), "limits": LIMIT.format("Max open files", 1024)}
    process(tmp_path, 11, 10, maps=NIXL, links=(*DEVICES, "/var/cache/a", "/var/cache/b", "socket:[1]"), **files)
    process(tmp_path, 12, 11, maps=NIXL, limits=LIMIT.format("Max open files", "unlimited"))
    process(tmp_path, 13, 10, maps="7f00-7f01 r-xp 0 0:0 1 /n/libplugin_UCX.so\n")  # without NIXL's own library
    lives, reason = live_nixl(8080, tmp_path, sys)
    variables = {text.partition("=")[0]: shown for text, shown in VARIABLES.items()}
    devices = ("mlx5_1", "uverbs2")
    assert lives == [
        LiveNixl(11, "engine", ("POSIX", "UCX"), devices, variables, 8, 1024, "5 in /dev/infiniband"),
        LiveNixl(12, "engine", ("POSIX", "UCX"), (), {}, 0, 0, "0 "),
    ]
    assert (list(lives[0].variables), reason) == (list(variables), "")


def test_the_first_process_of_a_container_is_nobodys_child(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(PORT)
    process(tmp_path, 10, 1, links=("socket:[4242]",))
    process(tmp_path, 12, 1, maps=NIXL)
    assert live_nixl(8080, tmp_path) == ([], "no process of pid 10 (engine) has loaded NIXL")
