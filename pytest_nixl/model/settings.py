# SPDX-License-Identifier: Apache-2.0
"""What a run was asked to do: one frozen value for every option, and the table of the options.

pytest reads the table in every project in which the plugin is installed, so this module imports little.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from pytest_nixl.core.forms import BLOCKS_FORM, ENDPOINTS_FORM, KV_MODEL_FORM, LISTEN_FORM, MEMORY_FORM, TIME_FORM
from pytest_nixl.core.redaction import hide_command, redact
from pytest_nixl.model.agent_options import PROGRESS_THREAD, AgentOptions, engine_agent
from pytest_nixl.model.kv_cache import KvPlan

if TYPE_CHECKING:
    from pytest_nixl.model.agent_options import BackendParameter, ThreadCounts
    from pytest_nixl.model.kv_cache import KvModel
    from pytest_nixl.model.memory import DevicePair, MemoryPair
    from pytest_nixl.model.traffic_pattern import PatternChoice, RankPairing


@dataclass(frozen=True)
class Option:
    """One setting. A field of :class:`~pytest_nixl.model.settings.Settings` declares it by :func:`option`.

    :param field: the name of the field.
    :param parser: the accepted choices, or the parser of a text as ``MODULE:FUNCTION`` within ``pytest_nixl``. It is
        named here and imported when a setting is read: pytest loads the options in every project, and a parser may
        need any part of the package.
    :param form: the accepted form in words, for ``--help`` and for error messages.
    :param default: the default as text; empty: there is none.
    :param environment: the environment variables that the option falls back to.
    :param variable: the parser of these variables; None: that of the option.
    :param empty: the value of a setting that was not given and has no default.
    :param printer: writes a value as it would be typed: a function, or its name as for a parser; None: by its type.
    :param secret: whether the value is never shown.
    :param hidden: whether the value may contain a password, which is then redacted.
    :param switch: whether the option takes no value on the command line.
    :param per_rank: whether it may differ between ranks: the rank itself, how it reaches the etcd, where it writes.
    """

    field: str
    parser: str | tuple[str, ...]
    form: str
    default: str
    help: str
    metavar: str
    environment: tuple[str, ...]
    variable: Callable[[str], Any] | None
    empty: Any
    printer: str | Callable[[Any], str] | None
    secret: bool
    hidden: bool
    switch: bool
    per_rank: bool

    @property
    def flag(self) -> str:
        """The option on the command line, such as ``--nixl-join-timeout``."""
        return f"--nixl-{self.field.replace('_', '-')}"

    @property
    def ini(self) -> str:
        """The name of its ini value, and its name in pytest's configuration."""
        return f"nixl_{self.field}"

    @property
    def usual(self) -> Any:
        """The value of a setting that was not given."""
        # An empty text is not parsed here: only a person who gives an empty text gets an error for it.
        return self.parse(self.default) if self.default else self.empty

    def parse(self, text: str) -> Any:
        """Return the value of a text. :raises ValueError: with one sentence, if the text has another form."""
        if isinstance(self.parser, str):
            return _function(self.parser)(text)
        if text not in self.parser:
            raise ValueError(f"{text!r} is not one of the choices")
        return text

    def show(self, value: Any) -> str:
        """Return a value as it would be typed, with secrets redacted."""
        if self.secret:
            return "***" if value else "none"
        if value is None:
            return self.default or "none"
        if self.printer is not None:
            return (_function(self.printer) if isinstance(self.printer, str) else self.printer)(value)
        if isinstance(value, tuple):
            return redact(",".join(str(part) for part in value)) or "none"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float):
            return f"{f'{value:.9f}'.rstrip('0').rstrip('.')}s"
        return redact(str(value)) if value != "" else "none"


def option(
    parser: str | tuple[str, ...],
    form: str = "",
    *,
    help: str,
    default: str = "",
    metavar: str = "VALUE",
    environment: tuple[str, ...] = (),
    variable: Callable[[str], Any] | None = None,
    empty: Any = "",
    printer: str | Callable[[Any], str] | None = None,
    secret: bool = False,
    hidden: bool = False,
    switch: bool = False,
    per_rank: bool = False,
) -> Any:
    """Declare a field of the settings by its option. See :class:`Option` for the parameters."""
    row = {**locals(), "form": form or " | ".join(parser)}
    return field(repr=not (secret or hidden), metadata=row)


