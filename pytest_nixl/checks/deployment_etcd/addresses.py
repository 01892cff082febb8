# SPDX-License-Identifier: Apache-2.0
"""Try whether the addresses that agents published still answer: connect, send nothing, and close."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

from pytest_nixl.checks.deployment_etcd.agents import PublishedAgent, removing
from pytest_nixl.checks.deployment_etcd.key_text import shown
from pytest_nixl.checks.deployment_etcd.problem import EtcdProblem

#: The most addresses that are tried, how many at a time, and the seconds for each.
MOST, AT_A_TIME, SECONDS = 256, 32, 2.0

Address = tuple[str, int]


def answering(addresses: Collection[Address]) -> dict[Address, str]:
    """Connect to each address.

    :returns: for each address that was tried, why it does not answer; an empty text if it does. Loopback addresses are
        of the agent's host, so they are not tried, and neither are those that no host has.
    """
    tried = [address for address in dict.fromkeys(addresses) if _can_be_tried(address[0])][:MOST]
    if not tried:
        return {}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return dict(zip(tried, pool.map(_why_silent, tried), strict=True))


def _can_be_tried(host: str) -> bool:
    ip = ipaddress.ip_address(host)
    return not (ip.is_loopback or ip.is_multicast or ip.is_unspecified or ip.is_link_local)


def _why_silent(address: Address) -> str:
    try:
        socket.create_connection(address, timeout=SECONDS).close()
    except OSError as error:
        return "no answer" if isinstance(error, TimeoutError) else (error.strerror or type(error).__name__).lower()
    return ""


def judge_addresses(
    agents: Collection[PublishedAgent], silent: dict[Address, str], command: str
) -> Iterator[EtcdProblem]:
    """Yield each agent of which an address was tried and none answered.

    :param silent: the result of :func:`answering`.
    :param command: ``pytest-nixl etcd`` with the etcd's URL, for remedies.
    """
    for agent in agents:
        tried = [address for address in agent.addresses if address in silent]
        if tried and all(silent[address] for address in tried):
            why = ", ".join(f"{_text(address)}: {silent[address]}" for address in tried[:4])
            yield EtcdProblem(
                "address-silent",
                f"agent {shown(agent.name)!r} published under {shown(agent.prefix)} an address that does not answer "
                f"from this host within {SECONDS:g} s ({why}): who loads it cannot reach it",
                f"if this host can reach the agents' network and the agent is dead, {removing(agent, command)}",
                (agent.prefix,),
            )


def _text(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
