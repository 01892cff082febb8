# SPDX-License-Identifier: Apache-2.0
"""Faults made for real on the machine that runs the tests, each named by ``pytest-nixl doctor``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, environment

pytestmark = pytest.mark.apart

DOCTOR = (sys.executable, "-m", "pytest_nixl.cli", "doctor", "--json")


@dataclass(frozen=True)
class Seen:
    """What the doctor said: verdict, reason and remedy by check."""

    code: int
    checks: Mapping[str, tuple[str, str, str]]

    def failed(self, check: str, words: str) -> bool:
        verdict, reason, remedy = self.checks[check]
        assert verdict == "FAIL", (verdict, reason)
        assert words in reason
        assert remedy
        return self.code == 1


def doctor(*arguments: str, prefix: Sequence[str] = (), **changes: str) -> Seen:
    done = subprocess.run(
        [*prefix, *DOCTOR, *arguments],
        env=environment(**changes),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)["checks"]
    return Seen(done.returncode, {one["id"]: (one["verdict"], one["reason"], one["remedy"]) for one in found})


def needs(*programs: str, root: bool = False) -> None:
    """Skip where a fault cannot be made; in CI, fail."""
    lacking = [name for name in programs if shutil.which(name) is None]
    why = f"needs {', '.join(lacking)}" if lacking else "needs root" if root and os.geteuid() else ""
    if why and os.environ.get("CI"):
        pytest.fail(f"CI is set, and this test {why}")
    if why:
        pytest.skip(f"this test {why}")


@pytest.fixture(scope="module")
def plugins() -> Path:
    """The folder of NIXL's plugins, as a process that has loaded NIXL tells."""
    script = (
        "import nixl._api\nprint([line.split()[-1] for line in open('/proc/self/maps') if 'libnixl.so' in line][0])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()).parent / "plugins"


def test_this_machine_is_well() -> None:
    # Where the host has libibverbs, a second copy of it is a warning.
    seen = doctor(UCX_MODULES="^ib")
    assert {verdict for verdict, _, _ in seen.checks.values()} == {"PASS", "NOT-APPLICABLE"}
    assert all(reason for verdict, reason, _ in seen.checks.values() if verdict == "NOT-APPLICABLE")
    assert seen.code == 0


def test_a_plugin_whose_libraries_were_removed(plugins: Path, tmp_path: Path) -> None:
    # Away from its place it does not find what it needs beside it.
    shutil.copy(plugins / "libplugin_UCX.so", tmp_path)
    seen = doctor(NIXL_PLUGIN_DIR=str(tmp_path))
    assert seen.failed("plugin-libraries", "which libplugin_UCX.so needs, was not found")
    assert re.search(r"libucp\S*\.so\S*, which libplugin_UCX\.so needs", seen.checks["plugin-libraries"][1])
    assert seen.failed("backend-loads", "UCX cannot be made")


def test_a_libfabric_without_the_symbol_versions_that_the_plugin_wants(tmp_path: Path) -> None:
    needs("gcc")
    (tmp_path / "fabric.c").write_text("int fi_getinfo(void) { return -1; }\n")
    (tmp_path / "versions").write_text("FABRIC_1.0 { global: fi_getinfo; };\n")
    library = tmp_path / "libfabric.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libfabric.so.1", f"-Wl,--version-script={tmp_path}/versions"]
    subprocess.run([*command, "-o", str(library), str(tmp_path / "fabric.c")], check=True)
    seen = doctor("--backend=LIBFABRIC", LD_LIBRARY_PATH=str(tmp_path))
    assert seen.failed("plugin-libraries", f"{library} lacks the symbol version FABRIC_1.")
    assert "that libplugin_LIBFABRIC.so needs" in seen.checks["plugin-libraries"][1]


def test_libraries_that_libfabric_needs_are_all_named_and_those_of_the_driver_not_missed_in_an_image() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this host has a driver, so that nothing of it is missing")
    seen = doctor("--backend=LIBFABRIC")
    assert seen.failed("plugin-libraries", "libcuda.so.1, which libplugin_LIBFABRIC.so needs, was not found")
    assert seen.failed("plugin-libraries", "libfabric.so.1, which libplugin_LIBFABRIC.so needs, was not found")
    image = doctor("--backend=LIBFABRIC", "--image")
    assert "libcuda.so.1" not in image.checks["plugin-libraries"][1]
    assert image.failed("plugin-libraries", "libfabric.so.1, which libplugin_LIBFABRIC.so needs, was not found")


