# SPDX-License-Identifier: Apache-2.0
"""The table of options: flag, ini name, variables, accepted form."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_nixl.core import units
from pytest_nixl.core.redaction import redact
from pytest_nixl.etcd.endpoints import ENDPOINTS_FORM
from pytest_nixl.model.rank_pairs import PAIRING_FORM, RankPairing
from pytest_nixl.session import parsers


@dataclass(frozen=True)
class Option:
    """One setting: its flag, its ini name, the variables it falls back to, and how its text is read."""

    field: str
    parse: Callable[[str], Any]
    form: str
    default: str
    help: str
    metavar: str = "VALUE"
    environment: tuple[str, ...] = ()
    secret: bool = False
    switch: bool = False
    #: What a setting is that nobody gave and that has no default.
    empty: Any = ""

    @property
    def flag(self) -> str:
        return f"--nixl-{self.field.replace('_', '-')}"

    @property
    def ini(self) -> str:
        return f"nixl_{self.field}"

    @property
    def dest(self) -> str:
        return f"nixl_{self.field}"

    def show(self, value: Any) -> str:
        """Print a value as it would be typed; what may hold a secret is redacted."""
        if self.secret:
            return "***" if value else "none"
        if value is None:
            return self.default or "none"
        if self.field == "blocks":
            return units.format_blocks(value)
        if self.field == "max_regression":
            return f"{100 * value:.6g}%"
        if self.field == "against":
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
    Option("etcd", parsers.parse_etcd, ENDPOINTS_FORM, "", "an etcd that is there already", "URL[,URL]",
           ("NIXL_ETCD_ENDPOINTS", "ETCD_ENDPOINTS")),
    Option("etcd_server", parsers.one_of(*parsers.ETCD_SERVERS), " | ".join(parsers.ETCD_SERVERS), "auto", "which etcd "
           "to use; auto: external if one is given, a container if an engine answers and the image is there, else "
           "embedded", "KIND"),
    Option("etcd_image", parsers.parse_image, "REPOSITORY[:TAG]", parsers.DEFAULT_ETCD_IMAGE,
           "image for an etcd container", "REF"),
    Option("etcd_cacert", parsers.parse_file, "an existing PEM file", "", "CA certificate of the etcd", "FILE",
           ("ETCDCTL_CACERT",)),
    Option("etcd_cert", parsers.parse_file, "an existing PEM file", "", "client certificate for the etcd", "FILE",
           ("ETCDCTL_CERT",)),
    Option("etcd_key", parsers.parse_file, "an existing PEM file", "", "key of the client certificate", "FILE",
           ("ETCDCTL_KEY",)),
    Option("etcd_user", parsers.parse_user, "NAME:PASSWORD", "", "user and password for the etcd; better given by the "
           "environment", "NAME:PASSWORD", ("ETCDCTL_USER",), secret=True),
    Option("etcd_listen", parsers.parse_listen, parsers.LISTEN_FORM, "", "where rank 0 serves an etcd to the others, "
           "where there is none", "ADDR:PORT"),
    Option("ranks", parsers.parse_ranks, "a whole number above zero", "", "how many ranks start this same command; else "
           "what Slurm, MPI, torchrun or a LeaderWorkerSet says; 1: this one alone, whatever they say", "N",
           empty=None),
    Option("rank", parsers.parse_rank, "a whole number", "", "which of them this is, from 0; else what the launcher "
           "says, or their order", "R", empty=None),
    Option("group", parsers.parse_group, "letters, digits, . _ and -", "", "the name by which they meet; else the "
           "launcher's job, or default", "NAME"),
    Option("group_token", parsers.parse_token, "a text that is not empty", "", "what all of them know and nobody else; "
           "better given by the environment", "TOKEN", ("NIXL_GROUP_TOKEN",), secret=True),
    Option("pairs", RankPairing.parse, PAIRING_FORM, "ring", "the pairs of ranks that are measured", "PAIRS"),
    Option("join_timeout", parsers.parse_timeout, units.TIME_FORM, "5min", "deadline for all ranks to come", "TIME"),
    Option("logs", parsers.parse_store, "a directory, which is made where there is none", "", "where each rank leaves "
           "its verdict and its workers' logs, in a directory of its own", "DIR"),
    Option("op", parsers.parse_ops, "WRITE, READ or both separated by a comma", "WRITE,READ", "operations to measure",
           "OP[,OP]"),
    Option("memory", parsers.parse_memories, f"a list of {parsers.MEMORY_FORM}", "DRAM:DRAM", "memory types to measure; "
           "a storage backend takes the initiators' and has files as targets", "INITIATOR:TARGET[,…]"),
    Option("devices", parsers.DevicePair.parse, parsers.DEVICES_FORM, "auto", "the GPUs whose memory is VRAM, as CUDA "
           "counts those that each worker sees; auto: the initiator's first, and the target's first other one",
           "INITIATOR:TARGET", empty=None),
    Option("directory", parsers.parse_directory, "an existing directory", "", "where storage backends make their "
           "files, which leave nothing; empty: the system's for temporary files", "DIR"),
    Option("blocks", units.parse_blocks, units.BLOCKS_FORM, "4KiB..64MiB", "block sizes to measure", "A..B"),
    Option("batch", parsers.counts_up_to(parsers.MOST_BATCH), "a whole number above zero, or a list of them", "1",
           "blocks in one transfer", "N[,N]"),
    Option("depth", parsers.counts_up_to(parsers.MOST_DEPTH), "a whole number above zero, or a list of them", "1",
           "transfers in flight", "N[,N]"),
    Option("iterations", parsers.parse_iterations, "a whole number above zero, or auto (1000 up to 1 MiB, 100 above)",
           "auto", "transfers to time for each row, at least", "N"),
    Option("warmup", parsers.parse_warmup, "a whole number", "10", "transfers before the clock starts", "N"),
    Option("duration", parsers.parse_seconds, units.TIME_FORM, "0.1s", "time to measure each row for, at least", "TIME"),
    Option("timeout", parsers.parse_timeout, units.TIME_FORM, "60s", "deadline of each wait", "TIME"),
    Option("start_timeout", parsers.parse_timeout, units.TIME_FORM, "3min", "deadline for a worker to start: to import "
           "NIXL, and to make its agent", "TIME"),
    Option("profile", parsers.parse_profile, "the name of a profile that comes with the plugin, or a TOML file",
           "loopback", "what to expect of this kind of machine; where none is named and LIBFABRIC alone is asked for, "
           "one of what is here", "NAME|FILE"),
    Option("nixlbench", parsers.parse_program, "the path of a program", "", "the nixlbench that is run, and whose "
           "registration is checked, if not that on PATH", "PATH"),
    Option("nixlbench_runtime", parsers.one_of(*parsers.NIXLBENCH_RUNTIMES), " | ".join(parsers.NIXLBENCH_RUNTIMES),
           "auto", "how nixlbench's processes meet; auto: ASIO on one host, where it costs no waiting; ETCD between "
           "hosts, where no port has to be open", "RUNTIME"),
    Option("nixlbench_args", parsers.parse_nixlbench_arguments, parsers.NIXLBENCH_ARGUMENTS_FORM, "",
           "what nixlbench is told besides the rows", "'FLAGS'", empty=()),
    Option("raw_tools", parsers.parse_raw_tools, f"an existing directory with one of {', '.join(parsers.RAW_TOOLS)}", "",
           "where the raw tools are that NIXL is compared with, if not on PATH", "DIR"),
    Option("gate", parsers.parse_yes_no, "yes or no", "no", "fail on everything that is not proven to be good",
           switch=True),
    Option("keep_going", parsers.parse_yes_no, "yes or no", "no", "go on after a check of the infrastructure that the "
           "profile requires has failed", switch=True),
    Option("image", parsers.parse_validated_image, "REPOSITORY[:TAG][@DIGEST]", "",
           "what this run validates, for the records", "REF", ("NIXL_IMAGE",)),
    Option("baseline", parsers.parse_baseline, "an existing file or directory, or else an image of the store", "",
           "the run to judge this one by, row by row: a record, the newest one of a directory, or the newest one of "
           "an image in --nixl-store", "IMAGE|FILE|DIR"),
    Option("against", parsers.parse_against, "an image and then the command that its workers are started with, such as "
           "'IMAGE env UCX_TLS=tcp'", "", "another image to judge this one by, both measured now in turn",
           "'IMAGE COMMAND'", empty=None),
    Option("max_regression", parsers.parse_share, "a percentage, such as 5%", "5%", "loss up to which a row is "
           "unchanged; a loss twice as large is what a comparison promises to find", "SHARE"),
    Option("launches", parsers.parse_launches, f"a whole number from 1 to {parsers.MOST_LAUNCHES}, or auto (1; "
           f"{parsers.COMPARED_LAUNCHES} where a comparison is asked for)", "auto",
           "whole launches of each row, at least", "N"),
    Option("store", parsers.parse_store, "a directory, which is made where there is none", "",
           "where each run leaves its record", "DIR"),
    Option("report", parsers.parse_reports, f"paths in directories that exist, ending with "
           f"{', '.join(parsers.REPORT_ENDINGS)}", "", "what to write at the end: a page to read, a table, metrics for "
           "Prometheus", "FILE.html[,FILE]", empty=()),
)  # fmt: skip


#: The option whose value is a program's own flags.
TAKES_FLAGS = "--nixl-nixlbench-args"
#: One flag of that program as a word of pytest's command line: pytest's own options have neither ``=`` nor ``_`` here.
_FLAG_AS_VALUE = re.compile(r"--[a-z][a-z0-9]*(?:_[a-z0-9_]*(?:=.*)?|=.*)", re.DOTALL)


def join_flags(words: list[str]) -> None:
    """Make ``--nixl-nixlbench-args '--flag=1'`` one word, in place: argparse takes the second one for an option.

    :raises pytest.UsageError: where no value follows.
    """
    place = 0
    while place < len(words) and words[place] != "--":
        if words[place] == TAKES_FLAGS:
            value = words[place + 1] if place + 1 < len(words) else None
            # What begins with a dash and has a space is a value to argparse too.
            option = value is not None and value.startswith("-") and " " not in value
            if value is None or (option and not _FLAG_AS_VALUE.fullmatch(value)):
                raise pytest.UsageError(
                    f"{TAKES_FLAGS} is followed by {'nothing' if value is None else repr(value)}: expected flags of "
                    f"nixlbench, such as {TAKES_FLAGS}='--check_consistency=1'"
                )
            words[place : place + 2] = [f"{TAKES_FLAGS}={value}"]
        place += 1


def add_options(parser: pytest.Parser) -> None:
    """Declare every option and its ini value."""
    group = parser.getgroup("nixl", "NIXL validation")
    for item in OPTIONS:
        if item.switch:
            group.addoption(item.flag, dest=item.dest, action="store_const", const="yes", default=None, help=item.help)
        else:
            text = f"{item.help}; {item.form} (default: {item.default or 'none'})"
            shown = text.replace("%", "%%")  # argparse takes it for a format
            # The value of an option that takes flags looks like an option itself: see join_flags.
            more = {"nargs": "?"} if item.flag == TAKES_FLAGS else {}
            group.addoption(item.flag, dest=item.dest, metavar=item.metavar, default=None, help=shown, **more)
        parser.addini(item.ini, help=f"the same as {item.flag}", default=None)


def given_options(config: pytest.Config) -> dict[str, str]:
    """Return the options that were typed, by flag, as they may be shown: passwords are hidden."""
    typed = {item: text for item in OPTIONS if (text := config.getoption(item.dest, None)) is not None}
    hidden = ("etcd", "against", "image")
    return {item.flag: item.show(text) if item.secret or item.field in hidden else text for item, text in typed.items()}
