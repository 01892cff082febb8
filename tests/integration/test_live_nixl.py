# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl telemetry`` says which backend and devices the live process uses, from the real NIXL in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.cli_run import environment

from pytest_nixl.cli import PASSED, main
from pytest_nixl.host.loaded_libraries import live_nixl

#: A server of metrics, as that of an engine, whose child process owns the agent.
ENGINE = """
import http.server, os, sys
if os.fork() == 0:
    from nixl._api import nixl_agent, nixl_agent_config
    agent = nixl_agent("engine", nixl_agent_config(backends=sys.argv[1].split(",")))
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)

class Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"agent_tx_requests_num_total 3\\n")

server = http.server.HTTPServer(("127.0.0.1", 0), Metrics)
print(server.server_port, flush=True)
server.serve_forever()
"""


#: A line of /proc/PID/maps.
NIXL = "7f00-7f01 r-xp 0 0:0 1 /nixl/libnixl.so\n"


@contextmanager
def engine(*arguments: str, program: str = ENGINE, **variables: str) -> Iterator[tuple[int, int]]:
    """Start a server with a child that has an agent; give its pid and its port. The first argument is its backends."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=environment(**variables), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            lines = set[str]()
            while "ready" not in lines or not any(line.isdigit() for line in lines):
                lines.add(process.stdout.readline().strip())
                assert process.poll() is None
            yield process.pid, next(int(line) for line in lines if line.isdigit())
        finally:
            process.kill()


def test_the_backend_of_a_child_of_the_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    variables = {"UCX_TLS": "tcp", "NIXL_BACKEND": "LIBFABRIC", "SGLANG_DISAGGREGATION_NIXL_BACKEND": "UCX"}
    with engine("UCX", **variables) as (pid, port):
        assert main(["telemetry", f"http://127.0.0.1:{port}"]) == PASSED
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NIXL of pid ")]
        assert main(["telemetry", f"localhost:{port}", "--json"]) == PASSED
        [output] = json.loads(capsys.readouterr().out)["processes"]
    assert "uses UCX; it has opened no RDMA device, so its transfers between hosts use TCP" in line
    assert line.endswith(", NIXL_BACKEND=LIBFABRIC, SGLANG_DISAGGREGATION_NIXL_BACKEND=UCX, UCX_TLS=tcp")
    assert output["pid"] != pid
    assert (output["backends"], output["devices"], output["variables"]["UCX_TLS"]) == (["UCX"], [], "tcp")


def test_each_backend_of_an_agent_is_named() -> None:
    with engine("UCX,POSIX") as (_, port):
        [live], reason = live_nixl(port)
    assert (set(live.backends), reason) == ({"UCX", "POSIX"}, "")


def test_an_open_rdma_device_is_named(tmp_path: Path) -> None:
    # A double of /proc and /sys: this host has no RDMA device that a process could open.
    proc, sys_folder = tmp_path / "proc", tmp_path / "sys"
    (proc / "net").mkdir(parents=True)
    line = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1\n"
    (proc / "net" / "tcp").write_text("header\n" + line)
    for pid, parent, link, maps in (
        (10, 1, "socket:[4242]", ""),
        (11, 10, "/dev/infiniband/uverbs1", f"{NIXL}7f02-7f03 r 0 0:0 1 /n/libplugin_UCX.so\n"),
        (12, 1, "/dev/infiniband/uverbs0", NIXL),
    ):
        folder = proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "fd" / "3").symlink_to(link)
        (folder / "maps").write_text(maps)
        (folder / "status").write_text(f"Name:\tengine\nPPid:\t{parent}\n")
        (folder / "comm").write_text("engine\n")
        (folder / "cmdline").write_text("")
        (folder / "environ").write_text("UCX_NET_DEVICES=mlx5_1:1\0HF_TOKEN=secret\0")
    (sys_folder / "class" / "infiniband_verbs" / "uverbs1").mkdir(parents=True)
    (sys_folder / "class" / "infiniband_verbs" / "uverbs1" / "ibdev").write_text("mlx5_1\n")
    [live], _ = live_nixl(8080, proc, sys_folder)
    assert str(live) == "NIXL of pid 11 (engine) uses UCX; it has opened mlx5_1, UCX_NET_DEVICES=mlx5_1:1"


#: The child keeps the files of a cache open, as a storage backend that never closes them.
LEAK = """
    os.makedirs(sys.argv[2])
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
    kept = [open(f"{sys.argv[2]}/{number}", "w") for number in range(int(sys.argv[3]))]
    print("ready", flush=True)"""


@pytest.mark.parametrize(("leaked", "named"), [(330, True), (150, False)])
def test_files_that_an_engine_leaks_are_named_with_their_folder(leaked: int, named: bool, tmp_path: Path) -> None:
    program = ENGINE.replace('\n    print("ready", flush=True)', LEAK)
    assert program != ENGINE
    cache = tmp_path / "hicache"
    with engine("POSIX", str(cache), str(leaked), program=program) as (_, port):
        [live], _ = live_nixl(port)
    assert (live.most_files, live.in_folder) == (400, f"{leaked} in {cache}")
    assert (f" of at most 400 files open ({leaked} in {cache}): soon it cannot open the next one" in str(live)) is named


def test_a_process_that_cannot_be_seen_is_unknown_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE.replace("if os.fork() == 0:", "if False:"), "UCX"],
        env=environment(), stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            assert main(["telemetry", f"127.0.0.1:{port}"]) == PASSED
        finally:
            process.kill()
    assert f"transport: unknown, because no process of pid {process.pid} " in capsys.readouterr().out