def test_locked_memory_of_64_kib() -> None:
    needs("prlimit", "setpriv", root=True)
    # Root may lock more than its limit as long as it has this capability.
    without = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]
    prefix = ["prlimit", "--memlock=65536:65536", *without]
    seen = doctor("--profile=p5.48xlarge", prefix=prefix)
    assert seen.failed("memlock", "a process may lock 64 KiB of memory (/proc/self/limits)")
    assert doctor("--profile=p5.48xlarge", prefix=prefix[:2]).checks["memlock"][0] == "PASS"


def test_dev_shm_of_64_mib() -> None:
    needs("unshare", root=True)
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", script, "-"]
    assert doctor("--profile=p5.48xlarge", prefix=prefix).failed("shm", "/dev/shm has 64 MiB")
    verdict, reason, remedy = doctor(prefix=prefix).checks["shm"]
    assert verdict == "WARN"
    assert reason == "/dev/shm has 64 MiB, 64 MiB of it free: that is what a container gets that asks for nothing"
    assert "--shm-size" in remedy


#: A network namespace with interfaces of its own, and a /sys that shows them.
NETWORK = """
set -e
ip link set lo up
ip link add pod0 type veth peer name pod1
ip link set pod0 addrgenmode none
ip link set pod1 addrgenmode none
{setup}
mount -t sysfs sysfs /sys
exec "$@"
"""


def network(setup: str) -> list[str]:
    needs("unshare", "ip", root=True)
    return ["unshare", "--net", "--mount", "sh", "-c", NETWORK.format(setup=setup), "-"]


def test_a_host_with_no_address_but_a_link_local_one() -> None:
    up = "ip address add 169.254.7.9/16 dev pod0; ip link set pod1 up; ip link set pod0 up"
    seen = doctor(prefix=network(up))
    verdict, reason, remedy = seen.checks["link-local"]
    # An older UCX gives it to others; a newer one leaves it out, and nothing is left.
    assert verdict == "FAIL"
    assert "169.254.7.9" in reason
    assert "no other host reaches" in reason
    assert remedy


def test_a_link_local_address_that_ucx_leaves_out_is_no_fault() -> None:
    up = (
        "ip address add 169.254.7.9/16 dev pod0; ip link set pod1 up; ip link set pod0 up; ip link add eth7 type veth "
        "peer name eth8; ip address add 10.9.9.9/24 dev eth7; ip link set eth8 up; ip link set eth7 up"
    )
    verdict, reason, _ = doctor(prefix=network(up)).checks["link-local"]
    if verdict == "FAIL":  # an older UCX
        assert "an agent of UCX gives others the link-local address 169.254.7.9" in reason
    else:
        assert (verdict, reason) == ("PASS", "UCX leaves 169.254.7.9/16 of pod0 out: it gives 10.9.9.9")


def test_an_interface_that_is_down() -> None:
    seen = doctor(prefix=network("ip address add 10.9.9.9/24 dev pod0"), UCX_NET_DEVICES="pod0,lo")
    assert seen.failed("nics-up", "1 interface that traffic goes over: pod0 is down")


def test_a_peer_that_no_route_leads_to() -> None:
    seen = doctor("--peer=192.0.2.77", prefix=network("true"))
    assert seen.failed(
        "peer-reachable", "1 host of 1 not reached: 192.0.2.77: 192.0.2.77 port 1: Network is unreachable"
    )


def test_a_peer_that_refuses_is_reached_and_one_without_a_name_is_not() -> None:
    seen = doctor("--peer=127.0.0.1:1", "--peer=no-such-host.invalid")
    assert seen.failed("peer-reachable", "1 host of 2 not reached: no-such-host.invalid: its name does not resolve")


def test_variables_that_nobody_reads() -> None:
    seen = doctor(UCX_TSL="tcp", NIXL_ETCD_ENDPOINT="http://e:2379", FI_PROVIDERS="tcp", UCX_IB_NUM_PATH="2",
                  NIXL_PLUGIN_DIRS="/")  # fmt: skip
    for words in (
        "UCX_TSL (did you mean UCX_TLS?)",
        "NIXL_ETCD_ENDPOINT (did you mean NIXL_ETCD_ENDPOINTS?)",
        "FI_PROVIDERS (did you mean FI_PROVIDER?)",
        "NIXL_PLUGIN_DIRS (did you mean NIXL_PLUGIN_DIR?)",
        "UCX_IB_NUM_PATH (did you mean UCX_IB_NUM_PATHS?)",
    ):
        assert seen.failed("variables-known", words)


