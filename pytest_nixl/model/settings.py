# SPDX-License-Identifier: Apache-2.0
"""What a run was asked to do: one frozen value for every option."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.rank_pairs import RankPairing

#: The largest number of launches of a row, and the number that a comparison starts with. More launches decide no more.
MOST_LAUNCHES, COMPARED_LAUNCHES = 7, 5


#: Programs that move bytes over the same libraries as NIXL, but without NIXL.
RAW_TOOLS = ("ucx_perftest", "fi_rma_bw")


@dataclass(frozen=True)
class AlternateImage:
    """Another image to compare with on the same hosts.

    :param image: its label in records.
    :param prefix: the command that its workers are started with.
    """

    image: str
    prefix: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join((self.image, *self.prefix))


@dataclass(frozen=True)
class Settings:
    """All settings of one run. Sizes are bytes, times are seconds."""

    backend: tuple[str, ...]
    #: May contain a password, so it is left out of :func:`repr`.
    etcd: str = field(repr=False)
    etcd_server: str
    etcd_image: str
    etcd_cacert: str
    etcd_cert: str
    etcd_key: str
    etcd_user: str = field(repr=False)
    #: Address at which rank 0 serves an etcd; empty: it does not.
    etcd_listen: str
    #: Number of ranks; None: the number that the launcher gives.
    ranks: int | None
    rank: int | None
    group: str
    group_token: str = field(repr=False)
    pairs: RankPairing
    join_timeout: float
    log_dir: str
    op: tuple[str, ...]
    memory: tuple[MemoryPair, ...]
    #: The GPUs of initiator and target; None: chosen by each link.
    devices: DevicePair | None
    file_dir: str
    blocks: tuple[int, ...]
    batch: tuple[int, ...]
    depth: tuple[int, ...]
    iterations: int | None
    warmup: int
    duration: float
    timeout: float
    #: Time limit for a worker to import NIXL and to create its agent.
    start_timeout: float
    profile: str
    #: Path of a nixlbench program; empty: the one on PATH, if there is one.
    nixlbench: str
    #: ``auto``, ``ETCD`` or ``ASIO``.
    nixlbench_runtime: str
    #: Each as ``--name=value``.
    nixlbench_args: tuple[str, ...]
    #: Directory of the raw tools; empty: those on PATH.
    raw_tools_dir: str
    gate: bool
    #: Whether the run continues after a required infrastructure check has failed.
    keep_going: bool
    image: str
    baseline: str
    compare_image: AlternateImage | None
    #: Loss of bandwidth up to which a row counts as unchanged: 0.05 is 5 %.
    max_regression: float
    #: Least number of launches of each row; None: one, or as many as a comparison needs.
    min_launches: int | None
    store: str
    report: tuple[str, ...]
    #: The source of each field's value: ``option``, ``ini``, ``environment NAME`` or ``default``.
    sources: Mapping[str, str] = field(default_factory=dict)
    #: One sentence for every environment variable that is set and has no effect.
    ignored: tuple[str, ...] = ()

    @property
    def etcd_is_deployments(self) -> bool:
        """Whether the etcd endpoints come from the deployment's environment, so that the endpoint suite checks them."""
        return self.sources.get("etcd", "").startswith("environment")

    @property
    def programs(self) -> dict[str, str]:
        """Paths of the external programs that options name, by program name."""
        found = {"nixlbench": os.path.abspath(self.nixlbench)} if self.nixlbench else {}
        if self.raw_tools_dir:
            paths = {name: os.path.abspath(os.path.join(self.raw_tools_dir, name)) for name in RAW_TOOLS}
            found |= {name: path for name, path in paths.items() if os.access(path, os.X_OK)}
        return found

    @property
    def compares(self) -> bool:
        """Whether this run is compared with another one."""
        return bool(self.baseline) or self.compare_image is not None

    @property
    def judges(self) -> str:
        """The option because of which the run as a whole is judged, not only its tests; empty: there is none."""
        if self.gate:
            return "--nixl-gate"
        if self.baseline:
            return "--nixl-baseline"
        return "--nixl-compare-image" if self.compare_image is not None else ""

    @property
    def fewest_launches(self) -> int:
        """Least number of launches of each row."""
        return self.min_launches or (COMPARED_LAUNCHES if self.compares else 1)
