# SPDX-License-Identifier: Apache-2.0
"""The table of all options: flag, ini name, environment variables and accepted form.

pytest reads it in every project in which the plugin is installed, and ``pytest-nixl`` without pytest, so this module
imports little. The parsers of the values are in :mod:`~pytest_nixl.session.parsers`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_nixl.core.forms import (
    AGENTS_FORM,
    BACKEND_PARAMS_FORM,
    BLOCKS_FORM,
    DEVICES_FORM,
    ENDPOINTS_FORM,
    FOOTPRINT_FORM,
    KV_DTYPES_FORM,
    KV_MODEL_FORM,
    LEASE_FORM,
    LEVELS_FORM,
    LISTEN_FORM,
    MEMORY_FORM,
    NIXLBENCH_ARGUMENTS_FORM,
    NOTIFY_FORM,
    PAIRING_FORM,
    PATTERN_FORM,
    PROGRESS_THREAD_FORM,
    S3_FORM,
    SYNC_MODES_FORM,
    THREADS_FORM,
    TIME_FORM,
)

if TYPE_CHECKING:
    import pytest

ETCD_SERVERS = ("auto", "external", "container", "embedded")
DEFAULT_ETCD_IMAGE = "quay.io/coreos/etcd:v3.5.18"
NIXLBENCH_RUNTIMES = ("auto", "ETCD", "ASIO")
#: Each level makes the checks of those before it as well.
LEVELS = ("quick", "standard", "extended")
DEFAULT_LEVEL = "standard"
REPORT_ENDINGS = (".html", ".csv", ".prom", ".json", "ctrf.json", ".sarif")


@dataclass(frozen=True)
class Option:
    """One setting: its flag, its ini name, the environment variables it falls back to, and its accepted form.

    :param field: the name of the field of :class:`~pytest_nixl.model.settings.Settings`.
    :param form: the accepted form in words, for ``--help`` and for error messages.
    :param default: the default as text; empty: there is none.
    :param secret: whether the value is never shown.
    :param switch: whether the option takes no value on the command line.
    """

    field: str
    form: str
    default: str
    help: str
    metavar: str = "VALUE"
    environment: tuple[str, ...] = ()
    secret: bool = False
    switch: bool = False
    #: The value of a setting that was not given and has no default.
    empty: Any = ""

    @property
    def flag(self) -> str:
        """The option on the command line, such as ``--nixl-join-timeout``."""
        return f"--nixl-{self.field.replace('_', '-')}"

    @property
    def ini(self) -> str:
        """The name of its ini value."""
        return f"nixl_{self.field}"

    @property
    def dest(self) -> str:
        """Its name in pytest's configuration."""
        return f"nixl_{self.field}"

    def show(self, value: Any) -> str:
        """Return a value as it would be typed, with secrets redacted."""
        from pytest_nixl.core.redaction import hide_command, redact

        if self.secret:
            return "***" if value else "none"
        if value is None:
            return self.default or "none"
        if self.field == "blocks":
            from pytest_nixl.core.units import format_blocks

            return format_blocks(value)
        if self.field == "footprint":
            from pytest_nixl.core.units import format_size

            return format_size(value)
        if self.field == "kv_tp":
            from pytest_nixl.model.kv_plan import format_tp

            return format_tp(value)
        if self.field == "kv_rate":
            return f"{value:.9g}/s"
        if self.field == "lease":
            return f"{value}s"
        if self.field == "threads":
            return str(value)
        if self.field == "max_regression":
            return f"{100 * value:.6g}%"
        if self.field == "compare_image":
            return hide_command(str(value)) if value else "none"
        if self.field == "nixlbench_args":
            return hide_command(value if isinstance(value, str) else shlex.join(value)) or "none"
        if isinstance(value, tuple):
            return redact(",".join(str(part) for part in value)) or "none"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float):
            return f"{f'{value:.9f}'.rstrip('0').rstrip('.')}s"
        return redact(str(value)) if value != "" else "none"


