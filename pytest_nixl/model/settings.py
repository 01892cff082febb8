# SPDX-License-Identifier: Apache-2.0
"""TODO."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.rank_pairs import RankPairing
from pytest_nixl.model.settings import COMPARED_LAUNCHES, RAW_TOOLS, AlternateImage
from pytest_nixl.session.options import OPTIONS

#: More launches of a row than this decide nothing that these do not; a comparison starts with fewer.
MOST_LAUNCHES, COMPARED_LAUNCHES = 7, 5


#: Programs that move bytes as NIXL does, without NIXL.
RAW_TOOLS = ("ucx_perftest", "fi_rma_bw")


@dataclass(frozen=True)
class AlternateImage:
    """Another image on the same nodes: its label, and the command that its workers are started with."""

    image: str
    prefix: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join((self.image, *self.prefix))


@dataclass(frozen=True)
class Settings:
    """What this run was asked to do. Sizes are bytes, times are seconds."""

    backend: tuple[str, ...]
    #: May hold a password, as :func:`repr` of it would show.
    etcd: str = field(repr=False)
    etcd_server: str
    etcd_image: str
    etcd_cacert: str
    etcd_cert: str
    etcd_key: str
    etcd_user: str = field(repr=False)
    #: Where rank 0 serves an etcd; empty: it does not.
    etcd_listen: str
    #: Ranks that are asked for; None: as many as the launcher says.
    ranks: int | None
    rank: int | None
    group: str
    group_token: str = field(repr=False)
    pairs: RankPairing
    join_timeout: float
    logs: str
    op: tuple[str, ...]
    memory: tuple[MemoryPair, ...]
    #: The GPUs of initiator and target; None: chosen by each link.
    devices: DevicePair | None
    directory: str
    blocks: tuple[int, ...]
    batch: tuple[int, ...]
    depth: tuple[int, ...]
    iterations: int | None
    warmup: int
    duration: float
    timeout: float
    #: For a worker to start: to import NIXL and to make its agent.
    start_timeout: float
    profile: str
    #: Path of a nixlbench program; empty for the one on PATH, if there is one.
    nixlbench: str
    #: ``auto``, ``ETCD`` or ``ASIO``.
    nixlbench_runtime: str
    #: Each as ``--name=value``.
    nixlbench_args: tuple[str, ...]
    #: Directory of the raw tools; empty: those on PATH.
    raw_tools: str
    gate: bool
    #: Whether the run goes on after a required check of the infrastructure has failed.
    keep_going: bool
    image: str
    baseline: str
    against: AlternateImage | None
    #: Share of its bandwidth that a row may lose and be called unchanged: 0.05 is 5 %.
    max_regression: float
    #: Whole launches of each row, at least; None: one, or as many as a comparison needs.
    launches: int | None
    store: str
    report: tuple[str, ...]
    #: Field name to where its value came from: ``option``, ``ini``, ``environment NAME`` or ``default``.
    sources: Mapping[str, str] = field(default_factory=dict)
    #: One sentence for every variable that is set and has no effect.
    ignored: tuple[str, ...] = ()

    @property
    def etcd_is_deployments(self) -> bool:
        """Whether the etcd address is the deployment's own (from the environment), and so a suite's to judge."""
        return self.sources.get("etcd", "").startswith("environment")

    @property
    def programs(self) -> dict[str, str]:
        """Paths of other projects' programs that an option names, by their names."""
        found = {"nixlbench": os.path.abspath(self.nixlbench)} if self.nixlbench else {}
        if self.raw_tools:
            paths = {name: os.path.abspath(os.path.join(self.raw_tools, name)) for name in RAW_TOOLS}
            found |= {name: path for name, path in paths.items() if os.access(path, os.X_OK)}
        return found

    @property
    def compares(self) -> bool:
        """Whether this run is judged by another one."""
        return bool(self.baseline) or self.against is not None

    @property
    def judges(self) -> str:
        """The option by which the run as a whole is judged, beside its tests; empty: there is none."""
        if self.gate:
            return "--nixl-gate"
        if self.baseline:
            return "--nixl-baseline"
        return "--nixl-compare-image" if self.against is not None else ""

    @property
    def fewest_launches(self) -> int:
        """Whole launches that each row is measured in, at least."""
        return self.launches or (COMPARED_LAUNCHES if self.compares else 1)

    def lines(self) -> Iterator[str]:
        """Yield one line for each setting with its value and where that came from."""
        for item in OPTIONS:
            value = item.show(getattr(self, item.field))
            yield f"{item.flag}={value} ({self.sources[item.field]})"
        yield from self.ignored
