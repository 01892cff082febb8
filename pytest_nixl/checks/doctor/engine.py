# SPDX-License-Identifier: Apache-2.0
"""Checks of what inference engines ask of NIXL on each request, in the environment of the deployment."""

from __future__ import annotations

from pytest_nixl.checks.doctor.check import (
    Requirements,
    check,
    failed,
    not_applicable,
    passed,
    unknown,
    warned,
)
from pytest_nixl.checks.doctor.libraries import not_loaded
from pytest_nixl.core.sentences import named, plural
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.software import NOT_TRIED
from pytest_nixl.model.engine_backends import ENGINE_BACKENDS
from pytest_nixl.model.nixl_releases import TELEMETRY_OFF, TELEMETRY_VARIABLE, telemetry_off_raises
from pytest_nixl.model.verdicts import Judgement

#: The class of NIXL's error if telemetry is asked for, and is off.
NO_TELEMETRY = "nixlNoTelemetryError"
_REMEDY = f"unset {TELEMETRY_VARIABLE}, or set {TELEMETRY_VARIABLE}=y"


@check("telemetry-in-process", "Can an engine read the telemetry of its transfers?", image=True)
def telemetry_in_process(facts: Facts, expected: Requirements) -> Judgement:
    """Judge get_xfer_telemetry() after a transfer: an engine that calls it fails each request for which it raises."""
    text = facts.environment.values.get(TELEMETRY_VARIABLE)
    setting = f"{TELEMETRY_VARIABLE}={text}" if text is not None else f"{TELEMETRY_VARIABLE} is not set"
    reason = facts.software.nixl.why
    if "Conversion to bool failed" in reason and text is not None:
        return failed(f"{setting}: NIXL creates no agent with this value", _REMEDY)
    for failure in ("Failed to load telemetry plugin", "Failed to create telemetry exporter"):
        if failure in reason:
            return failed(
                f"{setting}: NIXL creates no agent ({failure}{reason.partition(failure)[2]})",
                "correct or unset NIXL_TELEMETRY_EXPORTER, NIXL_TELEMETRY_DIR and NIXL_TELEMETRY_PROMETHEUS_PORT",
            )
    absent = not_loaded(facts, expected)
    if absent is not None:
        return not_applicable(f"NIXL cannot be loaded: {absent.reason}")
    version, telemetry = facts.software.nixl.value or "", facts.software.telemetry
    if telemetry.value:
        on, get = text is not None, facts.environment.get
        alone = on and not get("NIXL_TELEMETRY_EXPORTER") and not get("NIXL_TELEMETRY_DIR")
        only = "; no exporter is set, so only the program itself can read it" if alone else ""
        return passed(f"{setting}: get_xfer_telemetry() returned the {telemetry.value} bytes of a transfer{only}")
    off = (text or "").lower() in TELEMETRY_OFF and text is not None and telemetry_off_raises(version)
    if NO_TELEMETRY in telemetry.why or (off and telemetry.why == NOT_TRIED):
        return failed(
            f"{setting}: get_xfer_telemetry() of NIXL {version} raises {NO_TELEMETRY} after a transfer that succeeded, "
            "and vLLM then fails the request",
            _REMEDY,
        )
    if telemetry.why == NOT_TRIED:
        return passed(f"{setting}")
    return unknown(
        f"the telemetry of a transfer could not be read: {telemetry.why}", "follow the remedy of backend-loads"
    )


@check("engine-backend-fits", "Do engines use the backend that is validated, and one that fits this host?")
def engine_backend_fits(facts: Facts, expected: Requirements) -> Judgement:
    """Engines use the backend that this run validates, as far as variables say it, and one that fits the host."""
    by_backend = {
        backend: text
        for backend in ENGINE_BACKENDS
        if backend.variable and (text := facts.environment.get(backend.variable))
    }
    validated, efa = named(expected.backends), facts.efa
    for backend, text in by_backend.items():
        names = {part.strip().upper() for part in text.split(",")}
        if efa and "LIBFABRIC" not in names:
            return failed(
                f"{backend.variable}={text}, but this host has {plural(len(efa), 'EFA device')}, for which NIXL's "
                f"wheels bring no provider but LIBFABRIC's: {backend.engine} transfers over TCP",
                f"set {backend.variable}=LIBFABRIC",
            )
        if not names & set(expected.backends):
            return failed(
                f"{backend.variable}={text}: {backend.engine} uses {text}, but {validated} is validated here",
                f"validate {text} (--backend={text}, --nixl-backend={text}), or correct {backend.variable}",
            )
    reads = "; ".join(f"{backend.engine}: {backend.reads}" for backend in ENGINE_BACKENDS)
    if efa and "LIBFABRIC" not in expected.backends:
        return warned(
            f"this host has {plural(len(efa), 'EFA device')}, for which NIXL's wheels bring no provider but "
            f"LIBFABRIC's, but {validated} is validated, which engines use by default",
            f"validate with --backend=LIBFABRIC (--nixl-backend=LIBFABRIC), and give it to the engine ({reads})",
        )
    if by_backend:
        return passed("; ".join(f"{backend.engine} uses {text}, as validated" for backend, text in by_backend.items()))
    if efa:
        return passed(f"{validated} is validated; engines use UCX unless it is given to them ({reads})")
    return not_applicable("this host has no EFA, and no variable names an engine's backend")