OPTIONS: tuple[Option, ...] = (
    Option("backend", "UCX, LIBFABRIC, POSIX, OBJ or AZURE_BLOB (any case), or a list of them", "UCX",
           "NIXL backends to validate", "NAME[,NAME]", ("NIXL_BACKEND",)),
    Option("etcd", ENDPOINTS_FORM, "", "endpoints of an existing etcd", "URL[,URL]",
           ("NIXL_ETCD_ENDPOINTS", "ETCD_ENDPOINTS")),
    Option("etcd_server", " | ".join(ETCD_SERVERS), "auto", "which etcd "
           "to use; auto: external if an endpoint is given, container if an engine answers and has the image, else "
           "embedded", "KIND"),
    Option("etcd_image", "REPOSITORY[:TAG]", DEFAULT_ETCD_IMAGE,
           "image of the etcd container", "REF"),
    Option("etcd_cacert", "an existing PEM file", "", "CA certificate to verify etcd with",
           "FILE", ("ETCDCTL_CACERT",)),
    Option("etcd_cert", "an existing PEM file", "", "client certificate for etcd", "FILE",
           ("ETCDCTL_CERT",)),
    Option("etcd_key", "an existing PEM file", "", "private key of the client certificate", "FILE",
           ("ETCDCTL_KEY",)),
    Option("etcd_user", "NAME:PASSWORD", "", "user and password for etcd; set ETCDCTL_USER "
           "instead, because other users can see a command line", "NAME:PASSWORD", ("ETCDCTL_USER",),
           secret=True),
    Option("etcd_listen", LISTEN_FORM, "", "address at which rank 0 serves an etcd to the "
           "other ranks, if there is no other etcd", "ADDR:PORT"),
    Option("ranks", "a positive integer", "", "number of ranks that start this same command; "
           "without it, the number that Slurm, MPI, torchrun or a LeaderWorkerSet gives; 1: this process alone, "
           "whatever the launcher says", "N", empty=None),
    Option("rank", "a non-negative integer", "", "rank of this process, from 0; without it, the "
           "rank that the launcher gives, or the order in which the ranks join", "R", empty=None),
    Option("group", "1 to 64 letters, digits, . _ or -", "", "name of the group that the ranks of "
           "this run join; without it, the launcher's job, or default", "NAME"),
    Option("group_token", "a text that is not empty", "", "shared secret of all ranks; set "
           "NIXL_GROUP_TOKEN instead, because other users can see a command line", "TOKEN", ("NIXL_GROUP_TOKEN",),
           secret=True),
    Option("pairs", PAIRING_FORM, "ring", "pairs of ranks to measure", "PAIRS"),
    Option("pattern", PATTERN_FORM, "", "traffic pattern to measure, each flow alone and all together; without it, the "
           "suite pattern is not selected", "PATTERN", empty=None),
    Option("join_timeout", TIME_FORM, "5min", "how long to wait for all ranks to join",
           "TIME"),
    Option("lease", LEASE_FORM, "6s", "how long etcd may hear nothing from a rank before the rank counts as lost, and "
           "the run ends. Use the same value on every rank, and more than 1.5 times the longest pause of a rank on a "
           "busy host. With a longer lease a killed rank is noticed later", "TIME"),
    Option("log_dir", "a directory, which is created if it does not exist", "", "where each rank "
           "writes its verdict and its workers' logs, in a subdirectory for each rank", "DIR"),
    Option("op", "WRITE, READ or both separated by a comma", "WRITE,READ", "operations to measure",
           "OP[,OP]"),
    Option("memory", f"a list of {MEMORY_FORM}", "DRAM:DRAM", "memory types to measure; "
           "a storage backend uses the initiator's type, and its target is always a file", "INITIATOR:TARGET[,…]"),
    Option("devices", DEVICES_FORM, "auto", "GPUs that VRAM is allocated on, numbered "
           "as CUDA numbers the GPUs visible to each worker; auto: the initiator's first GPU, and the target's first "
           "other GPU", "INITIATOR:TARGET", empty=None),
    Option("file_dir", "an existing directory", "", "directory for the temporary files of "
           "storage backends; without it, the system's temporary directory", "DIR"),
    Option("s3", S3_FORM, "", "S3 server of the fixture nixl_s3; without it, that of AWS_ENDPOINT_URL_S3 or "
           "AWS_ENDPOINT_URL, or else an embedded one. embedded (a process) and container start moto, which ends "
           "with the run", "URL"),
    Option("blocks", BLOCKS_FORM, "4KiB..64MiB", "block sizes to measure", "A..B"),
    Option("batch", "a positive integer, or a list of them", "1",
           "blocks (descriptors) in one transfer", "N[,N]"),
    Option("depth", "a positive integer, or a list of them", "1",
           "transfers in flight", "N[,N]"),
    Option("footprint", FOOTPRINT_FORM, "row", "buffer that the transfers of a bandwidth row walk; row: every transfer "
           "has the same bytes, which stay in the processor's caches; auto: a size that does not fit into the "
           "last-level cache of this host", "SIZE", empty=None),
    Option("notify", NOTIFY_FORM, "last", "transfers of a bandwidth row that carry a notification: each, as inference "
           "engines and nixlbench do, or the last one of a window; rows with each have keys of their own", "WHICH"),
    Option("kv_model", KV_MODEL_FORM, "generic", "model whose KV cache is transferred; the sizes and "
           "counts of its blocks are computed", "NAME|FILE"),
    Option("kv_tokens", "a positive integer", "1024",
           "tokens of a request whose KV cache is transferred", "N"),
    Option("kv_tp", "a positive integer, or PREFILL:DECODE", "1", "size of tensor parallelism, "
           "of both sides or of each; it splits the KV heads, but not MLA",
           "N[:N]"),
    Option("kv_block_tokens", "a positive integer", "16",
           "tokens in one block of a KV cache", "N"),
    Option("kv_dtype", KV_DTYPES_FORM, "auto", "data type of a KV cache; "
           "auto: that of the model", "TYPE", empty=None),
    Option("kv_requests", "a positive integer", "1",
           "requests for KV blocks in flight at the same time", "N"),
    Option("kv_rate", "auto, or a number of requests each second, such as 50/s", "auto", "rate at which requests for "
           "KV blocks start, whether or not earlier ones are over; their latency is counted from the intended start; "
           "auto: each starts when one is over", "RATE", empty=None),
    Option("iterations", "a positive integer, or auto (1000 up to 1 MiB; above, at least 10 and 160 MiB)",
           "auto", "least number of transfers to time for each row", "N"),
    Option("warmup", "a non-negative integer", "10", "transfers before the clock starts", "N"),
    Option("duration", TIME_FORM, "0.07s", "least time to measure each row for", "TIME"),
    Option("timeout", TIME_FORM, "60s", "time limit of each wait", "TIME"),
    Option("start_timeout", TIME_FORM, "3min", "time limit for a worker to import NIXL "
           "and to create its agent", "TIME"),
    Option("profile", "the name of a profile that comes with the plugin, or a TOML file",
           "loopback", "what to expect of this kind of machine; without it, and if LIBFABRIC is the only backend, a "
           "profile that fits this host", "NAME|FILE"),
    Option("nixlbench", "the path of a program", "", "nixlbench program to run; its "
           "registration of ranks is checked too; without it, the one on PATH", "PATH"),
    Option("nixlbench_runtime", " | ".join(NIXLBENCH_RUNTIMES),
           "auto", "how the processes of nixlbench find each other; auto: ASIO on one host, where it starts without "
           "waiting; ETCD between hosts, where it needs no open port", "RUNTIME"),
    Option("nixlbench_args", NIXLBENCH_ARGUMENTS_FORM, "",
           "further flags for nixlbench", "'FLAGS'", empty=()),
    Option("raw_tools_dir", "an existing directory with one of ucx_perftest, fi_rma_bw", "",
           "directory of the raw tools that NIXL is compared with; without it, those on PATH", "DIR"),
    Option("level", LEVELS_FORM, DEFAULT_LEVEL, "how much to check: quick takes seconds; standard, the acceptance "
           "gate, takes a minute or two; extended adds longer checks", "LEVEL"),
    Option("gate", "yes or no", "no", "fail on everything that is not proven to be good",
           switch=True),
    Option("keep_going", "yes or no", "no", "continue after a failed infrastructure check that "
           "the profile requires", switch=True),
    Option("image", "REPOSITORY[:TAG][@DIGEST]", "",
           "image that this run validates, as the label of its record", "REF", ("NIXL_IMAGE",)),
    Option("baseline", "an existing file or directory, or else an image of the store", "",
           "recorded run to compare this one with, row by row: a record, the newest record of a directory, or the "
           "newest record of an image in --nixl-store. The first run makes a FILE.json that does not exist",
           "IMAGE|FILE|DIR"),
    Option("compare_image", "an image and then the command that its workers are started "
           "with, such as 'IMAGE env UCX_TLS=tcp'", "", "another image to compare this one with; both are "
           "measured now, in turn",
           "'IMAGE COMMAND'", empty=None),
    Option("max_regression", "a percentage, such as 5%", "5%", "loss up to which a row counts as "
           "unchanged; a comparison is designed to find a loss of twice this size", "SHARE"),
    Option("min_launches", "an integer from 1 to 7, or auto (1; 5 if runs are compared)", "auto",
           "least number of launches of each row", "N"),
    Option("store", "a directory, which is created if it does not exist", "",
           "where each run stores its record", "DIR"),
    Option("report", f"paths whose directories are created if needed, ending with {', '.join(REPORT_ENDINGS)}", "",
           "reports to write at the end: an HTML page, a CSV table, metrics for "
           "Prometheus, the verdict for programs, CTRF, or SARIF", "FILE.html[,FILE]", empty=()),
    Option("agent", AGENTS_FORM, "default", "create agents as this inference engine does: it sets "
           "--nixl-progress-thread, --nixl-threads and --nixl-sync-mode, unless they are given", "ENGINE"),
    Option("progress_thread", PROGRESS_THREAD_FORM, "auto", "whether agents have a progress thread; auto: those of "
           "rows have none, those of the suites only if the backend needs it, and those of your own tests have one",
           "WHEN"),
    Option("threads", THREADS_FORM, "none", "worker threads of an agent's UCX or LIBFABRIC (num_threads)",
           "N[:N]", empty=None),
    Option("sync_mode", SYNC_MODES_FORM, "auto", "thread synchronization mode of agents; auto: NIXL's own choice, "
           "which is strict with a listener or an etcd, and else none", "MODE"),
    Option("backend_params", BACKEND_PARAMS_FORM, "", "parameters with which agents create their backends",
           "BACKEND:NAME=VALUE[,…]", empty=()),
)  # fmt: skip


