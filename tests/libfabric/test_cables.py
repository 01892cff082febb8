# SPDX-License-Identifier: Apache-2.0
"""The cable between two hosts is cut, delayed or loses packets while transfers are in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from helpers.cli_run import eventually, repeats
from helpers.namespaces import Host, require_tools, two_hosts

from pytest_nixl.checks.faults.scene import FaultOutcome, FaultScene, judge_faults
from pytest_nixl.checks.faults.transfers import kept_while, lost_with
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import supervisor

#: The variables of the workers for each backend.
BACKENDS = {"UCX": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "veth0"}, "LIBFABRIC": {}}
#: A queue that holds packets for up to half a second.
SLOW = ("tbf", "rate", "100mbit", "burst", "64kb", "latency", "500ms")
SCENES = [("UCX", "WRITE"), ("UCX", "READ"), ("LIBFABRIC", "WRITE"), ("LIBFABRIC", "READ")]
Fault = Callable[[FaultScene, tuple[Host, Host]], FaultOutcome]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    require_tools()
    with two_hosts() as pair:
        yield pair


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, hosts: tuple[Host, Host], make_settings: Callable[..., Settings],
) -> Iterator[FaultScene]:  # fmt: skip
    """Agents on two hosts, with the third agent beside the initiator."""
    backend, op = request.param
    places = [LocalHost(supervisor(), rank, host.prefix) for rank, host in enumerate(hosts)]
    with Agents(places[0], replace(make_settings(), backend=(backend,))) as agents:
        yield FaultScene(agents, backend, op, dict(BACKENDS[backend]), places)


def cut(hosts: tuple[Host, Host]) -> None:
    hosts[1].run("ip", "link", "set", "veth0", "down")


def mend(hosts: tuple[Host, Host]) -> None:
    hosts[1].run("ip", "link", "set", "veth0", "up")
    hosts[1].wait_for("veth0")


def cut_for_a_while(scene: FaultScene, hosts: tuple[Host, Host]) -> FaultOutcome:
    def passing() -> None:
        cut(hosts)
        time.sleep(2)  # the fault itself
        mend(hosts)

    return kept_while(scene, passing)


def losing_packets(scene: FaultScene, hosts: tuple[Host, Host]) -> FaultOutcome:
    chance = ["-m", "statistic", "--mode", "random", "--probability", "0.02"]

    def lost() -> int:
        return int(hosts[1].run("iptables", "-L", "INPUT", "-vxn").splitlines()[2].split()[0])

    def passing() -> None:
        hosts[1].run("iptables", "-A", "INPUT", "-i", "veth0", *chance, "-j", "DROP")
        time.sleep(2)  # the fault itself
        # On a busy machine the agents may not have had their turn yet.
        results = eventually(lambda: lost() > 0, 8)
        hosts[1].run("iptables", "-F", "INPUT")
        assert results, "no packet was lost"

    return kept_while(scene, passing)


def slow_for_a_while(scene: FaultScene, hosts: tuple[Host, Host]) -> FaultOutcome:
    """The queue before a slow cable delays every packet."""

    def passing() -> None:
        for host in hosts:
            host.run("tc", "qdisc", "replace", "dev", "veth0", "root", *SLOW)
        time.sleep(2)  # the fault itself
        for host in hosts:
            host.unshape("veth0")

    return kept_while(scene, passing)


def cut_for_good(scene: FaultScene, hosts: tuple[Host, Host]) -> FaultOutcome:
    """Neither backend reports it soon; the initiator can still write to an agent on its own host."""
    outcome = lost_with(scene, lambda: cut(hosts))
    assert outcome.answer == "PROC"
    return outcome


FAULTS: list[Fault] = [cut_for_a_while, losing_packets, slow_for_a_while, cut_for_good]


@pytest.mark.parametrize(
    ("scene", "fault"),
    [
        pytest.param(scene, fault, id=f"{fault.__name__}-{'-'.join(scene)}")
        for scene, fault in [  # the soak has them all
            (("LIBFABRIC", "READ"), cut_for_a_while),
            (("UCX", "WRITE"), losing_packets),
            (("UCX", "WRITE"), cut_for_good),
            (("LIBFABRIC", "READ"), cut_for_good),
        ]
    ],
    indirect=["scene"],
)
def test_the_agents_go_on(scene: FaultScene, hosts: tuple[Host, Host], fault: Fault) -> None:
    passes(fault(scene, hosts))


@pytest.mark.soak
@pytest.mark.parametrize("repeat", repeats())
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scene", SCENES, ids="-".join, indirect=True)
def test_the_agents_go_on_every_time(scene: FaultScene, hosts: tuple[Host, Host], fault: Fault, repeat: int) -> None:
    passes(fault(scene, hosts))


def passes(outcome: FaultOutcome) -> None:
    judgement = judge_faults([outcome])
    assert judgement.verdict is Verdict.PASS, str(judgement)
