# SPDX-License-Identifier: Apache-2.0
"""All checks of the doctor, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from pytest_nixl.checks.doctor.check import REGISTERED, Check, Requirements, unknown
from pytest_nixl.core import extensions
from pytest_nixl.core.extensions import Extension, ExtensionError, Registry
from pytest_nixl.host.facts import Facts
from pytest_nixl.model.verdicts import Judgement

#: The modules with checks, in the order in which their checks run.
_MODULES = (
    "libraries",
    "image",
    "limits",
    "cores",
    "rdma",
    "network",
    "gpu",
    "gpu_health",
    "etcd",
    "variables",
    "engine",
    "transfers",
)


def checks() -> Mapping[str, Check]:
    """Return all checks by id, in the order in which they run: ours, then those that other distributions add.

    :raises ExtensionError: if one of those cannot be loaded, or has an id that is taken.
    """
    return dict(Registry(extensions.DOCTOR_CHECKS, own_checks(), _accept))


def other_checks() -> list[str]:
    """Return the ids of the checks that other distributions add; none if two of them have the same id.

    Nothing is loaded. :func:`checks` reports such ids.
    """
    try:
        return list(extensions.DOCTOR_CHECKS.extensions(own_checks()))
    except ExtensionError:
        return []


def own_checks() -> Mapping[str, Check]:
    """Return the checks of pytest-nixl itself by id, in the order in which they run."""
    for module in _MODULES:
        import_module(f"{__package__}.{module}")
    place = {f"{__package__}.{module}": number for number, module in enumerate(_MODULES)}
    return dict(sorted(REGISTERED.items(), key=lambda item: place[item[1].judge.__module__]))


def _accept(extension: Extension, loaded: Any) -> Check:
    if not isinstance(loaded, Check):
        raise extension.fault("is not a pytest_nixl.Check")
    if loaded.id != extension.name:
        raise extension.fault(f"has another id in its code, {loaded.id!r}")

    def judge_guarded(facts: Facts, expected: Requirements) -> Judgement:
        try:
            judgement = extension.call(lambda: loaded.judge(facts, expected))
        except ExtensionError as error:
            return unknown(error.reason, error.remedy)
        if not isinstance(judgement, Judgement):
            error = extension.fault(f"returned {type(judgement).__name__} instead of a Judgement")
            return unknown(error.reason, error.remedy)
        return judgement

    return replace(loaded, judge=judge_guarded)


def judge(id: str, facts: Facts, expected: Requirements) -> Judgement:
    """Run one check.

    :raises KeyError: no check has this id.
    """
    return checks()[id].judge(facts, expected)
