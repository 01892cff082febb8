# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl doctor`` reports faults that are caused on the machine that runs the tests."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, environment, eventually, run_command
from helpers.needs import need_programs

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Seen:
    """The doctor's exit code, and the verdict, reason and remedy of each check."""

    code: int
    checks: Mapping[str, tuple[str, str, str]]

    def failed(self, check: str, *values: str) -> bool:
        """Assert that a check failed with all these values in its reason, and return whether the exit code is 1."""
        verdict, reason, remedy = self.checks[check]
        assert verdict == "FAIL", (verdict, reason)
        assert [value for value in values if value not in reason] == [], reason
        assert remedy
        return self.code == 1


def doctor(
    *arguments: str,
    prefix: Sequence[str] = (),
    fork: bool = True,
    host: int = 0,
    env: Mapping[str, str] | None = None,
    **changes: str,
) -> Seen:
    """Run the doctor with the variables ``env`` and ``changes``; it is forked unless a prefix executes it."""
    variables = {**(env or {}), **changes}
    done = run_command("doctor", "--json", *arguments, env=variables, prefix=prefix, fork=fork, host=host)
    assert done.returncode in (0, 1), done.stderr
    document = json.loads(done.stdout)["checks"]
    return Seen(
        done.returncode, {entry["id"]: (entry["verdict"], entry["reason"], entry["remedy"]) for entry in document}
    )


@contextlib.contextmanager
def namespaces(script: str, *kinds: str) -> Iterator[int]:
    """Run a script of a shell, which ends with ``exec "$@"``, in namespaces of these kinds.

    :returns: the id of a process there, which ends with the block.
    """
    holding = ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "sh", "-c", script, "-", "sleep", "infinity"]
    with subprocess.Popen(holding, stdin=subprocess.DEVNULL) as holder:
        try:
            name = Path(f"/proc/{holder.pid}/comm")
            assert eventually(lambda: name.read_text() == "sleep\n" or holder.poll() is not None)
            assert holder.poll() is None
            yield holder.pid
        finally:
            holder.kill()


@pytest.fixture(scope="module")
def plugins() -> Path:
    """Return the folder of NIXL's plugins, found from the libraries of a process that loaded NIXL."""
    script = (
        "import nixl._api\nprint([line.split()[-1] for line in open('/proc/self/maps') if 'libnixl.so' in line][0])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()).parent / "plugins"


def test_machine_without_faults_passes() -> None:
    # If the host has libibverbs, UCX's ib module would load a second copy, which is a warning.
    report = doctor(UCX_MODULES="^ib", fork=False)  # executed as a user does it
    assert {verdict for verdict, _, _ in report.checks.values()} == {"PASS", "NOT-APPLICABLE"}
    assert all(reason for verdict, reason, _ in report.checks.values() if verdict == "NOT-APPLICABLE")
    assert report.code == 0


def test_telemetry_that_is_off_and_would_fail_every_request_of_vllm_is_reported() -> None:
    report = doctor("--image", NIXL_TELEMETRY_ENABLE="n")
    assert report.failed("telemetry-in-process", "NIXL_TELEMETRY_ENABLE=n", "nixlNoTelemetryError", "vLLM")
    assert [name for name, (verdict, _, _) in report.checks.items() if verdict == "FAIL"] == ["telemetry-in-process"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NIXL_TELEMETRY_ENABLE": "maybe"}, "NIXL_TELEMETRY_ENABLE=maybe: NIXL creates no agent with this value"),
        (
            {"NIXL_TELEMETRY_ENABLE": "y", "NIXL_TELEMETRY_EXPORTER": "datadog"},
            "Failed to load telemetry plugin: datadog",
        ),
        ({"NIXL_TELEMETRY_ENABLE": "y", "NIXL_TELEMETRY_DIR": "/proc/none"}, "Failed to create telemetry exporter"),
    ],
)
def test_telemetry_with_which_no_agent_is_created_is_reported(variables: dict[str, str], message: str) -> None:
    report = doctor("--image", env=variables)
    assert report.failed("telemetry-in-process", message)
    assert "NIXL_TELEMETRY_" in report.checks["nixl-loads"][2]


