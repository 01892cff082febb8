# SPDX-License-Identifier: Apache-2.0
"""The etcd that ranks meet in."""

from __future__ import annotations

import re

from pytest_nixl.checks.doctor.check import Requirements, check, failed, not_applicable, passed, unknown, warned
from pytest_nixl.host.facts import Facts
from pytest_nixl.model.verdicts import Judgement

_NONE = "no etcd is given (NIXL_ETCD_ENDPOINTS, or --etcd of `pytest-nixl doctor`)"
#: The HTTP gateway that our client speaks to, and leases as NIXL uses them, are as they are now from here on.
_LEAST = (3, 4)
_SLOW, _TOO_SLOW = 0.1, 1.0
_APART = 5.0


def _silent(facts: Facts) -> Judgement | None:
    """What can be said where there is no answer; None where there is one."""
    etcd = facts.etcd
    if etcd.endpoints.value is None:
        if "not recorded" in etcd.endpoints.why:
            return unknown(f"the etcd: {etcd.endpoints.why}", "record the tree again")
        return not_applicable(_NONE)
    return failed(etcd.fault, etcd.remedy) if etcd.fault else None


@check("etcd-answers", "Does the etcd answer?")
def etcd_answers(facts: Facts, wanted: Requirements) -> Judgement:
    """At the address that is given."""
    silent = _silent(facts)
    return silent if silent is not None else passed(f"{facts.etcd.endpoints.value} answers")


@check("etcd-version", "Is the etcd new enough?")
def etcd_version(facts: Facts, wanted: Requirements) -> Judgement:
    """From 3.4 on."""
    silent = _silent(facts)
    if silent is not None:
        return silent
    version = facts.etcd.version.value or ""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return unknown(f"the etcd tells no version ({version!r})", "look at `etcdctl endpoint status`")
    if (int(match[1]), int(match[2])) < _LEAST:
        return failed(f"the etcd is {version}, older than 3.4", "run etcd 3.5 or newer")
    return passed(f"etcd {version}")


@check("etcd-latency", "Does the etcd answer within a tenth of a second?")
def etcd_latency(facts: Facts, wanted: Requirements) -> Judgement:
    """The median of five requests: a start of N ranks makes tens of them, one after the other."""
    silent = _silent(facts)
    if silent is not None:
        return silent
    seconds = facts.etcd.latency.value
    if seconds is None:
        return unknown(f"how fast the etcd answers is not known: {facts.etcd.latency.why}", "record the tree again")
    told = f"the etcd takes {seconds * 1000:.3g} ms to answer (median of five)"
    remedy = "look at its disk (`etcd_disk_wal_fsync_duration_seconds`), its load and the way there"
    if seconds >= _TOO_SLOW:
        return failed(told, remedy)
    return warned(told, remedy) if seconds >= _SLOW else passed(told)


@check("etcd-clock", "Do the clocks of the etcd and of this host agree?")
def etcd_clock(facts: Facts, wanted: Requirements) -> Judgement:
    """Leases do not depend on it; certificates do, and whoever compares the logs of two hosts."""
    silent = _silent(facts)
    if silent is not None:
        return silent
    ahead = facts.etcd.clock.value
    if ahead is None:
        return not_applicable("this etcd does not tell its time over plain HTTP")
    if abs(ahead) > _APART:
        which = "ahead of" if ahead > 0 else "behind"
        return warned(f"the etcd's clock is {abs(ahead):.0f} s {which} this host's", "let chrony or ntpd run on both")
    return passed(f"within {max(1, round(abs(ahead)))} s of each other")
