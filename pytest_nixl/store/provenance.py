# SPDX-License-Identifier: Apache-2.0
"""The provenance of a run: image, versions, environment and host, so that a change can be explained later."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pytest_nixl.core.redaction import recorded
from pytest_nixl.core.strict import printable

#: Environment variables that steer NIXL and the libraries below it. No other variable is recorded.
_STEERING = re.compile(
    r"(UCX_|NIXL_|FI_|NCCL_|CUDA_|NVIDIA_|IBV_|RDMAV_|MLX[45]_|OMP_|LD_LIBRARY_PATH$|LD_PRELOAD$|MALLOC_)"
)
#: Variables of this plugin among them: they label the run and cannot explain a change.
_OUR_VARIABLES = frozenset(("NIXL_IMAGE", "NIXL_IMAGE_DIGEST", "NIXL_NODE_NAME", "NIXL_PODINFO"))

#: The directory at which the manifests mount a Kubernetes downward API volume with ``labels`` and ``annotations``.
PODINFO = "/etc/podinfo"
_IMAGE_KEY, _DIGEST_KEY = "pytest-nixl/image", "pytest-nixl/image-digest"

#: The facts that must be equal on two hosts of the same kind of machine.
SAME_MACHINE = ("cpu", "cores", "nics", "gpus")


@dataclass(frozen=True)
class ImageIdentity:
    """The validated image.

    :param reference: its name; empty: not known.
    :param digest: ``sha256:…``; empty: not known.
    :param source: where the reference comes from, in words.
    """

    reference: str = ""
    digest: str = ""
    source: str = ""

    def __str__(self) -> str:
        short = self.digest.removeprefix("sha256:")[:12]
        return f"{self.reference or 'unnamed image'}{f' ({short})' if short else ''}"


@dataclass(frozen=True)
class Provenance:
    """The circumstances of a run.

    :param versions: versions of NIXL, UCX, libfabric and Python, as the workers report them, and of the NVIDIA driver
        and the kernel.
    :param environment: the environment variables that steer transports, with secrets hidden.
    :param host: facts of rank 0's host: name, CPU, cores, network cards with their rates, GPUs; with several ranks,
        also the host of each.
    """

    image: ImageIdentity = field(default_factory=ImageIdentity)
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    host: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the provenance as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Change:
    """One difference between two runs. An empty side means that the run did not have it.

    :param what: its part and its name, such as ``environment UCX_TLS`` or ``versions nixl``.
    """

    what: str
    before: str
    now: str

    def __str__(self) -> str:
        if name := self.variable:
            if not self.now:
                return f"{name}={self.before} was set before, and is not set in this run"
            return f"{name}={self.now} is set in this run, and was {self.before or 'not set'} before"
        return f"{self.what}: {self.before or 'not recorded'} -> {self.now or 'not recorded'}"

    @property
    def variable(self) -> str:
        """The environment variable that differs; empty: the difference is another one."""
        name = self.what.removeprefix("environment ")
        return "" if name == self.what or name.startswith("(") else name


def gather(
    reference: str,
    versions: Mapping[str, str],
    environ: Mapping[str, str] = os.environ,
    ranks: Sequence[str] = (),
) -> Provenance:
    """Return this run's provenance.

    :param reference: the image from the settings; empty: take it from the downward API.
    :param versions: the versions that the workers report.
    :param environ: the environment variables.
    :param ranks: the host of each rank; empty: there is one rank.
    """
    driver = _first_line(Path("/sys/module/nvidia/version"))
    system = {"kernel": platform.release(), **({"nvidia_driver": driver} if driver else {})}
    return Provenance(
        image=image_of(reference, environ),
        versions={**{name: versions[name] for name in sorted(versions)}, **system},
        environment=steering(environ),
        host={**host(environ), **({"ranks": list(ranks)} if ranks else {})},
    )


def image_of(reference: str, environ: Mapping[str, str] = os.environ) -> ImageIdentity:
    """Return the image of the settings, or else of the annotations or labels of a downward API volume.

    :param reference: the image from the settings; empty: not set.
    :param environ: the environment variables.
    """
    digest, source = environ.get("NIXL_IMAGE_DIGEST", ""), "--nixl-image or NIXL_IMAGE"
    if not reference or not digest:
        labels = _podinfo(Path(environ.get("NIXL_PODINFO", PODINFO)))
        if not reference and _IMAGE_KEY in labels:
            reference, source = labels[_IMAGE_KEY], "downward API"
        digest = digest or labels.get(_DIGEST_KEY, "")
    name, _, pinned = reference.partition("@")
    return ImageIdentity(name, pinned or digest, source if reference else "")


def _podinfo(folder: Path) -> dict[str, str]:
    """Read ``key="value"`` lines, as the kubelet writes them."""
    labels: dict[str, str] = {}
    for name in ("labels", "annotations"):
        try:
            text = (folder / name).read_text()
        except OSError:
            continue
        for key, value in re.findall(r'^([^=\s]+)="((?:[^"\\]|\\.)*)"$', text, re.MULTILINE):
            labels[key] = re.sub(r"\\(.)", r"\1", value)
    return labels


def steering(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that steer transports. Values that may contain a secret are hidden."""
    names = sorted(name for name in environ if _STEERING.match(name) and name not in _OUR_VARIABLES)
    return {name: recorded(name, environ[name]) for name in names}


def host(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the facts of this host."""
    return {
        "name": printable(environ.get("NIXL_NODE_NAME") or platform.node()),
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "nics": dict(_nics()),
        "gpus": len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    # Not every architecture has a model name; Arm has numbers.
    for name in ("model name", "CPU part", "cpu"):
        match = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
        if match:
            return f"{platform.machine()} {match[1].strip()}"
    return platform.machine()


def _nics() -> Iterator[tuple[str, str]]:
    """Yield the physical network cards with their rates, without the virtual ones of a container's network."""
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        yield f"{port.parent.parent.name}:{port.name}", _first_line(port / "rate")
    for device in sorted(Path("/sys/class/net").glob("*/device")):
        speed = _first_line(device.parent / "speed")
        yield device.parent.name, f"{speed} Mb/s" if speed.isdecimal() else ""


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the speed of a device that is down cannot be read
        return ""


def changes(before: Provenance, now: Provenance) -> list[Change]:
    """Return all differences between two runs, the image first."""
    facts_before, other = _flat(before), _flat(now)
    names = dict.fromkeys((*facts_before, *other))
    return [
        Change(name, facts_before.get(name, ""), other.get(name, ""))
        for name in names
        if facts_before.get(name) != other.get(name)
    ]


def other_machine(before: Provenance, now: Provenance) -> list[Change]:
    """Return the differences that make two hosts different kinds of machine; empty: no known fact differs."""
    return [
        Change(name, _named(before.host[name]), _named(now.host[name]))
        for name in SAME_MACHINE
        if before.host.get(name) is not None and now.host.get(name) is not None and before.host[name] != now.host[name]
    ]


def _named(value: Any) -> str:
    """Return a fact of a host as text: a table as its names with their values."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}".strip() for key, inner in value.items()) or "none"
    return str(value)


def _flat(provenance: Provenance) -> dict[str, str]:
    facts = {"image": provenance.image.reference, "image digest": provenance.image.digest[:19]}
    for part in ("versions", "environment", "host"):
        facts |= dict(_leaves(part, getattr(provenance, part)))
    return {name: text for name, text in facts.items() if text}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name} {key}", inner)
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))
    else:
        yield name, str(value)