def test_plugin_whose_libraries_are_missing_is_reported(plugins: Path, tmp_path: Path) -> None:
    """And an etcd whose name does not resolve."""
    # A copy in another folder does not find the libraries beside the original.
    shutil.copy(plugins / "libplugin_UCX.so", tmp_path)
    report = doctor("--etcd=http://no-such-host.invalid:2379", NIXL_PLUGIN_DIR=str(tmp_path))
    assert report.failed("names-resolve", "no address found for no-such-host.invalid (")
    assert report.failed("plugin-libraries", "which libplugin_UCX.so needs, was not found")
    assert re.search(r"libucp\S*\.so\S*, which libplugin_UCX\.so needs", report.checks["plugin-libraries"][1])
    assert report.failed("backend-loads", "UCX")


def test_libfabric_without_the_symbol_versions_of_the_plugin_is_reported(tmp_path: Path) -> None:
    need_programs("gcc")
    (tmp_path / "fabric.c").write_text("int fi_getinfo(void) { return -1; }\n")
    (tmp_path / "versions").write_text("FABRIC_1.0 { global: fi_getinfo; };\n")
    library = tmp_path / "libfabric.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libfabric.so.1", f"-Wl,--version-script={tmp_path}/versions"]
    subprocess.run([*command, "-o", str(library), str(tmp_path / "fabric.c")], check=True)
    report = doctor("--backend=LIBFABRIC", LD_LIBRARY_PATH=str(tmp_path))
    assert report.failed("plugin-libraries", str(library), "FABRIC_1.", "libplugin_LIBFABRIC.so")


def test_missing_libraries_of_libfabric_are_listed_and_those_of_the_driver_are_not_expected_in_an_image() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this host has an NVIDIA driver, so none of the driver's libraries is missing")
    report = doctor("--backend=LIBFABRIC")
    assert report.failed("plugin-libraries", "libcuda.so.1", "libfabric.so.1", "libplugin_LIBFABRIC.so")
    image = doctor("--backend=LIBFABRIC", "--image")
    assert "libcuda.so.1" not in image.checks["plugin-libraries"][1]
    assert image.failed("plugin-libraries", "libfabric.so.1", "libplugin_LIBFABRIC.so")


def test_locked_memory_of_64_kib_and_dev_shm_of_64_mib_are_reported() -> None:
    need_programs("prlimit", "setpriv", "unshare", root=True)
    small = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    limited = ["prlimit", "--memlock=65536:65536"]
    # With this capability root may exceed the limit.
    without = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]
    report = doctor("--profile=p5.48xlarge", prefix=["unshare", "--mount", "sh", "-c", small, "-", *limited, *without])
    assert report.failed("memlock", "64 KiB", "/proc/self/limits")
    assert report.failed("shm", "/dev/shm", "64 MiB")
    assert doctor("--profile=p5.48xlarge", prefix=limited).checks["memlock"][0] == "PASS"
    with namespaces(small, "--mount") as host:
        verdict, reason, remedy = doctor(host=host).checks["shm"]
    assert verdict == "WARN"
    assert reason.count("64 MiB") >= 2
    assert "--shm-size" in remedy


