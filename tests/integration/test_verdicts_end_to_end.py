# SPDX-License-Identifier: Apache-2.0
"""Each verdict of a row with the real NIXL: each test causes a fault that the run must report."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.cli_run import bandwidth, profile

pytestmark = pytest.mark.long

#: A floor that every machine is far above, and one that no machine can reach.
LOW, HIGH = "0.000001 GB/s", "100000 GB/s"


def test_a_floor_below_the_bandwidth_passes(tmp_path: Path) -> None:
    done = bandwidth(f"--nixl-profile={profile(tmp_path / 'p.toml', f'floor = {LOW!r}')}")
    assert done.verdicts == {"WRITE 64KiB": "PASS", "READ 64KiB": "PASS"}
    assert "NIXL verdict: PASS (2 PASS; 2 rows measured)" in done.output
    assert done.code == 0


def test_a_floor_above_the_bandwidth_fails(tmp_path: Path) -> None:
    done = bandwidth(f"--nixl-profile={profile(tmp_path / 'p.toml', f'floor = {HIGH!r}')}", "--nixl-op=WRITE")
    assert done.verdicts == {"WRITE 64KiB": "FAIL"}
    assert "of the floor of 100000 GB/s" in done.output
    assert done.code == 1


def test_a_failure_names_the_command_that_repeats_its_row(tmp_path: Path) -> None:
    options = f"--nixl-profile={profile(tmp_path / 'p.toml', f'floor = {HIGH!r}')}"
    done = bandwidth(options, "--nixl-op=READ", "--nixl-warmup=3", blocks="64KiB,128KiB")
    lines = {line.strip() for line in done.output.splitlines()}
    [repeat] = {line for line in lines if line.startswith("repeat: ") and "131072" in line}
    arguments = repeat.removeprefix("repeat: ").split()
    assert arguments[:2] == ["pytest", "suites/bandwidth/test_bandwidth.py"]
    assert {options, "--nixl-op=READ", "--nixl-blocks=131072", "--nixl-warmup=3"} <= set(arguments)
    again = bandwidth(*arguments[2:])
    assert again.verdicts == {"READ 128KiB": "FAIL"}


def test_a_ceiling_below_the_bandwidth_is_implausible(tmp_path: Path) -> None:
    ceiling = f"floor = {LOW!r}\nceiling = '0.00001 GB/s'"
    done = bandwidth(f"--nixl-profile={profile(tmp_path / 'p.toml', ceiling)}", "--nixl-op=WRITE")
    assert done.verdicts == {"WRITE 64KiB": "IMPLAUSIBLE"}
    assert done.code == 1


def test_a_latency_bound_below_the_latency_fails(tmp_path: Path) -> None:
    done = bandwidth(f"--nixl-profile={profile(tmp_path / 'p.toml', 'p99 = {!r}'.format('1 ns'))}", "--nixl-op=WRITE")
    assert done.verdicts == {"WRITE 64KiB": "FAIL"}
    assert "p99" in done.output
    assert done.code == 1


def test_a_transport_that_the_profile_does_not_accept_is_wrong_at_any_speed() -> None:
    done = bandwidth("--nixl-op=WRITE", env={"UCX_TLS": "tcp"})
    assert done.verdicts == {"WRITE 64KiB": "WRONG-TRANSPORT"}
    assert "tcp/lo" in done.output
    assert done.code == 1


# Of each undecided verdict one of the two is enough in CI: test_verdicts has the outcome of every verdict.
PLAIN, GATE = ((), 0), (("--nixl-gate",), 1)


@pytest.mark.parametrize(
    ("gate", "code"), [pytest.param(*PLAIN, id="plain", marks=pytest.mark.whole), pytest.param(*GATE, id="gate")]
)
def test_an_unreported_transport_is_unknown(gate: tuple[str, ...], code: int) -> None:
    done = bandwidth("--nixl-op=WRITE", *gate, env={"UCX_PROTO_INFO": "n"})
    assert done.verdicts == {"WRITE 64KiB": "UNKNOWN"}
    assert done.code == code
    assert "the transport that carried the bytes is not known" in done.output


@pytest.mark.parametrize(
    ("gate", "code"), [pytest.param(*PLAIN, id="plain"), pytest.param(*GATE, id="gate", marks=pytest.mark.whole)]
)
def test_a_row_that_no_expectation_applies_to_has_no_expectation(
    tmp_path: Path, gate: tuple[str, ...], code: int
) -> None:
    other = profile(tmp_path / "p.toml", f"backend = ['LIBFABRIC']\nfloor = {LOW!r}")
    done = bandwidth(f"--nixl-profile={other}", "--nixl-op=WRITE", *gate)
    assert done.verdicts == {"WRITE 64KiB": "NO-EXPECTATION"}
    assert done.code == code


#: A plugin that changes a byte of the receiving worker's memory, through the kernel, after the timed transfers.
POKER = """
import os
from pytest_nixl.measure.link import Link