def _function(name: str) -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = resolve_name(f"pytest_nixl.{name}")
    return function


#: The largest number of launches of a row, and the number that a comparison starts with. More launches decide no more.
MOST_LAUNCHES, COMPARED_LAUNCHES = 7, 5
#: Programs that move bytes over the same libraries as NIXL, but without NIXL.
RAW_TOOLS = ("ucx_perftest", "fi_rma_bw")
ETCD_SERVERS = ("auto", "external", "container", "embedded")
DEFAULT_ETCD_IMAGE = "quay.io/coreos/etcd:v3.5.18"
NIXLBENCH_RUNTIMES = ("auto", "ETCD", "ASIO")
#: Each level makes the checks of those before it as well.
LEVELS = ("quick", "standard", "extended")
DEFAULT_LEVEL = "standard"
REPORT_ENDINGS = (".html", ".csv", ".prom", ".json")
#: The inference engines whose agents can be imitated.
ENGINES = ("default", "vllm", "dynamo", "sglang")
#: What NIXL calls the thread synchronization modes of an agent.
SYNC_MODES = ("auto", "none", "strict", "rw")


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


def _show_command(value: Any) -> str:
    return hide_command(shlex.join(value) if isinstance(value, tuple) else str(value)) or "none"


# No two are compared, and to make __eq__ would take a millisecond of each start of pytest.
@dataclass(frozen=True, eq=False)
class Settings:
    """All settings of one run, each with its option. Sizes are bytes, times are seconds."""

    # fmt: off
    backend: tuple[str, ...] = option(
        "session.parsers:parse_backends", "UCX, LIBFABRIC, POSIX, OBJ or AZURE_BLOB (any case), or a list of them",
        default="UCX", help="NIXL backends to validate", metavar="NAME[,NAME]", environment=("NIXL_BACKEND",))
    # Any text is accepted from a variable, because the endpoint suite judges the endpoints of the deployment.
    etcd: str = option(
        "session.parsers:parse_etcd", ENDPOINTS_FORM, help="endpoints of an existing etcd", metavar="URL[,URL]",
        environment=("NIXL_ETCD_ENDPOINTS", "ETCD_ENDPOINTS"), hidden=True, per_rank=True, variable=str)
    etcd_server: str = option(
        ETCD_SERVERS, default="auto", help="which etcd to use; auto: external if an endpoint is given, container if "
        "an engine answers and has the image, else embedded", metavar="KIND", per_rank=True)
    etcd_image: str = option(
        "session.parsers:parse_image", "REPOSITORY[:TAG]", default=DEFAULT_ETCD_IMAGE,
        help="image of the etcd container", metavar="REF", per_rank=True)
    etcd_cacert: str = option(
        "session.parsers:parse_file", "an existing PEM file", help="CA certificate to verify etcd with",
        metavar="FILE", environment=("ETCDCTL_CACERT",), per_rank=True)
    etcd_cert: str = option(
        "session.parsers:parse_file", "an existing PEM file", help="client certificate for etcd", metavar="FILE",
        environment=("ETCDCTL_CERT",), per_rank=True)
    etcd_key: str = option(
        "session.parsers:parse_file", "an existing PEM file", help="private key of the client certificate",
        metavar="FILE", environment=("ETCDCTL_KEY",), per_rank=True)
    etcd_user: str = option(
        "session.parsers:parse_user", "NAME:PASSWORD",
        help="user and password for etcd; set ETCDCTL_USER instead, because other users can see a command line",
        metavar="NAME:PASSWORD", environment=("ETCDCTL_USER",), secret=True, per_rank=True)
    #: Empty: rank 0 serves no etcd.
    etcd_listen: str = option(
        "session.parsers:parse_listen", LISTEN_FORM,
        help="address at which rank 0 serves an etcd to the other ranks, if there is no other etcd",
        metavar="ADDR:PORT", per_rank=True)
    #: Number of ranks; None: the number that the launcher gives.
    ranks: int | None = option(
        "session.parsers:parse_ranks", "a positive integer", help="number of ranks that start this same command; "
        "without it, the number that Slurm, MPI, torchrun or a LeaderWorkerSet gives; 1: this process alone, "
        "whatever the launcher says", metavar="N", empty=None)
    rank: int | None = option(
        "session.parsers:parse_rank", "a non-negative integer", help="rank of this process, from 0; without it, the "
        "rank that the launcher gives, or the order in which the ranks join", metavar="R", empty=None, per_rank=True)
    group: str = option(
        "session.parsers:parse_group", "1 to 64 letters, digits, . _ or -",
        help="name of the group that the ranks of this run join; without it, the launcher's job, or default",
        metavar="NAME")
    group_token: str = option(
        "session.parsers:parse_token", "a text that is not empty",
        help="shared secret of all ranks; set NIXL_GROUP_TOKEN instead, because other users can see a command line",
        metavar="TOKEN", environment=("NIXL_GROUP_TOKEN",), secret=True, per_rank=True)
    pairs: RankPairing = option(
        "model.traffic_pattern:RankPairing.parse",
        "first (rank 0 with every other rank), ring (each rank with the next), all, or pairs such as 0:1,2:3",
        default="ring", help="pairs of ranks to measure", metavar="PAIRS")
    #: None: none is measured.
    pattern: PatternChoice | None = option(
        "model.traffic_pattern:PatternChoice.parse",
        "pairs, incast, outcast or alltoall, each also with a number of ranks as in incast:8, or the path of a traffic "
        "matrix of kvbench",
        help="traffic pattern to measure, each flow alone and all together; without it, the suite pattern is not "
        "selected", metavar="PATTERN", empty=None)
    join_timeout: float = option(
        "session.parsers:parse_timeout", TIME_FORM, default="5min", help="how long to wait for all ranks to join",
        metavar="TIME")
    #: Seconds after which etcd ends the lease of a rank that it hears nothing from.
    lease: int = option(
        "session.parsers:parse_lease", "whole seconds from 2s to 1h, such as 30s or 5min", default="6s",
        help="how long etcd may hear nothing from a rank before the rank counts as lost, and the run ends. Use the "
        "same value on every rank, and more than 1.5 times the longest pause of a rank on a busy host. With a longer "
        "lease a killed rank is noticed later", metavar="TIME", printer=lambda value: f"{value}s")
    log_dir: str = option(
        "session.parsers:parse_store", "a directory, which is created if it does not exist",
        help="where each rank writes its verdict and its workers' logs, in a subdirectory for each rank",
        metavar="DIR", per_rank=True)
    op: tuple[str, ...] = option(
        "session.parsers:parse_ops", "WRITE, READ or both separated by a comma", default="WRITE,READ",
        help="operations to measure", metavar="OP[,OP]")
    memory: tuple[MemoryPair, ...] = option(
        "session.parsers:parse_memories", f"a list of {MEMORY_FORM}", default="DRAM:DRAM",
        help="memory types to measure; a storage backend uses the initiator's type, and its target is always a file",
        metavar="INITIATOR:TARGET[,…]")
    #: None: chosen by each link.
    devices: DevicePair | None = option(
        "model.memory:DevicePair.parse", "INITIATOR:TARGET as GPU numbers, or auto", default="auto",
        help="GPUs that VRAM is allocated on, numbered as CUDA numbers the GPUs visible to each worker; auto: the "
        "initiator's first GPU, and the target's first other GPU", metavar="INITIATOR:TARGET", empty=None)
    file_dir: str = option(
        "session.parsers:parse_directory", "an existing directory",
        help="directory for the temporary files of storage backends; without it, the system's temporary directory",
        metavar="DIR", per_rank=True)
    #: URL of the S3 server of the fixture ``nixl_s3``; ``embedded``; ``container[:IMAGE]``; empty: that of AWS's
    #: variables, or else an embedded one.
    s3: str = option(
        "session.parsers:parse_s3",
        "http://HOST[:PORT], https://HOST[:PORT], embedded, container, or container:IMAGE",
        help="S3 server of the fixture nixl_s3; without it, that of AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, or else "
        "an embedded one. embedded (a process) and container start moto, which ends with the run", metavar="URL",
        per_rank=True)
    blocks: tuple[int, ...] = option(
        "core.units:parse_blocks", BLOCKS_FORM, default="4KiB..64MiB", help="block sizes to measure", metavar="A..B",
        printer="core.units:format_blocks")
    batch: tuple[int, ...] = option(
        "session.parsers:parse_batch", "a positive integer, or a list of them", default="1",
        help="blocks (descriptors) in one transfer", metavar="N[,N]")
    depth: tuple[int, ...] = option(
        "session.parsers:parse_depth", "a positive integer, or a list of them", default="1",
        help="transfers in flight", metavar="N[,N]")
    #: Bytes of each buffer that the transfers of a bandwidth row walk; None: every transfer has the same bytes.
    footprint: int | None = option(
        "session.footprint:parse_footprint", "row, auto, or a size such as 1GiB", default="row",
        help="buffer that the transfers of a bandwidth row walk; row: every transfer has the same bytes, which stay "
        "in the processor's caches; auto: a size that does not fit into the last-level cache of this host",
        metavar="SIZE", empty=None, printer="core.units:format_size")
    notify: str = option(
        ("each", "last"), default="last", help="transfers of a bandwidth row that carry a notification: each, as "
        "inference engines and nixlbench do, or the last one of a window; rows with each have keys of their own",
        metavar="WHICH")
    pages: str = option(
        ("huge", "base"), default="huge", help="pages of the host memory of a bandwidth row: huge, if the kernel has "
        "them, or base, those of malloc and of nixlbench; rows with base have keys of their own", metavar="PAGES")
    kv_model: KvModel = option(
        "model.kv_cache:kv_model", KV_MODEL_FORM, default="generic",
        help="model whose KV cache is transferred; the sizes and counts of its blocks are computed",
        metavar="NAME|FILE")
    kv_tokens: int = option(
        "session.parsers:parse_kv_tokens", "a positive integer", default="1024",
        help="tokens of a request whose KV cache is transferred", metavar="N")
    #: Of the prefill side and the decode side.
    kv_tp: tuple[int, int] = option(
        "session.parsers:parse_kv_tp", "a positive integer, or PREFILL:DECODE", default="1",
        help="size of tensor parallelism, of both sides or of each; it splits the KV heads, but not MLA",
        metavar="N[:N]", printer="model.kv_cache:format_tp")
    kv_block_tokens: int = option(
        "session.parsers:parse_kv_block_tokens", "a positive integer", default="16",
        help="tokens in one block of a KV cache", metavar="N")
    #: Data type of the KV cache; None: the model's.
    kv_dtype: str | None = option(
        "session.parsers:parse_kv_dtype", "auto | bf16 | fp16 | fp32 | fp8 | int8", default="auto",
        help="data type of a KV cache; auto: that of the model", metavar="TYPE", empty=None)
    kv_requests: int = option(
        "session.parsers:parse_kv_requests", "a positive integer", default="1",
        help="requests for KV blocks in flight at the same time", metavar="N")
    #: Requests for KV blocks that start in each second; None: each starts when one is over.
    kv_rate: float | None = option(
        "session.parsers:parse_kv_rate", "auto, or a number of requests each second, such as 50/s", default="auto",
        help="rate at which requests for KV blocks start, whether or not earlier ones are over; their latency is "
        "counted from the intended start; auto: each starts when one is over", metavar="RATE", empty=None,
        printer=lambda value: f"{value:.9g}/s")
    iterations: int | None = option(
        "session.parsers:parse_iterations",
        "a positive integer, or auto (1000 up to 1 MiB; above, at least 10 and 160 MiB)", default="auto",
        help="least number of transfers to time for each row", metavar="N")
    warmup: int = option(
        "session.parsers:parse_warmup", "a non-negative integer", default="10",
        help="transfers before the clock starts; by default no more than move 160 MiB", metavar="N")
    duration: float = option(
        "session.parsers:parse_seconds", TIME_FORM, default="0.07s", help="least time to measure each row for",
        metavar="TIME")
    timeout: float = option(
        "session.parsers:parse_timeout", TIME_FORM, default="60s", help="time limit of each wait", metavar="TIME")
    start_timeout: float = option(
        "session.parsers:parse_timeout", TIME_FORM, default="3min",
        help="time limit for a worker to import NIXL and to create its agent", metavar="TIME")
    profile: str = option(
        "session.parsers:parse_profile", "the name of a profile that comes with the plugin, or a TOML file",
        default="loopback", help="what to expect of this kind of machine; without it, and if LIBFABRIC is the only "
        "backend, a profile that fits this host", metavar="NAME|FILE")
    nixlbench: str = option(
        "session.parsers:parse_program", "the path of a program",
        help="nixlbench program to run; its registration of ranks is checked too; without it, the one on PATH",
        metavar="PATH", per_rank=True)
    nixlbench_runtime: str = option(
        NIXLBENCH_RUNTIMES, default="auto", help="how the processes of nixlbench find each other; auto: ASIO on one "
        "host, where it starts without waiting; ETCD between hosts, where it needs no open port", metavar="RUNTIME")
    #: Each as ``--name=value``.
    nixlbench_args: tuple[str, ...] = option(
        "session.nixlbench_flags:parse_arguments",
        "flags of nixlbench as on its command line, such as '--mode=MG --num_initiator_dev=8 --num_target_dev=8'",
        help="further flags for nixlbench", metavar="'FLAGS'", empty=(), printer=_show_command, hidden=True)
    raw_tools_dir: str = option(
        "session.parsers:parse_raw_tools", f"an existing directory with one of {', '.join(RAW_TOOLS)}",
        help="directory of the raw tools that NIXL is compared with; without it, those on PATH", metavar="DIR",
        per_rank=True)
    level: str = option(
        "session.parsers:parse_level", "quick, standard or extended, or 1, 2 or 3 for the same",
        default=DEFAULT_LEVEL, help="how much to check: quick takes seconds; standard, the acceptance gate, takes a "
        "minute or two; extended adds longer checks", metavar="LEVEL")
    gate: bool = option(
        "session.parsers:parse_yes_no", "yes or no", default="no",
        help="fail on everything that is not proven to be good", switch=True)
    keep_going: bool = option(
        "session.parsers:parse_yes_no", "yes or no", default="no",
        help="continue after a failed infrastructure check that the profile requires", switch=True)
    image: str = option(
        "session.parsers:parse_validated_image", "REPOSITORY[:TAG][@DIGEST]",
        help="image that this run validates, as the label of its record", metavar="REF", environment=("NIXL_IMAGE",),
        hidden=True, per_rank=True)
    baseline: str = option(
        "session.parsers:parse_baseline", "an existing file or directory, or else an image of the store",
        help="recorded run to compare this one with, row by row: a record, the newest record of a directory, or the "
        "newest record of an image in --nixl-store. The first run makes a FILE.json that does not exist",
        metavar="IMAGE|FILE|DIR")
    compare_image: AlternateImage | None = option(
        "session.parsers:parse_compared_image",
        "an image and then the command that its workers are started with, such as 'IMAGE env UCX_TLS=tcp'",
        help="another image to compare this one with; both are measured now, in turn", metavar="'IMAGE COMMAND'",
        empty=None, printer=_show_command, hidden=True)
    #: Loss of bandwidth up to which a row counts as unchanged: 0.05 is 5 %.
    max_regression: float = option(
        "core.units:parse_share", "a percentage, such as 5%", default="5%",
        help="loss up to which a row counts as unchanged; a comparison is designed to find a loss of twice this size",
        metavar="SHARE", printer=lambda value: f"{100 * value:.6g}%")
    #: Least number of launches of each row; None: one, or as many as a comparison needs.
    min_launches: int | None = option(
        "session.parsers:parse_min_launches",
        f"an integer from 1 to {MOST_LAUNCHES}, or auto (1; {COMPARED_LAUNCHES} if runs are compared)",
        default="auto", help="least number of launches of each row", metavar="N")
    store: str = option(
        "session.parsers:parse_store", "a directory, which is created if it does not exist",
        help="where each run stores its record", metavar="DIR", per_rank=True)
    report: tuple[str, ...] = option(
        "session.parsers:parse_reports",
        f"paths whose directories are created if needed, ending with {', '.join(REPORT_ENDINGS)}",
        help="reports to write at the end: an HTML page, a CSV table, metrics for Prometheus, or the verdict "
        "for programs", metavar="FILE.html[,FILE]", empty=(), per_rank=True)
    agent: str = option(
        ENGINES, default="default", help="create agents as this inference engine does: it sets "
        "--nixl-progress-thread, --nixl-threads and --nixl-sync-mode, unless they are given", metavar="ENGINE")
    #: ``auto``, or one or both of ``off`` and ``on``. Rows are measured with each.
    progress_thread: tuple[str, ...] = option(
        "model.agent_options:parse_progress_thread", "auto, off, on, or off,on for both", default="auto",
        help="whether agents have a progress thread; auto: those of rows have none, those of the suites only if the "
        "backend needs it, and those of your own tests have one", metavar="WHEN")
    #: Worker threads of backends; None: none.
    threads: ThreadCounts | None = option(
        "model.agent_options:parse_threads",
        "an integer from 1 to 256, INITIATOR:TARGET where one of the two may be 0, or none", default="none",
        help="worker threads of an agent's UCX or LIBFABRIC (num_threads)", metavar="N[:N]", empty=None, printer=str)
    sync_mode: str = option(
        SYNC_MODES, default="auto", help="thread synchronization mode of agents; auto: NIXL's own choice, which is "
        "strict with a listener or an etcd, and else none", metavar="MODE")
    backend_params: tuple[BackendParameter, ...] = option(
        "session.parsers:parse_backend_params",
        "BACKEND:NAME=VALUE with UCX, LIBFABRIC, POSIX, OBJ or AZURE_BLOB, such as UCX:num_workers=4, or a "
        "list of them",
        help="parameters with which agents create their backends", metavar="BACKEND:NAME=VALUE[,…]", empty=(),
        hidden=True)
    # fmt: on
    #: The source of each field's value: ``option``, ``ini``, ``environment NAME`` or ``default``.
    sources: Mapping[str, str] = field(default_factory=dict)
    #: One sentence for every environment variable that is set and has no effect.
    ignored: tuple[str, ...] = ()

    @property
    def extended(self) -> bool:
        """Whether checks repeat what the level ``standard`` asks once: 200 agents."""
        return self.level == "extended"

    @property
    def agents(self) -> tuple[AgentOptions, ...]:
        """How agents are created; several if everything is done with each of them. The first is the default."""
        telemetry = engine_agent(self.agent, self.backend).telemetry
        return tuple(
            AgentOptions(PROGRESS_THREAD[thread], self.threads, self.sync_mode, self.backend_params, telemetry)
            for thread in self.progress_thread
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
        programs = {"nixlbench": os.path.abspath(self.nixlbench)} if self.nixlbench else {}
        if self.raw_tools_dir:
            paths = {name: os.path.abspath(os.path.join(self.raw_tools_dir, name)) for name in RAW_TOOLS}
            programs |= {name: path for name, path in paths.items() if os.access(path, os.X_OK)}
        return programs

    @property
    def compares(self) -> bool:
        """Whether this run is compared with another one."""
        return bool(self.baseline) or self.compare_image is not None

    @property
    def judged_by(self) -> str:
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


#: Every option, in the order of ``--help``.
OPTIONS = tuple(Option(field=each.name, **each.metadata) for each in fields(Settings) if each.metadata)