#: Reserves requests of aio, and keeps them until its input ends.
RESERVE = """
import ctypes, platform, sys
call, context = {"x86_64": 206, "aarch64": 0}[platform.machine()], ctypes.c_ulong()
library = ctypes.CDLL(None, use_errno=True)
print(library.syscall(call, ctypes.c_uint(int(sys.argv[1])), ctypes.byref(context)), flush=True)
sys.stdin.read()
"""
#: Forbids a system call, as the default profile of container engines forbids io_uring_setup (425), to a command.
WITHOUT_CALL = """
import ctypes, os, struct, sys
program = b"".join(struct.pack("HBBI", *each) for each in (
    (0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv[1])), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)
))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
library = ctypes.CDLL(None, use_errno=True)
assert library.prctl(38, 1, 0, 0, 0) == 0
assert library.prctl(22, 2, ctypes.byref(Program(4, program))) == 0, ctypes.get_errno()
os.execvp(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.alone  # no other process of the machine gets requests of aio meanwhile
def test_queues_of_files_that_others_hold_or_seccomp_forbids_are_reported() -> None:
    verdict, reason, _ = doctor("--backend=POSIX").checks["storage-queues"]
    assert (verdict, reason.startswith("io_uring and aio can be set up; ")) == ("PASS", True)
    used, most = (int(Path("/proc/sys/fs", name).read_text()) for name in ("aio-nr", "aio-max-nr"))
    with subprocess.Popen(
        [sys.executable, "-c", RESERVE, str(most - used - 100)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "0\n"
        report = doctor("--backend=POSIX")
        verdict, reason, remedy = report.checks["storage-queues"]
        assert verdict == "WARN"
        assert f"aio: {most - 100} of {most} requests are reserved on this host" in reason
        assert "fs.aio-max-nr = 1048576" in remedy
        both = doctor("--backend=POSIX", prefix=[sys.executable, "-c", WITHOUT_CALL, "425"])
        assert both.failed("storage-queues", "io_uring: seccomp forbids io_uring_setup (EPERM)", "aio: ")
        holder.communicate()


def test_call_that_seccomp_forbids_to_the_command_is_no_broken_output() -> None:
    getaffinity = {"x86_64": "204", "aarch64": "123"}[platform.machine()]
    done = run_command("doctor", prefix=[sys.executable, "-c", WITHOUT_CALL, getaffinity])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pytest-nixl: the system refuses a call (EPERM: Operation not permitted); remedy: ")
    assert done.stderr.count("\n") == 1


def test_closed_input_and_errors_are_no_fault() -> None:
    """Else the first files that are opened would be the standard input and the errors of what is started."""
    assert doctor("--image", prefix=["sh", "-c", 'exec "$@" <&- 2>&-', "-"]).code == 0


#: Script that creates interfaces in a new network namespace, and mounts a /sys that shows them.
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


def doctor_in_network(setup: str, *arguments: str, **changes: str) -> Seen:
    """Run the doctor in a network namespace that a script sets up."""
    need_programs("unshare", "ip", root=True)
    with namespaces(NETWORK.format(setup=setup), "--net", "--mount") as host:
        return doctor(*arguments, host=host, env=changes)


def test_host_with_only_a_link_local_address_is_reported() -> None:
    up = "ip address add 169.254.7.9/16 dev pod0; ip link set pod1 up; ip link set pod0 up"
    report = doctor_in_network(up)
    verdict, reason, remedy = report.checks["link-local"]
    # An older UCX advertises the address; a newer one leaves it out and then has none.
    assert verdict == "FAIL"
    assert "169.254.7.9" in reason
    assert "link-local" in reason
    assert remedy


def test_link_local_address_that_ucx_leaves_out_passes() -> None:
    up = (
        "ip address add 169.254.7.9/16 dev pod0; ip link set pod1 up; ip link set pod0 up; ip link add eth7 type veth "
        "peer name eth8; ip address add 10.9.9.9/24 dev eth7; ip link set eth8 up; ip link set eth7 up"
    )
    verdict, reason, _ = doctor_in_network(up).checks["link-local"]
    if verdict == "FAIL":  # an older UCX
        assert "link-local address 169.254.7.9" in reason
    else:
        assert verdict == "PASS"
        assert "169.254.7.9/16 of pod0" in reason
        assert "10.9.9.9" in reason


def test_interface_that_is_down_and_peer_without_a_route_are_reported() -> None:
    down = "ip address add 10.9.9.9/24 dev pod0"
    report = doctor_in_network(down, "--peer=192.0.2.77", UCX_NET_DEVICES="pod0,lo")
    assert report.failed("nics-up", "1 interface", "pod0 is down")
    assert report.failed("peer-reachable", "1 of 1 host", "192.0.2.77: 192.0.2.77 port 1: Network is unreachable")


@pytest.fixture(scope="module")
def program_without_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program whose library is missing."""
    need_programs("gcc")
    folder = tmp_path_factory.mktemp("bench")
    (folder / "gflags.c").write_text("int gflags(void) { return 0; }\n")
    (folder / "bench.c").write_text("int gflags(void); int main(void) { return gflags(); }\n")
    library, program = folder / "libgflags.so.2.1", folder / "nixlbench"
    shared = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libgflags.so.2.1", "-o", str(library)]
    subprocess.run([*shared, str(folder / "gflags.c")], check=True)
    subprocess.run(["gcc", "-o", str(program), str(folder / "bench.c"), str(library)], check=True)
    library.unlink()
    return program