def test_variables_that_are_read_are_no_fault() -> None:
    seen = doctor(
        UCX_TLS="tcp,cma",
        UCX_LOG_LEVEL="warn",
        NIXL_LOG_LEVEL="info",
        UCX_IB_GID_INDEX="3",
        FI_PROVIDER="tcp",
        UCX_RC_TX_QUEUE_LEN="4096",
        # Images have these from their Dockerfiles.
        NIXL_LIB_DIR="/usr/lib",
        NIXL_PREFIX="/usr",
        UCX_DIR="/usr",
        UCX_VERSION="v1.20.0",
    )
    assert seen.checks["variables-known"][0] == "PASS"
    assert seen.code == 0


def test_two_copies_of_libucs(plugins: Path, tmp_path: Path) -> None:
    """A copy whose soname is another, as a build of UCX of its own has, is loaded beside NIXL's."""
    [libraries] = plugins.parents[1].glob("nixl_cu*.libs")
    [original] = libraries.glob("libucs-*.so*")
    wheel = re.search(r"-([0-9a-f]{8})\.", original.name)
    assert wheel is not None
    copy = tmp_path / original.name.replace(wheel[1], "00000000")
    copy.write_bytes(original.read_bytes().replace(f"libucs-{wheel[1]}".encode(), b"libucs-00000000"))
    seen = doctor(LD_PRELOAD=str(copy), LD_LIBRARY_PATH=str(libraries))
    assert seen.failed("libraries-once", "a process with NIXL has 2 copies of libucs: ")
    assert str(copy) in seen.checks["libraries-once"][1]


def test_an_etcd_that_is_not_there() -> None:
    seen = doctor(NIXL_ETCD_ENDPOINTS="http://127.0.0.1:1")
    assert seen.failed("etcd-answers", "etcd at http://127.0.0.1:1: connection refused, nothing listens there")


def test_an_etcd_whose_name_nobody_knows() -> None:
    seen = doctor("--etcd=http://no-such-host.invalid:2379")
    assert seen.failed("names-resolve", "no address is known for no-such-host.invalid")


def test_a_nixl_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "nixl.py").write_text("raise ImportError(\"No module named 'nixl'\")\n")
    seen = doctor(PYTHONPATH=str(tmp_path))
    assert seen.failed("nixl-loads", "No module named 'nixl'")


def test_a_nixl_without_plugins(tmp_path: Path) -> None:
    seen = doctor(NIXL_PLUGIN_DIR=str(tmp_path))
    assert seen.failed("nixl-loads", "No plugins available for NIXL")


def test_a_plugin_that_crashes_ends_its_own_process_and_not_the_doctor(tmp_path: Path) -> None:
    needs("gcc")
    (tmp_path / "crash.c").write_text(
        "#include <stdlib.h>\n__attribute__((constructor)) static void crash(void) { abort(); }\n"
    )
    plugin = tmp_path / "libplugin_UCX.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(plugin), str(tmp_path / "crash.c")], check=True)
    seen = doctor(NIXL_PLUGIN_DIR=str(tmp_path))
    assert seen.failed("backend-loads", "was ended by SIGABRT")
    # What could be told before is told, and nothing is made up.
    for check in ("nixl-loads", "plugin-libraries", "libraries-once", "etcd-client-library", "shm"):
        assert seen.checks[check][0] == "PASS", seen.checks[check]


def test_transports_that_cannot_carry_nixl() -> None:
    seen = doctor(UCX_TLS="sm")
    assert seen.failed("transports-allowed", "UCX_TLS=sm names none that tells of a peer that failed")
    assert seen.failed("backend-loads", "UCX cannot be made: nixlBackendError: NIXL_ERR_BACKEND")


def test_a_device_and_a_provider_that_are_not_there() -> None:
    seen = doctor("--backend=UCX", UCX_NET_DEVICES="lo0", FI_PROVIDER="efa")
    assert seen.failed("devices-there", "UCX_NET_DEVICES names lo0, which this host has not (did you mean lo?)")
    assert seen.failed("provider-there", "FI_PROVIDER=efa, and there is no EFA on this host")


