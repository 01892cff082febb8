# SPDX-License-Identifier: Apache-2.0
"""Checks of the etcd server that the ranks use."""

from __future__ import annotations

import math
import re

from pytest_nixl.checks.doctor.check import Requirements, check, failed, not_applicable, passed, unknown, warned
from pytest_nixl.host.facts import Facts
from pytest_nixl.model.verdicts import Judgement

_NONE = "no etcd address is given (NIXL_ETCD_ENDPOINTS, or `pytest-nixl doctor --etcd=URL`)"
#: The first release whose HTTP gateway and leases work as this client and NIXL use them.
_LEAST = (3, 4)
_SLOW, _TOO_SLOW = 0.1, 1.0
_APART = 5.0


def _silent(facts: Facts, expected: Requirements) -> Judgement | None:
    """Return the verdict of an etcd that does not answer; None if it answers."""
    etcd = facts.etcd
    if etcd.endpoints.value is None:
        if "not recorded" in etcd.endpoints.why:
            return unknown(f"the etcd: {etcd.endpoints.why}", "record the tree again")
        return not_applicable(_NONE)
    return failed(etcd.fault, etcd.remedy) if etcd.fault else None


@check("etcd-answers", "Does the etcd answer?", unless=_silent)
def etcd_answers(facts: Facts, expected: Requirements) -> Judgement:
    """Judge whether etcd answers at the given address."""
    return passed(f"etcd at {facts.etcd.endpoints.value} answers")


@check("etcd-version", "Is the etcd new enough?", unless=_silent)
def etcd_version(facts: Facts, expected: Requirements) -> Judgement:
    """The version of etcd is 3.4 or newer."""
    version = facts.etcd.version.value or ""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return unknown(f"etcd reports no readable version ({version!r})", "run `etcdctl endpoint status`")
    if (int(match[1]), int(match[2])) < _LEAST:
        return failed(f"etcd is version {version}, older than 3.4", "run etcd 3.5 or newer")
    return passed(f"etcd {version}")


@check("etcd-latency", "Does the etcd answer within a tenth of a second?", unless=_silent)
def etcd_latency(facts: Facts, expected: Requirements) -> Judgement:
    """Etcd answers within a tenth of a second."""
    seconds = facts.etcd.latency.value
    if seconds is None:
        return unknown(f"the latency of etcd is unknown: {facts.etcd.latency.why}", "record the tree again")
    digits = ".3g" if seconds < _SLOW else ",.0f"
    description = f"etcd takes {seconds * 1000:{digits}} ms to answer (median of five)"
    remedy = "check etcd's disk (metric etcd_disk_wal_fsync_duration_seconds), its CPU load and the network to it"
    if seconds >= _TOO_SLOW:
        return failed(description, remedy)
    return warned(description, remedy) if seconds >= _SLOW else passed(description)


@check("etcd-clock", "Do the clocks of the etcd and of this host agree?", unless=_silent)
def etcd_clock(facts: Facts, expected: Requirements) -> Judgement:
    """The clocks of etcd's host and of this host agree."""
    ahead = facts.etcd.clock.value
    if ahead is None:
        return not_applicable("this etcd does not report its time over plain HTTP")
    if abs(ahead) > _APART:
        side = "ahead of" if ahead > 0 else "behind"
        return warned(
            f"the clock of etcd's host is {abs(ahead):.0f} s {side} this host's", "run chrony or ntpd on both hosts"
        )
    return passed(f"the clocks differ by at most {math.ceil(abs(ahead) + 1)} s")