@pytest.fixture(scope="module")
def several(program_without_library: Path) -> Seen:
    """What the doctor says of several faults at once, none of which hides another."""
    return doctor(
        "--backend=UCX", "--peer=127.0.0.1:1", "--peer=no-such-host.invalid", f"--nixlbench={program_without_library}",
        UCX_TSL="tcp", NIXL_ETCD_ENDPOINT="http://e:2379", FI_PROVIDERS="tcp", UCX_IB_NUM_PATH="2",
        NIXL_PLUGIN_DIRS="/", NIXL_ETCD_ENDPOINTS="http://127.0.0.1:1", UCX_NET_DEVICES="lo0", FI_PROVIDER="efa",
    )  # fmt: skip


def test_peer_that_refuses_is_reached_and_one_without_an_address_is_not(several: Seen) -> None:
    assert several.failed("peer-reachable", "1 of 2 hosts", "no-such-host.invalid")


def test_variables_that_no_program_reads_are_reported(several: Seen) -> None:
    for expected in (
        "UCX_TSL (did you mean UCX_TLS?)",
        "NIXL_ETCD_ENDPOINT (did you mean NIXL_ETCD_ENDPOINTS?)",
        "FI_PROVIDERS (did you mean FI_PROVIDER?)",
        "NIXL_PLUGIN_DIRS (did you mean NIXL_PLUGIN_DIR?)",
        "UCX_IB_NUM_PATH (did you mean UCX_IB_NUM_PATHS?)",
    ):
        assert several.failed("variables-known", expected)


def test_variables_that_are_read_pass() -> None:
    report = doctor(
        UCX_TLS="tcp,self,sm",
        UCX_LOG_LEVEL="warn",
        NIXL_LOG_LEVEL="info",
        UCX_IB_GID_INDEX="3",
        FI_PROVIDER="tcp",
        UCX_RC_TX_QUEUE_LEN="4096",
        # Dockerfiles set these.
        NIXL_LIB_DIR="/usr/lib",
        NIXL_PREFIX="/usr",
        UCX_DIR="/usr",
        UCX_VERSION="v1.20.0",
    )
    assert report.checks["variables-known"][0] == "PASS"
    # These transports can carry NIXL.
    assert {report.checks[name][0] for name in ("transports-allowed", "backend-loads")} == {"PASS"}
    assert report.code == 0