#: The option whose value is a list of flags of another program.
TAKES_FLAGS = "--nixl-nixlbench-args"
#: Matches one flag of that program on pytest's command line. No option of pytest matches: it has neither ``_`` nor,
#: as a separate word, ``=``.
_FLAG_AS_VALUE = r"--[a-z][a-z0-9]*(?:_[a-z0-9_]*(?:=.*)?|=.*)"


def report_ending(name: str, endings: Iterable[str]) -> str:
    """Return the longest of these endings that the name of a file has; empty: it has none of them.

    :param name: such as ``ctrf.json``, which is another format than ``verdict.json``.
    """
    found = [ending for ending in endings if name.endswith(ending) and (name != ending or not ending.startswith("."))]
    return max(found, key=len, default="")


def join_flags(words: list[str]) -> None:
    """Join ``--nixl-nixlbench-args '--flag=1'`` into one word, in place, because argparse takes ``--flag=1`` for an
    option.

    :param words: the command line.
    :raises pytest.UsageError: if no value follows the option.
    """
    import pytest

    place = 0
    while place < len(words) and words[place] != "--":
        if words[place] == TAKES_FLAGS:
            value = words[place + 1] if place + 1 < len(words) else None
            # argparse takes a word with a space for a value, even if it begins with a dash.
            option = value is not None and value.startswith("-") and " " not in value
            if value is None or (option and not re.fullmatch(_FLAG_AS_VALUE, value, re.DOTALL)):
                raise pytest.UsageError(
                    f"{TAKES_FLAGS} is followed by {'nothing' if value is None else repr(value)}: expected flags of "
                    f"nixlbench, such as {TAKES_FLAGS}='--check_consistency=1'"
                )
            words[place : place + 2] = [f"{TAKES_FLAGS}={value}"]
        place += 1


