# SPDX-License-Identifier: Apache-2.0
"""What a run was asked to do: one frozen value for every option."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_nixl.model.agent_options import PROGRESS_THREAD, AgentOptions, BackendParameter, ThreadCounts, engine_agent
from pytest_nixl.model.kv_model import KvModel
from pytest_nixl.model.kv_plan import KvPlan
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.rank_pairs import RankPairing
from pytest_nixl.model.traffic_pattern import PatternChoice

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
    prefix: tuple[str, ...] = field(repr=False)

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
    #: The traffic pattern to measure; None: none.
    pattern: PatternChoice | None
    join_timeout: float
    #: Seconds after which etcd ends the lease of a rank that it hears nothing from.
    lease: int
    log_dir: str
    op: tuple[str, ...]
    memory: tuple[MemoryPair, ...]
    #: The GPUs of initiator and target; None: chosen by each link.
    devices: DevicePair | None
    file_dir: str
    #: URL of the S3 server of the fixture ``nixl_s3``; ``embedded``; ``container[:IMAGE]``; empty: that of AWS's
    #: variables, or else an embedded one.
    s3: str
    blocks: tuple[int, ...]
    batch: tuple[int, ...]
    depth: tuple[int, ...]
    #: Bytes of each buffer that the transfers of a bandwidth row walk; None: every transfer has the same bytes.
    footprint: int | None
    #: Which transfers of a bandwidth row carry a notification: ``each``, or the ``last`` one of a window.
    notify: str
    #: The model whose KV cache is transferred.
    kv_model: KvModel
    kv_tokens: int
    #: Tensor-parallel sizes of the prefill side and the decode side.
    kv_tp: tuple[int, int]
    #: Tokens per block.
    kv_block_tokens: int
    #: Data type of the KV cache; None: the model's.
    kv_dtype: str | None
    #: Requests for KV blocks in flight.
    kv_requests: int
    #: Requests for KV blocks that start in each second; None: each starts when one is over.
    kv_rate: float | None
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
    #: ``quick``, ``standard`` or ``extended``.
    level: str
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
    #: The engine whose agents are imitated, or ``default``. Its values are in the following fields if none were given.
    agent: str
    #: ``auto``, or one or both of ``off`` and ``on``. Rows are measured with each.
    progress_thread: tuple[str, ...]
    #: Worker threads of backends; None: none.
    threads: ThreadCounts | None
    #: ``auto``, ``none``, ``strict`` or ``rw``.
    sync_mode: str
    backend_params: tuple[BackendParameter, ...]
    #: The source of each field's value: ``option``, ``ini``, ``environment NAME`` or ``default``.
    sources: Mapping[str, str] = field(default_factory=dict)
    #: One sentence for every environment variable that is set and has no effect.
    ignored: tuple[str, ...] = ()

    @property
    def extended(self) -> bool:
        """Whether checks repeat what the level ``standard`` asks once: every order, 200 agents."""
        return self.level == "extended"

    @property
    def agents(self) -> tuple[AgentOptions, ...]:
        """How agents are created; several if everything is done with each of them. The first is the default."""
        telemetry = engine_agent(self.agent, self.backend).telemetry
        return tuple(
            AgentOptions(PROGRESS_THREAD[each], self.threads, self.sync_mode, self.backend_params, telemetry)
            for each in self.progress_thread
        )

    @property
    def kv_plan(self) -> KvPlan:
        """The transfer of the KV cache of one request.

        :raises ValueError: if a tensor-parallel size does not split the model's heads.
        """
        return KvPlan.of(
            self.kv_model,
            tokens=self.kv_tokens,
            tp=self.kv_tp,
            block_tokens=self.kv_block_tokens,
            dtype=self.kv_dtype,
        )

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
    def first_baseline(self) -> bool:
        """Whether ``--nixl-baseline`` names a record that does not exist yet, so that this run makes the first one."""
        return self.baseline.endswith(".json") and not os.path.exists(self.baseline)

    @property
    def fewest_launches(self) -> int:
        """Least number of launches of each row."""
        return self.min_launches or (COMPARED_LAUNCHES if self.compares else 1)