def test_two_copies_of_libucs_are_reported(plugins: Path, tmp_path: Path) -> None:
    """A copy with another soname, like one of a separate UCX build, is loaded in addition to NIXL's copy."""
    [libraries] = plugins.parents[1].glob("nixl_cu*.libs")
    [original] = libraries.glob("libucs-*.so*")
    wheel = re.search(r"-([0-9a-f]{8})\.", original.name)
    assert wheel is not None
    copy = tmp_path / original.name.replace(wheel[1], "00000000")
    copy.write_bytes(original.read_bytes().replace(f"libucs-{wheel[1]}".encode(), b"libucs-00000000"))
    report = doctor(LD_PRELOAD=str(copy), LD_LIBRARY_PATH=str(libraries))
    assert report.failed("libraries-once", "2 copies of libucs", str(copy))


def test_plugin_of_another_release_and_a_preloaded_file_that_is_absent_are_warnings(
    plugins: Path, tmp_path: Path
) -> None:
    """Bytes move nevertheless."""
    wheel = plugins.parent.name.split(".")[1]
    (tmp_path / f"{wheel}-0.9.0.dist-info").mkdir()
    (tmp_path / f"{wheel}.libs").symlink_to(plugins.parents[1] / f"{wheel}.libs")
    shutil.copytree(plugins.parent, tmp_path / plugins.parent.name)
    folder = tmp_path / plugins.parent.name / "plugins"
    report = doctor(NIXL_PLUGIN_DIR=str(folder), LD_PRELOAD="/absent.so", UCX_MODULES="^ib")
    warnings = {check: reason for check, (verdict, reason, _) in report.checks.items() if verdict == "WARN"}
    assert set(warnings) == {"nixl-packages-agree", "variables-agree"}
    assert f"loads a plugin of NIXL 0.9.0 for UCX: {folder}/libplugin_UCX.so" in warnings["nixl-packages-agree"]
    assert "LD_PRELOAD: /absent.so (cannot open shared object file)" in warnings["variables-agree"]
    assert report.checks["transfers-arrive"][0] == "PASS"


def test_etcd_that_does_not_listen_is_reported(several: Seen) -> None:
    assert several.failed("etcd-answers", "http://127.0.0.1:1", "connection refused")


def test_missing_nixl_is_reported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['nixl._api'] = None\n")
    report = doctor(PYTHONPATH=str(tmp_path))
    assert report.failed("nixl-loads", "import of nixl._api halted")


def test_nixl_without_plugins_is_reported(tmp_path: Path) -> None:
    report = doctor(NIXL_PLUGIN_DIR=str(tmp_path))
    assert report.failed("nixl-loads", "No plugins available for NIXL")


def test_plugin_that_crashes_does_not_crash_the_doctor(tmp_path: Path) -> None:
    need_programs("gcc")
    (tmp_path / "crash.c").write_text(
        "#include <stdlib.h>\n__attribute__((constructor)) static void crash(void) { abort(); }\n"
    )
    plugin = tmp_path / "libplugin_UCX.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(plugin), str(tmp_path / "crash.c")], check=True)
    report = doctor(NIXL_PLUGIN_DIR=str(tmp_path))
    assert report.failed("backend-loads", "was ended by SIGABRT")
    assert "SIGABRT" in report.checks["nixl-plugins"][1]
    # What was found before the crash is still judged.
    for check in ("nixl-loads", "plugin-libraries", "libraries-once", "etcd-client-library", "shm"):
        assert report.checks[check][0] == "PASS", report.checks[check]


def test_missing_device_and_provider_are_reported(several: Seen) -> None:
    assert several.failed("devices-there", "UCX_NET_DEVICES", "lo0", "did you mean lo?")
    assert several.failed("provider-there", "FI_PROVIDER=efa")


def test_nixlbench_whose_library_is_missing_is_reported(several: Seen, program_without_library: Path) -> None:
    text = f"{program_without_library}: error while loading shared libraries: libgflags.so.2.1"
    assert several.failed("nixlbench-starts", text)


