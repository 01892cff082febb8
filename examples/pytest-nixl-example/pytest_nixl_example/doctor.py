# SPDX-License-Identifier: Apache-2.0
"""A check of the doctor: a pure function of a host's facts and of what the profile says."""

from __future__ import annotations

from pytest_nixl import Check, Facts, Judgement, Requirements, Verdict


def _loopback_is_up(facts: Facts, requirements: Requirements) -> Judgement:
    found = [nic for nic in facts.network.nics if nic.loopback]
    if not found:
        return Judgement(Verdict.FAIL, "there is no loopback interface", "give the host's network namespace one")
    if not found[0].addresses:
        return Judgement(Verdict.FAIL, f"{found[0].name} has no address", f"run: ip link set {found[0].name} up")
    return Judgement(Verdict.PASS, f"{found[0].name} has {found[0].addresses[0]}")


#: ``image=False``: it does not run for an image that is being built (``pytest-nixl doctor --image``).
LOOPBACK_IS_UP = Check("loopback-is-up", "Can processes of this host reach each other?", _loopback_is_up, image=False)
