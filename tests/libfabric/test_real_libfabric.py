# SPDX-License-Identifier: Apache-2.0
"""LIBFABRIC over TCP with the real NIXL, between two processes of one host and between two hosts."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.cli_run import BANDWIDTH, ROOT, Finished, command, environment, execute, profile
from helpers.namespaces import Host, one_host, require_tools, two_hosts

from pytest_nixl.judge.row import judge
from pytest_nixl.measure.launches import Launches
from pytest_nixl.measure.link import Link
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor
from pytest_nixl.session.default_profile import default_profile

DRAM = MemoryPair("DRAM", "DRAM")
ACCEPTS_TCP = "transports = ['tcp']\nfloor = '0.0001 GB/s'"
#: Few transfers, because the rate does not matter.
FEW = ("--nixl-iterations=50", "--nixl-duration=20ms")
MakeSettings = Callable[..., Settings]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    require_tools()
    with one_host() as namespace:
        yield namespace


def run_in(host: Host, *arguments: str, timeout: float = 900, prefix: Sequence[str] = (), **env: str) -> Finished:
    """Run pytest in a host's network namespace, forked if it can be (:mod:`helpers.forked_runs`).

    :param prefix: a command that starts another command. With one the run is not forked.
    """
    with tempfile.TemporaryFile("w+") as output:
        code = execute(
            [*prefix, *command(*arguments)], cwd=ROOT, env=environment(**env), output=output, errors=output,
            timeout=timeout, fork=not prefix, host=host.pid,
        )  # fmt: skip
        output.seek(0)
        return Finished(code, output.read())


@pytest.mark.whole  # two hosts are below, and test_suites.py is a run on one
def test_bandwidth_suite_passes_and_records(host: Host, tmp_path: Path) -> None:
    accepted = f"--nixl-profile={profile(tmp_path / 'p.toml', ACCEPTS_TCP)}"
    written = tmp_path / "run.json"
    done = run_in(
        host, BANDWIDTH, "--nixl-backend=libfabric", "--nixl-blocks=4KiB,64KiB,1MiB,3MiB", "--nixl-batch=2",
        "--nixl-depth=3", accepted, "--nixl-gate", f"--benchmark-json={written}",
    )  # fmt: skip
    assert done.code == 0, done.output
    assert done.verdicts == {f"{op} {b}": "PASS" for op in ("WRITE", "READ") for b in ("4KiB", "64KiB", "1MiB", "3MiB")}
    assert "tcp/veth0" in done.output
    recorded = json.loads(written.read_text())["benchmarks"]
    assert "  LIBFABRIC: workers load a stand-in for libcuda.so.1" in done.output
    provenance = json.loads(written.read_text())["nixl"]["provenance"]
    assert provenance["environment"]["(CUDA driver)"].startswith("stand-in")
    assert recorded[0]["fullname"] == "LIBFABRIC/WRITE/DRAM:DRAM/4KiB/batch2/depth3/0-1"
    assert recorded[0]["extra_info"]["transports"] == ["tcp/veth0"]


@pytest.mark.alone  # a row that others disturb is measured up to seven times
def test_run_without_a_profile_is_judged_by_the_default_profile(host: Host) -> None:
    done = run_in(host, BANDWIDTH, "--nixl-backend=LIBFABRIC", "--nixl-blocks=4KiB,1MiB", prefix=["env"])
    name, reason = default_profile(("LIBFABRIC",))
    assert f"--nixl-profile={name} (default: {reason})" in done.output
    assert set(done.verdicts) == {f"{op} {block}" for op in ("WRITE", "READ") for block in ("4KiB", "1MiB")}
    assert set(done.verdicts.values()) <= {"PASS", "INCONCLUSIVE"}, done.output  # INCONCLUSIVE with contention
    assert re.findall(r" (\S+)  tcp/veth0 ", done.output) == ["0.0095", "0.15"] * 2  # the floors


@pytest.mark.parametrize("backend", [pytest.param("UCX", marks=pytest.mark.whole), "LIBFABRIC"])
def test_bandwidth_suite_passes_and_records_between_two_hosts(tmp_path: Path, backend: str) -> None:
    written = tmp_path / "run.json"
    with two_hosts() as hosts:
        done = run_in(
            hosts[0], BANDWIDTH, f"--nixl-backend={backend}", "--nixl-blocks=64KiB,1MiB", "--nixl-gate", *FEW,
            f"--nixl-profile={profile(tmp_path / 'p.toml', ACCEPTS_TCP)}", f"--benchmark-json={written}",
            "-p", "second_host", PYTHONPATH=str(Path(__file__).parent), UCX_TLS="tcp",
            PYTEST_NIXL_TEST_TARGET=shlex.join(hosts[1].prefix),
        )  # fmt: skip
    assert done.code == 0, done.output
    assert done.verdicts == {f"{op} {block}": "PASS" for op in ("WRITE", "READ") for block in ("64KiB", "1MiB")}
    for row in json.loads(written.read_text())["benchmarks"]:
        assert row["fullname"].startswith(f"{backend}/")
        figures = row["extra_info"]
        assert figures["transports"] == ["tcp/veth0"]
        # The cable between the hosts carried the bytes, not the loopback.
        assert list(figures["counted_bytes"]) == ["veth0"]
        assert figures["counted_bytes"]["veth0"] >= figures["payload_bytes"]


def test_two_backends_are_compared(host: Host, tmp_path: Path) -> None:
    accepted = f"--nixl-profile={profile(tmp_path / 'p.toml', ACCEPTS_TCP)}"
    done = run_in(host, BANDWIDTH, "--nixl-backend=UCX,LIBFABRIC", "--nixl-blocks=1MiB", accepted, *FEW, UCX_TLS="tcp")
    assert done.code == 0, done.output
    lines = [line.split() for line in done.output.splitlines() if line.startswith("LIBFABRIC : UCX ")]
    assert [line[3:6] for line in lines] == [["WRITE", "DRAM:DRAM", "1MiB"], ["READ", "DRAM:DRAM", "1MiB"]]
    assert all(float(line[7]) > 0 for line in lines)


def test_transport_that_is_not_accepted_is_wrong_transport(host: Host, tmp_path: Path) -> None:
    only_efa = profile(tmp_path / "p.toml", "transports = ['efa']")
    accepted = f"--nixl-profile={only_efa}"
    done = run_in(host, BANDWIDTH, "--nixl-backend=LIBFABRIC", "--nixl-blocks=64KiB", accepted, *FEW)
    assert done.verdicts == {"WRITE 64KiB": "WRONG-TRANSPORT", "READ 64KiB": "WRONG-TRANSPORT"}
    assert "tcp/veth0" in done.output
    assert done.code == 1


def test_missing_driver_is_reported_with_its_library_and_variable(host: Host) -> None:
    done = run_in(
        host, BANDWIDTH, "--nixl-backend=LIBFABRIC", "--nixl-blocks=64KiB", PYTEST_NIXL_DRIVER_STANDIN="never"
    )
    assert done.code == 1
    assert "stand-in for libcuda.so.1" not in done.output
    assert re.search("LIBFABRIC .*libcuda.so.1", done.output)
    assert "PYTEST_NIXL_LIBCUDA=/path/to/libcuda.so.1" in done.output
    assert "Traceback" not in done.output


@contextmanager
def link(settings: Settings, backend: str, op: str, hosts: tuple[Host, Host]) -> Iterator[Link]:
    """A link between two hosts."""
    first, other = (LocalHost(supervisor(), rank, host.prefix) for rank, host in enumerate(hosts))
    pairs = Launches((first, other), settings)
    try:
        yield pairs.link(backend, op, DRAM)
    finally:
        pairs.close()


# The suite between two hosts, above, has both operations.
@pytest.mark.parametrize(("backend", "op"), [("UCX", "READ"), ("LIBFABRIC", "WRITE")])
def test_bytes_cross_from_one_host_to_another(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, backend: str, op: str
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with two_hosts() as hosts, link(make_settings(), backend, op, hosts) as row_link:
        sender, receiver = hosts if op == "WRITE" else hosts[::-1]
        before = sender.counter("veth0", "tx_bytes"), receiver.counter("veth0", "rx_bytes")
        samples = row_link.measure(65536)
        assert samples.corruption is None
        assert samples.transports == ("tcp/veth0",)
        payload = 65536 * sum(samples.transfers)
        for host, name, count in ((sender, "tx_bytes", before[0]), (receiver, "rx_bytes", before[1])):
            assert host.counter("veth0", name) - count >= payload
        assert samples.counted is not None
        assert samples.counted.payload == payload
        (carrier,) = samples.counted.carriers(samples.transports)
        assert carrier.device == "veth0"
        assert payload <= carrier.carried <= 1.1 * payload  # with headers
        # NIXL logs nothing per transfer, because logging would slow the transfers.
        assert len(row_link.initiator.worker.output().splitlines()) < 1000


@pytest.mark.parametrize("backend", ["UCX", "LIBFABRIC"])
def test_row_whose_device_counted_nothing_is_wrong_transport(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with two_hosts() as hosts:
        # Counters that do not change stand in for bytes over another transport than the backend reports.
        counters = "/sys/class/net/veth0/statistics"
        freeze = "mount -t tmpfs none $0 && echo 7 > $0/tx_bytes && echo 7 > $0/rx_bytes"
        hosts[0].run("sh", "-c", freeze, counters)
        with link(make_settings(), backend, "WRITE", hosts) as row_link:
            samples = row_link.measure(65536)
    judgement = judge(samples, Expectation(source="a test", transports=("tcp",), floor=1.0))
    assert judgement.verdict is Verdict.WRONG_TRANSPORT
    assert re.search(rf"{backend} reported tcp/veth0, .*veth0 and lo .* 0 bytes", judgement.reason)
