# SPDX-License-Identifier: Apache-2.0
"""Choose the level, the backend and the profile of a run from the facts of a host, each with the reason."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_nixl.core.sentences import plural
from pytest_nixl.model.settings import OPTIONS
from pytest_nixl.session.default_profile import default_profile, gpu_profile
from pytest_nixl.session.parsers import parse_backends

if TYPE_CHECKING:
    from pytest_nixl.host.facts import Facts

#: The reason if the user named a value.
EXPLICIT = "given"
_BACKEND = next(option for option in OPTIONS if option.field == "backend")


@dataclass(frozen=True)
class Choice:
    """A value of an option, and the reason for it."""

    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})"


@dataclass(frozen=True)
class RunChoice:
    """The choices of one run.

    :param gpus: the models of the host's GPUs; empty too if nothing needed the facts.
    """

    level: Choice
    backend: Choice
    profile: Choice
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"level {self.level}, backend {self.backend}, profile {self.profile}"

    def for_gpu_memory(self) -> str:
        """Return how to measure GPU memory, because a run measures host memory; empty without a GPU."""
        if not self.gpus:
            return ""
        profile = gpu_profile(self.gpus) or "YOURS"
        return f"it measures host memory; for GPU memory: pytest-nixl run --profile {profile} --nixl-memory=VRAM:VRAM"


def choose(
    facts: Facts | None,
    *,
    level: str | None = None,
    backend: str | None = None,
    profile: str | None = None,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> RunChoice:
    """Choose what was not given.

    :param facts: the facts of the host; None only if level and backend are given.
    :param environ: the environment, in which NIXL_BACKEND names the backend.
    :param root: the directory that contains the host's ``sys``.
    :raises ValueError: a backend is not supported.
    """
    named = next((name for name in _BACKEND.environment if environ.get(name)), "")
    if backend is not None:
        backend_choice = Choice(_parsed(backend), EXPLICIT)
    elif named:
        backend_choice = Choice(_parsed(environ[named]), named)
    else:
        assert facts is not None
        backend_choice = _backend(facts)
    if level is not None:
        level_choice = Choice(level, EXPLICIT)
    else:
        assert facts is not None
        level_choice = _level(facts)
    if profile is not None:
        profile_choice = Choice(profile, EXPLICIT)
    else:
        name, reason = default_profile(backend_choice.value.split(","), root)
        profile_choice = Choice(name, reason or "the default")
    models = () if facts is None else tuple(gpu.name for gpu in facts.gpu.gpus)
    return RunChoice(level_choice, backend_choice, profile_choice, models)


def needs_facts(level: str | None, backend: str | None) -> bool:
    """Return whether :func:`choose` needs the facts of the host."""
    return level is None or (backend is None and not any(os.environ.get(name) for name in _BACKEND.environment))


def _parsed(backends: str) -> str:
    try:
        return ",".join(parse_backends(backends))
    except ValueError as error:
        raise ValueError(f"{error}: expected {_BACKEND.form}") from None


def _level(facts: Facts) -> Choice:
    devices = _devices(facts)
    if devices:
        return Choice("standard", devices)
    return Choice("quick", "no GPU and no RDMA device")


def _backend(facts: Facts) -> Choice:
    plugins = facts.software.plugins
    if facts.efa and "LIBFABRIC" in (plugins or ("LIBFABRIC",)):
        return Choice("LIBFABRIC", plural(len(facts.efa), "EFA device"))
    if plugins and "UCX" not in plugins and "LIBFABRIC" in plugins:
        return Choice("LIBFABRIC", "this NIXL has no plugin UCX")
    if facts.efa:
        return Choice("UCX", "this NIXL has no plugin LIBFABRIC")
    return Choice("UCX", "no EFA device")


def _devices(facts: Facts) -> str:
    rdma = [device for device in facts.rdma if not device.manages_nvlink]
    counts = [(len(facts.gpu.gpus), "GPU"), (len(rdma), "RDMA device")]
    return " and ".join(plural(number, noun) for number, noun in counts if number)