def test_checks_of_an_image_leave_out_gpus_networks_and_etcd() -> None:
    report = doctor("--image", NIXL_ETCD_ENDPOINTS="http://127.0.0.1:1", NIXL_TELEMETRY_ENABLE="y")
    assert set(report.checks) == {
        "nixl-loads", "backend-loads", "plugin-libraries", "libraries-once", "etcd-client-library", "etcd-client-patch",
        "nixlbench-starts", "nixl-plugins", "nixl-cuda", "image-versions", "verbs-providers", "gpu-code",
        "variables-known", "namespace-plain", "nixl-packages-agree", "telemetry-in-process",
    }  # fmt: skip
    verdict, reason, _ = report.checks["telemetry-in-process"]
    assert (verdict, reason.rpartition("; ")[2]) == (
        "PASS", "no exporter is set, so only the program itself can read it"
    )  # fmt: skip
    assert report.code == 0


def test_gate_of_an_image_passes_or_fails_by_what_its_profile_wants(tmp_path: Path) -> None:
    profile = tmp_path / "image.toml"

    def gate(bounds: str) -> Seen:
        profile.write_text(f'[profile]\nname = "image"\n{bounds}')
        return doctor("--image", "--gate", f"--profile={profile}", UCX_MODULES="^ib")

    good = gate('[image]\nplugins = ["UCX", "POSIX"]\netcd_uri_patch = false\n[versions]\nnixl = ">=1.4"\nucx = "1"\n')
    assert good.code == 0, good.checks
    assert good.checks["image-versions"][0] == "PASS"
    bad = gate('[image]\nplugins = ["UCX", "INFINIA", "HF3FS"]\n[versions]\nnixl = "0.1"\n')
    assert bad.failed("nixl-plugins", "INFINIA: lacks libred_client.so.2", "HF3FS: there is no libplugin_HF3FS.so")
    assert bad.failed("image-versions", "not 0.1")
    unread = gate('[versions]\nefa_installer = "999"\n')
    assert unread.checks["image-versions"][0] in ("UNKNOWN", "FAIL")
    assert unread.code == 1


@pytest.mark.parametrize(
    ("text", "values", "said_by_ucx"),
    [
        ("tpc", ("'tpc'", "did you mean tcp?"), "transport 'tpc' is not available"),
        ("sm", ("UCX_TLS=sm", "NIXL_ERR_BACKEND"), "nixlBackendError: NIXL_ERR_BACKEND"),
        ("ud,rc_x", ("no device for ud, rc_x",), "transports 'ud','rc_x' are not available"),
        pytest.param(
            " tcp",
            ("' tcp'", "did you mean tcp?"),
            "transport ' tcp' is not available",
            marks=pytest.mark.whole,
        ),
        ("", ("UCX_TLS=", "empty list"), "The TLs list is empty"),
        pytest.param("^tcp", ("UCX_TLS=^tcp", "NIXL_ERR_BACKEND"), "no peer failure handler", marks=pytest.mark.whole),
        pytest.param(
            "tcp:aux",
            ("UCX_TLS=tcp:aux", "NIXL_ERR_BACKEND"),
            "no usable transports/devices (asked tcp:aux",
            marks=pytest.mark.whole,
        ),
    ],
)
def test_transports_that_cannot_carry_nixl_are_reported_with_the_message_of_ucx(
    text: str, values: tuple[str, ...], said_by_ucx: str
) -> None:
    if Path("/sys/class/infiniband").exists() or Path("/dev/nvidiactl").exists():
        pytest.skip("this host has RDMA or a GPU, so the requested transports may work")
    report = doctor(UCX_TLS=text)
    assert report.failed("transports-allowed", *values)
    assert report.failed("backend-loads", said_by_ucx)


@pytest.mark.parametrize(
    ("text", "message"),
    [("tcp,tpc", "'tpc' (did you mean tcp?)"), pytest.param("^tpc", "did you mean tcp?", marks=pytest.mark.whole)],
)
def test_misspelt_transport_among_good_ones_is_a_warning(text: str, message: str) -> None:
    report = doctor(UCX_TLS=text, UCX_MODULES="^ib")
    verdict, reason, remedy = report.checks["transports-allowed"]
    assert verdict == "WARN"
    assert message in reason
    assert "UCX_TLS" in remedy
    assert report.checks["backend-loads"][0] == "PASS"


