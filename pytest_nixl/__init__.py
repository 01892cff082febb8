# SPDX-License-Identifier: Apache-2.0
"""Validate that NVIDIA NIXL moves data here, correctly and as fast as it should, and say why where it does not.

The names below are the public API: what tests, other plugins and extensions import. Each is loaded when it is first
used, so that an installed and unused plugin costs nothing. No module of this package imports from here.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder

TYPE_CHECKING = False  # as in typing, which a file on PYTHONPATH may hide: pytest_nixl.__main__ says so
if TYPE_CHECKING:
    # isort: off
    from typing import Any

    from pytest_nixl.checks.doctor.check import Check as Check, Requirements as Requirements
    from pytest_nixl.cluster.placement import LauncherPlacement as LauncherPlacement
    from pytest_nixl.core.errors import (
        LateError as LateError,
        NixlPluginError as NixlPluginError,
        NotApplicableError as NotApplicableError,
    )
    from pytest_nixl.core.extensions import ExtensionError as ExtensionError
    from pytest_nixl.core.free_ports import free_ports as free_ports
    from pytest_nixl.core.polling import wait_until as wait_until
    from pytest_nixl.core.redaction import redact as redact
    from pytest_nixl.core.units import (
        format_blocks as format_blocks,
        format_size as format_size,
        parse_blocks as parse_blocks,
        parse_rate as parse_rate,
        parse_share as parse_share,
        parse_size as parse_size,
        parse_time as parse_time,
    )
    from pytest_nixl.core.wire import Ref as Ref
    from pytest_nixl.etcd.client import EtcdClient as EtcdClient
    from pytest_nixl.etcd.endpoints import Endpoint as Endpoint, parse_endpoints as parse_endpoints
    from pytest_nixl.etcd.errors import EtcdError as EtcdError
    from pytest_nixl.etcd.proxy import EtcdProxy as EtcdProxy, ProxyClient as ProxyClient
    from pytest_nixl.etcd_servers.sources import SessionEtcd as SessionEtcd
    from pytest_nixl.fixtures.agents import MakeBuffer as MakeBuffer
    from pytest_nixl.fixtures.opened_etcd import EtcdFixture as EtcdFixture, PrivateEtcd as PrivateEtcd
    from pytest_nixl.fixtures.factories import (
        agent_fixture as agent_fixture,
        etcd_fixture as etcd_fixture,
        s3_fixture as s3_fixture,
    )
    from pytest_nixl.host.facts import Facts as Facts
    from pytest_nixl.host.recorded_tree import FactsRoot as FactsRoot
    from pytest_nixl.judge.profiles import Profile as Profile, load_profile as load_profile
    from pytest_nixl.measure.link import Link as Link
    from pytest_nixl.measure.launches import Launches as Launches
    from pytest_nixl.model.agent_options import AgentOptions as AgentOptions
    from pytest_nixl.model.expectation import Expectation as Expectation
    from pytest_nixl.model.figure import Figure as Figure
    from pytest_nixl.model.findings import (
        FINDINGS as FINDINGS,
        Finding as Finding,
        FindingError as FindingError,
        judge_finding as judge_finding,
    )
    from pytest_nixl.model.kv_cache import KvModel as KvModel
    from pytest_nixl.model.kv_cache import kv_model as kv_model
    from pytest_nixl.model.kv_cache import KvPlan as KvPlan
    from pytest_nixl.model.memory import DevicePair as DevicePair, MemoryPair as MemoryPair
    from pytest_nixl.model.row_key import RowKey as RowKey
    from pytest_nixl.model.samples import Samples as Samples
    from pytest_nixl.model.settings import Settings as Settings
    from pytest_nixl.model.verdicts import Judgement as Judgement, Outcome as Outcome, Verdict as Verdict
    from pytest_nixl.model.worker_commands import WorkerCommand as WorkerCommand
    from pytest_nixl.nixl.agent import Agents as Agents, NixlAgent as NixlAgent
    from pytest_nixl.nixl.agent_calls import DescriptorList as DescriptorList, TransferTelemetry as TransferTelemetry
    from pytest_nixl.nixl.backends import (
        BACKENDS as BACKENDS,
        Backend as Backend,
        between_agents as between_agents,
        shake_hands as shake_hands,
    )
    from pytest_nixl.nixl.backends.ucx import UcxBackend as UcxBackend
    from pytest_nixl.nixl.buffer import Buffer as Buffer
    from pytest_nixl.nixl.endpoint_reading import ReadOutcome as ReadOutcome
    from pytest_nixl.nixl.s3_server import S3Bucket as S3Bucket
    from pytest_nixl.processes.hosts import Host as Host, LocalHost as LocalHost
    from pytest_nixl.processes.supervisor import SupervisorClient as SupervisorClient, supervisor as supervisor
    from pytest_nixl.processes.worker_errors import (
        NixlError as NixlError,
        WorkerDiedError as WorkerDiedError,
        WorkerError as WorkerError,
        WorkerHungError as WorkerHungError,
    )
    from pytest_nixl.processes.worker_process import Worker as Worker
    from pytest_nixl.report.run_report import RunReport as RunReport
    from pytest_nixl.session.cluster import Cluster as Cluster
    from pytest_nixl.session.run import Run as Run
    from pytest_nixl.store.record_reader import RecordedRun as RecordedRun

    # isort: on
    __all__: list[str]
    __version__: str

#: The module of each name.
_MODULES = {
    "checks.doctor.check": ("Check", "Requirements"),
    "cluster.placement": ("LauncherPlacement",),
    "core.errors": ("LateError", "NixlPluginError", "NotApplicableError"),
    "core.extensions": ("ExtensionError",),
    "core.polling": ("wait_until",),
    "core.redaction": ("redact",),
    "core.units": (
        "format_blocks",
        "format_size",
        "parse_blocks",
        "parse_rate",
        "parse_share",
        "parse_size",
        "parse_time",
    ),
    "core.wire": ("Ref",),
    "etcd.client": ("EtcdClient",),
    "etcd.endpoints": ("Endpoint", "parse_endpoints"),
    "etcd.errors": ("EtcdError",),
    "etcd.proxy": ("EtcdProxy", "ProxyClient"),
    "core.free_ports": ("free_ports",),
    "etcd_servers.sources": ("SessionEtcd",),
    "fixtures.agents": ("MakeBuffer",),
    "fixtures.opened_etcd": ("EtcdFixture", "PrivateEtcd"),
    "fixtures.factories": ("agent_fixture", "etcd_fixture", "s3_fixture"),
    "host.facts": ("Facts",),
    "host.recorded_tree": ("FactsRoot",),
    "judge.profiles": ("Profile", "load_profile"),
    "measure.link": ("Link",),
    "measure.launches": ("Launches",),
    "model.agent_options": ("AgentOptions",),
    "model.expectation": ("Expectation",),
    "model.figure": ("Figure",),
    "model.findings": ("FINDINGS", "Finding", "FindingError", "judge_finding"),
    "model.kv_cache": ("KvModel", "KvPlan", "kv_model"),
    "model.memory": ("DevicePair", "MemoryPair"),
    "model.row_key": ("RowKey",),
    "model.samples": ("Samples",),
    "model.settings": ("Settings",),
    "model.verdicts": ("Judgement", "Outcome", "Verdict"),
    "nixl.agent": ("Agents", "NixlAgent"),
    "nixl.agent_calls": ("DescriptorList", "TransferTelemetry"),
    "nixl.backends": ("BACKENDS", "Backend", "between_agents", "shake_hands"),
    "model.worker_commands": ("WorkerCommand",),
    "nixl.backends.ucx": ("UcxBackend",),
    "nixl.buffer": ("Buffer",),
    "nixl.endpoint_reading": ("ReadOutcome",),
    "nixl.s3_server": ("S3Bucket",),
    "processes.hosts": ("Host", "LocalHost"),
    "processes.supervisor": ("SupervisorClient", "supervisor"),
    "processes.worker_errors": ("NixlError", "WorkerDiedError", "WorkerError", "WorkerHungError"),
    "processes.worker_process": ("Worker",),
    "report.run_report": ("RunReport",),
    "session.cluster": ("Cluster",),
    "session.run": ("Run",),
    "store.record_reader": ("RecordedRun",),
}


class _PlainImports:
    """Let Python import the modules of this package, but those of the suites.

    pytest rewrites the assertions of each module of a plugin. Where it cannot keep the result (read-only site-packages,
    ``PYTHONDONTWRITEBYTECODE``) it does so at each start, which takes longer than all that an unused plugin does.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}.") or name.startswith(f"{__name__}.suites"):
            return None
        return PathFinder.find_spec(name, path, target)


if "_pytest.assertion.rewrite" in sys.modules:
    sys.meta_path.insert(0, _PlainImports)


def _load(name: str) -> Any:
    """Return what an importer of ``name`` gets. :raises AttributeError: if it is not public."""
    if name == "__all__":
        return sorted(["__version__", *(public for names in _MODULES.values() for public in names)])
    from importlib.metadata import PackageNotFoundError, version

    if name == "__version__":
        try:
            return version("pytest-nixl")
        except PackageNotFoundError:  # a clone that is not installed
            return "unknown"
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # else every name would look public to a type checker

    def __getattr__(name: str) -> Any:
        value = globals()[name] = _load(name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_load("__all__")})
