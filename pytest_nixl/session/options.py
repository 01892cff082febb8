# SPDX-License-Identifier: Apache-2.0
"""The table of all options: flag, ini name, environment variables and accepted form."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_nixl.core import units
from pytest_nixl.core.redaction import redact
from pytest_nixl.etcd.endpoints import ENDPOINTS_FORM, LISTEN_FORM
from pytest_nixl.model.memory import DEVICES_FORM, MEMORY_FORM, DevicePair
from pytest_nixl.model.rank_pairs import PAIRING_FORM, RankPairing
from pytest_nixl.model.settings import COMPARED_LAUNCHES, MOST_LAUNCHES, RAW_TOOLS
from pytest_nixl.session import parsers


@dataclass(frozen=True)
class Option:
    """One setting: its flag, its ini name, the environment variables it falls back to, and how its text is parsed.

    :param field: the name of the field of :class:`~pytest_nixl.model.settings.Settings`.
    :param parse: turns the text into the value; raises :class:`ValueError` for a bad text.
    :param form: the accepted form in words, for ``--help`` and for error messages.
    :param default: the default as text; empty: there is none.
    :param secret: whether the value is never shown.
    :param switch: whether the option takes no value on the command line.
    """

    field: str
    parse: Callable[[str], Any]
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
        if self.secret:
            return "***" if value else "none"
        if value is None:
            return self.default or "none"
        if self.field == "blocks":
            return units.format_blocks(value)
        if self.field == "max_regression":
            return f"{100 * value:.6g}%"
        if self.field == "compare_image":
            from pytest_nixl.core.redaction import hide_command

            return hide_command(str(value)) if value else "none"
        if self.field == "nixlbench_args" and not isinstance(value, str):
            return shlex.join(value) or "none"
        if isinstance(value, tuple):
            return ",".join(str(part) for part in value) or "none"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float):
            return f"{f'{value:.9f}'.rstrip('0').rstrip('.')}s"
        return redact(str(value)) if value != "" else "none"


OPTIONS: tuple[Option, ...] = (
    Option("backend", parsers.parse_backends, "UCX, LIBFABRIC or POSIX (any case), or a list of them", "UCX",
           "NIXL backends to validate", "NAME[,NAME]", ("NIXL_BACKEND",)),
    Option("etcd", parsers.parse_etcd, ENDPOINTS_FORM, "", "endpoints of an existing etcd", "URL[,URL]",
           ("NIXL_ETCD_ENDPOINTS", "ETCD_ENDPOINTS")),
    Option("etcd_server", parsers.one_of(*parsers.ETCD_SERVERS), " | ".join(parsers.ETCD_SERVERS), "auto", "which etcd "
           "to use; auto: external if an endpoint is given, container if an engine answers and has the image, else "
           "embedded", "KIND"),
    Option("etcd_image", parsers.parse_image, "REPOSITORY[:TAG]", parsers.DEFAULT_ETCD_IMAGE,
           "image of the etcd container", "REF"),
    Option("etcd_cacert", parsers.parse_file, "an existing PEM file", "", "CA certificate to verify etcd with",
           "FILE", ("ETCDCTL_CACERT",)),
    Option("etcd_cert", parsers.parse_file, "an existing PEM file", "", "client certificate for etcd", "FILE",
           ("ETCDCTL_CERT",)),
    Option("etcd_key", parsers.parse_file, "an existing PEM file", "", "private key of the client certificate", "FILE",
           ("ETCDCTL_KEY",)),
    Option("etcd_user", parsers.parse_user, "NAME:PASSWORD", "", "user and password for etcd; set ETCDCTL_USER "
           "instead, because other users can see a command line", "NAME:PASSWORD", ("ETCDCTL_USER",),
           secret=True),
    Option("etcd_listen", parsers.parse_listen, LISTEN_FORM, "", "address at which rank 0 serves an etcd to the "
           "other ranks, if there is no other etcd", "ADDR:PORT"),
    Option("ranks", parsers.parse_ranks, "a positive integer", "", "number of ranks that start this same command; "
           "without it, the number that Slurm, MPI, torchrun or a LeaderWorkerSet gives; 1: this process alone, "
           "whatever the launcher says", "N", empty=None),
    Option("rank", parsers.parse_rank, "a non-negative integer", "", "rank of this process, from 0; without it, the "
           "rank that the launcher gives, or the order in which the ranks join", "R", empty=None),
    Option("group", parsers.parse_group, "1 to 64 letters, digits, . _ or -", "", "name of the group that the ranks of "
           "this run join; without it, the launcher's job, or default", "NAME"),
    Option("group_token", parsers.parse_token, "a text that is not empty", "", "shared secret of all ranks; set "
           "NIXL_GROUP_TOKEN instead, because other users can see a command line", "TOKEN", ("NIXL_GROUP_TOKEN",),
           secret=True),
    Option("pairs", RankPairing.parse, PAIRING_FORM, "ring", "pairs of ranks to measure", "PAIRS"),
    Option("join_timeout", parsers.parse_timeout, units.TIME_FORM, "5min", "how long to wait for all ranks to join",
           "TIME"),
    Option("log_dir", parsers.parse_store, "a directory, which is created if it does not exist", "", "where each rank "
           "writes its verdict and its workers' logs, in a subdirectory for each rank", "DIR"),
    Option("op", parsers.parse_ops, "WRITE, READ or both separated by a comma", "WRITE,READ", "operations to measure",
           "OP[,OP]"),
    Option("memory", parsers.parse_memories, f"a list of {MEMORY_FORM}", "DRAM:DRAM", "memory types to measure; "
           "a storage backend uses the initiator's type, and its target is always a file", "INITIATOR:TARGET[,…]"),
    Option("devices", DevicePair.parse, DEVICES_FORM, "auto", "GPUs that VRAM is allocated on, numbered "
           "as CUDA numbers the GPUs visible to each worker; auto: the initiator's first GPU, and the target's first "
           "other GPU", "INITIATOR:TARGET", empty=None),
    Option("file_dir", parsers.parse_directory, "an existing directory", "", "directory for the temporary files of "
           "storage backends; without it, the system's temporary directory", "DIR"),
    Option("blocks", units.parse_blocks, units.BLOCKS_FORM, "4KiB..64MiB", "block sizes to measure", "A..B"),
    Option("batch", parsers.counts_up_to(parsers.MOST_BATCH), "a positive integer, or a list of them", "1",
           "blocks (descriptors) in one transfer", "N[,N]"),
    Option("depth", parsers.counts_up_to(parsers.MOST_DEPTH), "a positive integer, or a list of them", "1",
           "transfers in flight", "N[,N]"),
    Option("iterations", parsers.parse_iterations, "a positive integer, or auto (1000 up to 1 MiB, 100 above)",
           "auto", "least number of transfers to time for each row", "N"),
    Option("warmup", parsers.parse_warmup, "a non-negative integer", "10", "transfers before the clock starts", "N"),
    Option("duration", parsers.parse_seconds, units.TIME_FORM, "0.1s", "least time to measure each row for", "TIME"),
    Option("timeout", parsers.parse_timeout, units.TIME_FORM, "60s", "time limit of each wait", "TIME"),
    Option("start_timeout", parsers.parse_timeout, units.TIME_FORM, "3min", "time limit for a worker to import NIXL "
           "and to create its agent", "TIME"),
    Option("profile", parsers.parse_profile, "the name of a profile that comes with the plugin, or a TOML file",
           "loopback", "what to expect of this kind of machine; without it, and if LIBFABRIC is the only backend, a "
           "profile that fits this host", "NAME|FILE"),
    Option("nixlbench", parsers.parse_program, "the path of a program", "", "nixlbench program to run; its "
           "registration of ranks is checked too; without it, the one on PATH", "PATH"),
    Option("nixlbench_runtime", parsers.one_of(*parsers.NIXLBENCH_RUNTIMES), " | ".join(parsers.NIXLBENCH_RUNTIMES),
           "auto", "how the processes of nixlbench find each other; auto: ASIO on one host, where it starts without "
           "waiting; ETCD between hosts, where it needs no open port", "RUNTIME"),
    Option("nixlbench_args", parsers.parse_nixlbench_arguments, parsers.NIXLBENCH_ARGUMENTS_FORM, "",
           "further flags for nixlbench", "'FLAGS'", empty=()),
    Option("raw_tools_dir", parsers.parse_raw_tools, f"an existing directory with one of {', '.join(RAW_TOOLS)}", "",
           "directory of the raw tools that NIXL is compared with; without it, those on PATH", "DIR"),
    Option("gate", parsers.parse_yes_no, "yes or no", "no", "fail on everything that is not proven to be good",
           switch=True),
    Option("keep_going", parsers.parse_yes_no, "yes or no", "no", "continue after a failed infrastructure check that "
           "the profile requires", switch=True),
    Option("image", parsers.parse_validated_image, "REPOSITORY[:TAG][@DIGEST]", "",
           "image that this run validates, as the label of its record", "REF", ("NIXL_IMAGE",)),
    Option("baseline", parsers.parse_baseline, "an existing file or directory, or else an image of the store", "",
           "recorded run to compare this one with, row by row: a record, the newest record of a directory, or the "
           "newest record of an image in --nixl-store", "IMAGE|FILE|DIR"),
    Option("compare_image", parsers.parse_compared_image, "an image and then the command that its workers are started "
           "with, such as 'IMAGE env UCX_TLS=tcp'", "", "another image to compare this one with; both are "
           "measured now, in turn",
           "'IMAGE COMMAND'", empty=None),
    Option("max_regression", units.parse_share, "a percentage, such as 5%", "5%", "loss up to which a row counts as "
           "unchanged; a comparison is designed to find a loss of twice this size", "SHARE"),
    Option("min_launches", parsers.parse_min_launches, f"an integer from 1 to {MOST_LAUNCHES}, or auto (1; "
           f"{COMPARED_LAUNCHES} if runs are compared)", "auto",
           "least number of launches of each row", "N"),
    Option("store", parsers.parse_store, "a directory, which is created if it does not exist", "",
           "where each run stores its record", "DIR"),
    Option("report", parsers.parse_reports, f"paths in existing directories, ending with "
           f"{', '.join(parsers.REPORT_ENDINGS)}", "", "reports to write at the end: an HTML page, a CSV table, "
           "metrics for Prometheus", "FILE.html[,FILE]", empty=()),
)  # fmt: skip


#: The option whose value is a list of flags of another program.
TAKES_FLAGS = "--nixl-nixlbench-args"
#: Matches one flag of that program on pytest's command line. No option of pytest matches: it has neither ``_`` nor,
#: as a separate word, ``=``.
_FLAG_AS_VALUE = re.compile(r"--[a-z][a-z0-9]*(?:_[a-z0-9_]*(?:=.*)?|=.*)", re.DOTALL)


def join_flags(words: list[str]) -> None:
    """Join ``--nixl-nixlbench-args '--flag=1'`` into one word, in place, because argparse takes ``--flag=1`` for an
    option.

    :param words: the command line.
    :raises pytest.UsageError: if no value follows the option.
    """
    place = 0
    while place < len(words) and words[place] != "--":
        if words[place] == TAKES_FLAGS:
            value = words[place + 1] if place + 1 < len(words) else None
            # argparse takes a word with a space for a value, even if it begins with a dash.
            option = value is not None and value.startswith("-") and " " not in value
            if value is None or (option and not _FLAG_AS_VALUE.fullmatch(value)):
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


def given_options(config: pytest.Config) -> dict[str, str]:
    """Return the options that were given on the command line, by flag, with passwords hidden."""
    typed = {item: text for item in OPTIONS if (text := config.getoption(item.dest, None)) is not None}
    hidden = ("etcd", "compare_image", "image")
    return {item.flag: item.show(text) if item.secret or item.field in hidden else text for item, text in typed.items()}