@pytest.mark.parametrize(
    ("setting", "check"), [("UCX_TLS=rc", "backend-loads"), ("UCX_PROTO_ENABLE=n", "transfers-arrive")]
)
def test_settings_that_ucx_reads_from_a_file_are_named(setting: str, check: str, tmp_path: Path) -> None:
    """No variable shows them."""
    (tmp_path / "ucx.conf").write_text(f"# UCX_TLS=tcp\n{setting}\n")
    results = doctor(HOME=str(tmp_path))
    assert results.failed(check, f"UCX reads {setting} from {tmp_path}/ucx.conf")
    verdict, reason, remedy = results.checks["telemetry-in-process"]
    assert verdict != "UNKNOWN" or remedy == "follow the remedy of transfers-arrive", reason


@pytest.mark.parametrize(
    ("limit", "check", "reason", "remedy"),
    [
        ("-n 24", "backend-loads", "the maximal number of files that could be opened", "65536"),
        ("-f 100", "backend-loads", "this process may write at most ", "unlimited"),
        ("-v 150000", "nixl-loads", "at most 146 MiB of address space here (ulimit -v)", "unlimited"),
        ("-d 50000", "nixl-loads", "at most 48 MiB of data here (ulimit -d)", "unlimited"),
    ],
)
def test_limit_of_a_process_is_named(limit: str, check: str, reason: str, remedy: str) -> None:
    results = doctor(prefix=["sh", "-c", f'ulimit {limit}; exec "$@"', "-"])
    assert results.failed(check, reason)
    assert f"`ulimit {limit[:2]} {remedy}`" in results.checks[check][2]
    assert "(ulimit -u)" not in results.checks[check][1]  # with little address space no thread starts


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("mount -t tmpfs -o ro tmpfs /dev/shm", "follows from shm: UCX"),
        ("mount -t tmpfs tmpfs /sys", "scandir(/sys/class/net) failed"),
    ],
)
def test_what_ucx_lacks_of_the_file_system_is_named(script: str, words: str) -> None:
    with namespaces(f'{script}; exec "$@"', "--mount") as host:
        results = doctor(host=host, fork=False)
    assert results.failed("backend-loads", words)
    assert "mount" in results.checks["backend-loads"][2]


def test_a_file_that_hides_nixl_is_one_cause_and_no_package_is_to_install(tmp_path: Path) -> None:
    (tmp_path / "nixl.py").touch()
    report = doctor(PYTHONPATH=str(tmp_path))
    assert report.failed("nixl-loads", f"{tmp_path}/nixl.py hides the module nixl of nixl")
    assert report.checks["nixl-loads"][2].startswith(f"rename {tmp_path}/nixl.py")
    assert report.checks["transfers-arrive"] == report.checks["nixl-loads"]


@pytest.mark.parametrize("module", ["typing", "json"])  # one is imported at once, the other is used later
def test_a_file_that_hides_a_module_of_python_is_named(module: str, tmp_path: Path) -> None:
    hiding = tmp_path / f"{module}.py"
    hiding.touch()
    done = subprocess.run(
        [sys.executable, "-m", "pytest_nixl", "doctor"],
        env=environment(PYTHONPATH=str(tmp_path)), cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"pytest-nixl: {hiding} hides the module {module} of Python; remedy: rename {hiding}, or take {tmp_path} out "
        "of PYTHONPATH and do not start in it\n"
    )