def test_a_nixlbench_whose_library_is_missing(tmp_path: Path) -> None:
    needs("gcc")
    (tmp_path / "gflags.c").write_text("int gflags(void) { return 0; }\n")
    (tmp_path / "bench.c").write_text("int gflags(void); int main(void) { return gflags(); }\n")
    library, program = tmp_path / "libgflags.so.2.1", tmp_path / "nixlbench"
    shared = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libgflags.so.2.1", "-o", str(library)]
    subprocess.run([*shared, str(tmp_path / "gflags.c")], check=True)
    subprocess.run(["gcc", "-o", str(program), str(tmp_path / "bench.c"), str(library)], check=True)
    library.unlink()
    seen = doctor(f"--nixlbench={program}", "--image")
    assert seen.failed("nixlbench-starts", f"{program} does not start: {program}: error while loading shared "
                       "libraries: libgflags.so.2.1: cannot open shared object file")  # fmt: skip


def test_an_image_is_asked_nothing_of_gpus_networks_and_etcd() -> None:
    seen = doctor("--image", NIXL_ETCD_ENDPOINTS="http://127.0.0.1:1")
    assert set(seen.checks) == {
        "nixl-loads", "backend-loads", "plugin-libraries", "libraries-once", "etcd-client-library", "etcd-client-patch",
        "nixlbench-starts", "variables-known", "namespace-plain",
    }  # fmt: skip
    assert seen.code == 0


@pytest.mark.parametrize(
    ("text", "told", "said_by_ucx"),
    [
        ("tpc", "UCX does not know 'tpc' (did you mean tcp?)", "transport 'tpc' is not available"),
        pytest.param("rc", "this host has no device for rc", "transport 'rc' is not available", marks=pytest.mark.soak),
        ("ud,rc_x", "this host has no device for ud, rc_x", "transports 'ud','rc_x' are not available"),
        pytest.param(
            " tcp",
            "UCX does not know ' tcp' (did you mean tcp?)",
            "transport ' tcp' is not available",
            marks=pytest.mark.soak,
        ),
        ("", "names no transport: UCX refuses an empty list", "The TLs list is empty"),
        ("cuda_copy", "this host has no device for cuda_copy", "transport 'cuda_copy' is not available"),
        pytest.param(
            "^tcp", "leaves none that tells of a peer that failed", "no peer failure handler", marks=pytest.mark.soak
        ),
        pytest.param(
            "tcp:aux",
            "names none that tells of a peer that failed",
            "no usable transports/devices (asked tcp:aux",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_transports_that_cannot_carry_nixl_are_named_and_ucx_is_quoted(text: str, told: str, said_by_ucx: str) -> None:
    if Path("/sys/class/infiniband").exists() or Path("/dev/nvidiactl").exists():
        pytest.skip("this host has RDMA or a GPU, so that what is asked for may be there")
    seen = doctor(UCX_TLS=text)
    assert seen.failed("transports-allowed", told)
    assert seen.failed("backend-loads", said_by_ucx)


@pytest.mark.parametrize(
    ("text", "words"),
    [("tcp,tpc", "'tpc' (did you mean tcp?)"), pytest.param("^tpc", "did you mean tcp?", marks=pytest.mark.soak)],
)
def test_a_misspelt_transport_among_good_ones_is_a_warning(text: str, words: str) -> None:
    seen = doctor(UCX_TLS=text, UCX_MODULES="^ib")
    verdict, reason, remedy = seen.checks["transports-allowed"]
    assert verdict == "WARN"
    assert words in reason
    assert "correct UCX_TLS" in remedy
    assert seen.checks["backend-loads"][0] == "PASS"


@pytest.mark.parametrize(
    "text",
    ["tcp,self,sm", *(pytest.param(text, marks=pytest.mark.soak) for text in ("tcp", "\\tcp", "all", "^ib", "^rc,ud"))],
)
def test_transports_that_carry_nixl_pass(text: str) -> None:
    seen = doctor(UCX_TLS=text, UCX_MODULES="^ib")
    assert {seen.checks[name][0] for name in ("transports-allowed", "backend-loads")} == {"PASS"}