def add_options(parser: pytest.Parser) -> None:
    """Declare every option and its ini value to pytest."""
    group = parser.getgroup("nixl", "NIXL validation")
    for item in OPTIONS:
        if item.switch:
            group.addoption(item.flag, dest=item.dest, action="store_const", const="yes", default=None, help=item.help)
        else:
            text = f"{item.help}; {item.form} (default: {item.default or 'none'})"
            shown = text.replace("%", "%%")  # argparse formats help texts with %
            # The value of this option looks like an option itself: see join_flags.
            more = {"nargs": "?"} if item.flag == TAKES_FLAGS else {}
            group.addoption(item.flag, dest=item.dest, metavar=item.metavar, default=None, help=shown, **more)
        parser.addini(item.ini, help=f"the same as {item.flag}", default=None)


def hider_of(config: pytest.Config) -> Callable[[str], str]:
    """Return a function that hides the secrets of the options and of the environment variables in any text."""
    from pytest_nixl.core.redaction import hider

    values = {item: config.getoption(item.dest, None) or config.getini(item.ini) for item in OPTIONS}
    typed = {item: str(text) for item, text in values.items() if text}
    # An option may differ from its variable: hide both.
    secret = {f"{item.environment[0]}_OPTION": text for item, text in typed.items() if item.secret}
    return hider({**os.environ, **secret}, *typed.values())


def given_options(config: pytest.Config) -> dict[str, str]:
    """Return the options that were given on the command line, by flag, with passwords hidden."""
    typed = {item: text for item in OPTIONS if (text := config.getoption(item.dest, None)) is not None}
    hidden = ("etcd", "compare_image", "image", "nixlbench_args", "backend_params")
    return {item.flag: item.show(text) if item.secret or item.field in hidden else text for item, text in typed.items()}