@pytest.mark.parametrize(
    ("check", "pattern"),
    [
        ("nixl-loads", "nixl_cu*/_bindings*"),
        ("nixl-loads", "nixl/__init__.py"),
        ("backend-loads", "nixl_cu*.libs/libucp-*"),
        ("backend-loads", ".nixl_cu*/plugins/libplugin_UCX.so"),
    ],
)
def test_damaged_file_of_the_wheel_is_named_with_the_command_that_brings_it_back(
    check: str, pattern: str, plugins: Path
) -> None:
    need_programs("unshare", "mount", root=True)
    [file] = plugins.parents[1].glob(pattern)
    # In the namespace the beginning is all that is left of it.
    cut = f'head -c 2000 {file} > /dev/shm/cut && mount --bind /dev/shm/cut {file} && exec "$@"'
    with namespaces(f"mount -t tmpfs -o size=1g tmpfs /dev/shm && {cut}", "--mount") as host:
        report = doctor("--backend=POSIX,UCX", host=host)
    assert report.failed(check, f"{file} of nixl", "is missing or damaged")
    assert "pip install --force-reinstall" in report.checks[check][2]
    assert report.checks["transfers-arrive"][0] == "FAIL"
    assert "POSIX" not in report.checks[check][1]  # the other backend is tried nevertheless


def test_memory_that_a_control_group_forbids_is_named() -> None:
    """The workers are ended before the process that says so."""
    group = Path("/sys/fs/cgroup/memory/pytest-nixl-test")
    if not group.parent.is_dir():
        pytest.skip("this host has no control groups of version 1")
    need_programs(root=True)
    group.mkdir(exist_ok=True)
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        report = doctor(prefix=["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "-"])
        # The kernel chooses the worker that it ends.
        named = [check for check, (_, reason, _) in report.checks.items() if f"64 MiB of memory ({group})" in reason]
        assert named
        assert report.failed(named[0], "SIGKILL", "the kernel ends processes here for want of memory")
        assert "docker run --memory" in report.checks[named[0]][2]
    finally:
        assert eventually(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


#: A user for whom the limit of processes counts, who may read every file.
OTHER_USER = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups",
              "--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override")  # fmt: skip


def test_processes_that_cannot_be_started_are_named_with_the_limit() -> None:
    need_programs("setpriv", "prlimit", root=True)
    done = run_command("doctor", prefix=[*OTHER_USER, "prlimit", "--nproc=1"], env={"HOME": "/"})
    assert done.returncode == 2
    assert "no further process or thread: this user may have 1 (ulimit -u)" in done.stderr
    assert "remedy: raise the limit of processes" in done.stderr


def test_threads_that_nixl_cannot_start_are_named_with_the_limit() -> None:
    need_programs("setpriv", "prlimit", root=True)
    results = doctor("--no-transfer", prefix=[*OTHER_USER, "prlimit", "--nproc=4"], HOME="/")
    assert results.failed("nixl-loads", "NIXL cannot create an agent", "this user may have 4 (ulimit -u)")
    assert results.checks["transfers-arrive"][0] == "NOT-APPLICABLE", "without a transfer it is left out"


def test_last_words_of_a_worker_that_died_are_in_the_reason() -> None:
    report = doctor(UCX_LOG_FILE="/nonexistent/log")
    assert report.failed("transfers-arrive", "with UCX_LOG_FILE=/nonexistent/log nothing", "failed to open")
    assert report.checks["transfers-arrive"][2] == "`unset UCX_LOG_FILE`"


def test_host_with_an_empty_etc_and_a_file_of_settings_with_which_ucx_works_passes(tmp_path: Path) -> None:
    need_programs("unshare", "mount", root=True)
    (tmp_path / "ucx.conf").write_text("UCX_TLS=tcp\n")
    with namespaces('mount -t tmpfs tmpfs /etc && exec "$@"', "--mount") as host:
        report = doctor(host=host, UCX_MODULES="^ib", HOME=str(tmp_path))
    assert {verdict for verdict, _, _ in report.checks.values()} == {"PASS", "NOT-APPLICABLE"}
    assert "ucx.conf" not in str(report.checks)