compare = Link._compare

def poke(self, phase, seed, size):
    if phase == "after the timed transfers":
        buffer = self.destination
        memory = os.open(f"/proc/{buffer.worker.pid}/mem", os.O_RDWR)
        byte = os.pread(memory, 1, buffer.address + 777)[0]
        os.pwrite(memory, bytes([byte ^ 0x40]), buffer.address + 777)
        os.close(memory)
    return compare(self, phase, seed, size)

Link._compare = poke
"""


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_a_byte_corrupted_at_its_destination_makes_the_row_corrupt(tmp_path: Path, op: str) -> None:
    (tmp_path / "poker.py").write_text(POKER)
    done = bandwidth("-p", "poker", f"--nixl-op={op}", env={"PYTHONPATH": str(tmp_path)})
    assert done.verdicts == {f"{op} 64KiB": "CORRUPT"}
    assert "offset 777: expected 0x" in done.output
    assert done.code == 1


#: A plugin that ends the target's worker half a second after it was asked to serve the timed transfers of the first
#: row, which take much longer. It is stopped at once, however, and then only these transfers have a short deadline.
KILLER = """
import os, signal, threading
from dataclasses import replace
from pytest_nixl.measure.link import Link

number = signal.{signal}
timed, done = Link._timed, []

def ended(self, *arguments, **named):
    if not done:
        done.append(1)
        stops, usual = number == signal.SIGSTOP, self._settings
        changes = {"timeout": 5.0, "duration": 0.5} if stops else {"duration": 30.0}
        worker = self.target.worker
        request = worker.request

        def request_and_end(command, **given):
            pending = request(command, **given)
            if stops:
                os.kill(worker.pid, number)
            else:
                threading.Timer(0.5, os.kill, (worker.pid, number)).start()
            return pending

        worker.request = request_and_end
        self._settings = replace(usual, **changes)
        try:
            return timed(self, *arguments, **named)
        finally:
            self._settings = usual
    return timed(self, *arguments, **named)

Link._timed = ended
"""


@pytest.mark.parametrize(
    ("signal", "message"),
    [
        ("SIGKILL", "rank 1 (target worker, pid {pid}) was ended by SIGKILL during 'serve'"),
        ("SIGSEGV", "rank 1 (target worker, pid {pid}) was ended by SIGSEGV during 'serve'"),
        ("SIGSTOP", "rank 1 (target worker, pid {pid}), which was stopped by a signal, did not answer 'serve'"),
    ],
)
def test_a_worker_that_ends_or_hangs_fails_only_its_row(tmp_path: Path, signal: str, message: str) -> None:
    (tmp_path / "killer.py").write_text(KILLER.replace("{signal}", signal))
    done = bandwidth("-p", "killer", "--nixl-op=WRITE", blocks="64KiB,128KiB", env={"PYTHONPATH": str(tmp_path)})
    assert done.verdicts == {"WRITE 64KiB": "ERROR", "WRITE 128KiB": "PASS"}
    before, after = message.split("{pid}")
    assert before in done.output
    assert after in done.output
    assert "Traceback" not in done.output
    assert done.code == 1
