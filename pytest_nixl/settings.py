# SPDX-License-Identifier: Apache-2.0
"""Options, ini values and environment variables, read once into one frozen dataclass.

An option wins over an ini value, and that over the environment. Every bad value is a :class:`pytest.UsageError` of one
sentence that names the value, where it came from and the accepted form.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from pytest_nixl import units
from pytest_nixl.etcd.endpoints import ENDPOINTS_FORM, parse_endpoints, redact

MEMORIES = ("DRAM", "VRAM")
#: What the target may be: a storage backend writes to a file.
TARGETS = (*MEMORIES, "FILE")
MEMORY_FORM = "INITIATOR:TARGET with DRAM or VRAM, and FILE as the target of a storage backend"
OPS = ("WRITE", "READ")
ETCD_SERVERS = ("auto", "external", "container", "embedded")
DEFAULT_ETCD_IMAGE = "quay.io/coreos/etcd:v3.5.18"

#: More launches of a row than this decide nothing that these do not; a comparison starts with fewer.
MOST_LAUNCHES, COMPARED_LAUNCHES = 7, 5

REPORT_ENDINGS = (".html", ".csv", ".prom")

#: Set by launchers to the number of ranks that were asked for.
LAUNCHER_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")


@dataclass(frozen=True)
class MemoryPair:
    """The memory types of a link's two ends, ``DRAM`` or ``VRAM``; a storage backend's target is ``FILE``."""

    initiator: str
    target: str

    @classmethod
    def parse(cls, text: str) -> MemoryPair:
        """Read ``INITIATOR:TARGET``. :raises ValueError: where it is none."""
        initiator, _, target = text.strip().upper().partition(":")
        if initiator not in MEMORIES or target not in TARGETS:
            raise ValueError(f"{text.strip()!r} is no pair of memory types")
        return cls(initiator, target)

    def __str__(self) -> str:
        return f"{self.initiator}:{self.target}"


@dataclass(frozen=True)
class Against:
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
    op: tuple[str, ...]
    memory: tuple[MemoryPair, ...]
    directory: str
    blocks: tuple[int, ...]
    batch: tuple[int, ...]
    depth: tuple[int, ...]
    iterations: int | None
    warmup: int
    duration: float
    timeout: float
    profile: str
    #: Path of a nixlbench program; empty for the one on PATH, if there is one.
    nixlbench: str
    gate: bool
    image: str
    baseline: str
    against: Against | None
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
        return "--nixl-against" if self.against is not None else ""

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
            from pytest_nixl.facts.secrets import hide_command

            return hide_command(str(value)) if value else "none"
        if isinstance(value, tuple):
            return ",".join(str(part) for part in value) or "none"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float):
            return f"{f'{value:.9f}'.rstrip('0').rstrip('.')}s"
        return redact(str(value)) if value != "" else "none"


def parse_backends(text: str) -> tuple[str, ...]:
    """Read names of backends. :raises ValueError: where one is none that can be driven."""
    from pytest_nixl.backends import BACKENDS, UNSUPPORTED

    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name.upper() not in BACKENDS:
            why = UNSUPPORTED.get(name.upper())
            raise ValueError(f"{name!r} is no backend that this version can drive{(why and f': {why}') or ''}")
    return _unique(tuple(name.upper() for name in names))


def _ops(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name.upper() not in OPS:
            raise ValueError(f"{name!r} is no operation")
    return _unique(tuple(name.upper() for name in names))


def _memories(text: str) -> tuple[MemoryPair, ...]:
    return _unique(tuple(MemoryPair.parse(part) for part in text.split(",")))


def _target_memory(text: str) -> tuple[MemoryPair, ...]:
    """NIXL_TARGET_SEG_TYPE names the target's memory only; the initiator's is then DRAM."""
    return _memories(f"DRAM:{text}")


def _unique(values: tuple[Any, ...]) -> tuple[Any, ...]:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{value} is named twice")
    return values


def _counts(text: str) -> tuple[int, ...]:
    return _unique(tuple(_count(part) for part in text.split(",")))


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{text.strip()!r} is not a whole number above zero")
    return int(text)


def _iterations(text: str) -> int | None:
    return None if text == "auto" else _count(text)


def _warmup(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{text.strip()!r} is no whole number")
    return int(text)


def _seconds(text: str) -> float:
    return units.parse_time(text, default_unit="s")


def _timeout(text: str) -> float:
    seconds = _seconds(text)
    if seconds <= 0:
        raise ValueError(f"{text!r} is not above zero")
    return seconds


def _etcd(text: str) -> str:
    parse_endpoints(text)
    return text


def _user(text: str) -> str:
    name, _, password = text.partition(":")
    if not name or not password:
        raise ValueError("the name or the password is missing (what was given is not shown)")
    return text


def _program(text: str) -> str:
    if not os.path.isfile(text) or not os.access(text, os.X_OK):
        raise ValueError(f"{text!r} is no file that can be executed")
    return text


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is none of them")
        return text

    return parse


def _file(text: str) -> str:
    if not os.path.isfile(text):  # Path.is_file raises where a name is too long or a directory is closed to us
        raise ValueError(f"there is no file {text!r}")
    return text


def _directory(text: str) -> str:
    if not os.path.isdir(text):
        raise ValueError(f"there is no directory {text!r}")
    return text


def _image(text: str) -> str:
    if not text or text != text.strip() or any(c.isspace() for c in text):
        raise ValueError(f"{text!r} is no image reference")
    return text


def _validated_image(text: str) -> str:
    """What is validated goes into every record and report: a user or password before its registry does not."""
    return redact(_image(text))


def _profile(text: str) -> str:
    from pytest_nixl.gate.profiles import load_profile

    load_profile(text)
    return text


def _against(text: str) -> Against:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no command ({error})") from None
    if len(words) < 2:
        raise ValueError(f"{text!r} names no command after the image")
    return Against(_image(words[0]), tuple(words[1:]))


def parse_share(text: str) -> float:
    """Read a percentage: ``5%`` is 0.05. :raises ValueError: where it is none between 0 and 100."""
    number = text.strip().removesuffix("%").strip()
    if not text.strip().endswith("%") or not re.fullmatch(r"\d+(\.\d+)?", number):
        raise ValueError(f"{text!r} is no percentage")
    if not 0 < float(number) < 100:
        raise ValueError(f"{text!r} is not between 0 % and 100 %")
    return float(number) / 100


def _launches(text: str) -> int | None:
    if text == "auto":
        return None
    if _count(text) > MOST_LAUNCHES:
        raise ValueError(f"{text!r} is more than {MOST_LAUNCHES}")
    return int(text)


def _baseline(text: str) -> str:
    return text if os.path.exists(text) else _image(text)


def _store(text: str) -> str:
    if not text or (os.path.exists(text) and not os.path.isdir(text)):
        raise ValueError(f"{text!r} is no directory")
    return text


def parse_reports(text: str) -> tuple[str, ...]:
    """Read paths of reports, separated by commas. :raises ValueError: where an ending or a directory is none."""
    paths = _unique(tuple(part.strip() for part in text.split(",")))
    for path in paths:
        if os.path.splitext(path)[1] not in REPORT_ENDINGS:
            raise ValueError(f"{path!r} ends with none of {', '.join(REPORT_ENDINGS)}")
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise ValueError(f"there is no directory {os.path.dirname(path)!r}")
    return paths


def _yes_no(text: str) -> bool:
    if text.lower() not in ("yes", "no", "true", "false", "1", "0", ""):
        raise ValueError(f"{text!r} is neither yes nor no")
    return text.lower() in ("yes", "true", "1")


OPTIONS: tuple[Option, ...] = (
    Option("backend", parse_backends, "UCX, LIBFABRIC or POSIX (any case), or a list of them", "UCX",
           "NIXL backends to validate", "NAME[,NAME]", ("NIXL_BACKEND",)),
    Option("etcd", _etcd, ENDPOINTS_FORM, "", "an etcd that is there already", "URL[,URL]",
           ("NIXL_ETCD_ENDPOINTS", "ETCD_ENDPOINTS")),
    Option("etcd_server", _choice(*ETCD_SERVERS), " | ".join(ETCD_SERVERS), "auto",
           "which etcd to use; auto: external if one is given, a container if an engine answers and the image is "
           "there, else embedded", "KIND"),
    Option("etcd_image", _image, "REPOSITORY[:TAG]", DEFAULT_ETCD_IMAGE, "image for an etcd container", "REF"),
    Option("etcd_cacert", _file, "an existing PEM file", "", "CA certificate of the etcd", "FILE",
           ("ETCDCTL_CACERT",)),
    Option("etcd_cert", _file, "an existing PEM file", "", "client certificate for the etcd", "FILE",
           ("ETCDCTL_CERT",)),
    Option("etcd_key", _file, "an existing PEM file", "", "key of the client certificate", "FILE", ("ETCDCTL_KEY",)),
    Option("etcd_user", _user, "NAME:PASSWORD", "", "user and password for the etcd; better given by the environment",
           "NAME:PASSWORD", ("ETCDCTL_USER",), secret=True),
    Option("op", _ops, "WRITE, READ or both separated by a comma", "WRITE,READ", "operations to measure", "OP[,OP]"),
    Option("memory", _memories, f"a list of {MEMORY_FORM}", "DRAM:DRAM", "memory types to measure; a storage backend "
           "takes the initiators' and has files as targets", "INITIATOR:TARGET[,…]"),
    Option("directory", _directory, "an existing directory", "", "where storage backends make their files, which leave "
           "nothing; empty: the system's for temporary files", "DIR"),
    Option("blocks", units.parse_blocks, units.BLOCKS_FORM, "4KiB..64MiB", "block sizes to measure", "A..B"),
    Option("batch", _counts, "a whole number above zero, or a list of them", "1", "blocks in one transfer", "N[,N]"),
    Option("depth", _counts, "a whole number above zero, or a list of them", "1", "transfers in flight", "N[,N]"),
    Option("iterations", _iterations, "a whole number above zero, or auto (1000 up to 1 MiB, 100 above)", "auto",
           "transfers to time for each row, at least", "N"),
    Option("warmup", _warmup, "a whole number", "10", "transfers before the clock starts", "N"),
    Option("duration", _seconds, units.TIME_FORM, "0.1s", "time to measure each row for, at least", "TIME"),
    Option("timeout", _timeout, units.TIME_FORM, "60s", "deadline of each wait", "TIME"),
    Option("profile", _profile, "the name of a profile that comes with the plugin, or a TOML file", "loopback",
           "what to expect of this kind of machine", "NAME|FILE"),
    Option("nixlbench", _program, "the path of a program", "",
           "the nixlbench whose registration is checked, if not that on PATH", "PATH"),
    Option("gate", _yes_no, "yes or no", "no", "fail on everything that is not proven to be good", switch=True),
    Option("image", _validated_image, "REPOSITORY[:TAG][@DIGEST]", "", "what this run validates, for the records",
           "REF", ("NIXL_IMAGE",)),
    Option("baseline", _baseline, "an existing file or directory, or else an image of the store", "",
           "the run to judge this one by, row by row: a record, the newest one of a directory, or the newest one of an "
           "image in --nixl-store", "IMAGE|FILE|DIR"),
    Option("against", _against, "an image and then the command that its workers are started with, such as "
           "'IMAGE env UCX_TLS=tcp'", "", "another image to judge this one by, both measured now in turn",
           "'IMAGE COMMAND'", empty=None),
    Option("max_regression", parse_share, "a percentage, such as 5%", "5%",
           "loss up to which a row is unchanged; a loss twice as large is what a comparison promises to find", "SHARE"),
    Option("launches", _launches, f"a whole number from 1 to {MOST_LAUNCHES}, or auto (1; {COMPARED_LAUNCHES} where a "
           "comparison is asked for)", "auto", "whole launches of each row, at least", "N"),
    Option("store", _store, "a directory, which is made where there is none", "", "where each run leaves its record",
           "DIR"),
    Option("report", parse_reports, f"paths in directories that exist, ending with {', '.join(REPORT_ENDINGS)}", "",
           "what to write at the end: a page to read, a table, metrics for Prometheus", "FILE.html[,FILE]", empty=()),
)  # fmt: skip

#: How the text of a variable is read where that differs from the option's own.
_ENVIRONMENT_PARSERS: dict[str, Callable[[str], Any]] = {
    # What the deployment says is a suite's to judge, so it is taken as it is.
    "NIXL_ETCD_ENDPOINTS": str,
    "ETCD_ENDPOINTS": str,
}


def add_options(parser: pytest.Parser) -> None:
    """Declare every option and its ini value."""
    group = parser.getgroup("nixl", "NIXL validation")
    for item in OPTIONS:
        if item.switch:
            group.addoption(item.flag, dest=item.dest, action="store_const", const="yes", default=None, help=item.help)
        else:
            text = f"{item.help}; {item.form} (default: {item.default or 'none'})"
            shown = text.replace("%", "%%")  # argparse takes it for a format
            group.addoption(item.flag, dest=item.dest, metavar=item.metavar, default=None, help=shown)
        parser.addini(item.ini, help=f"the same as {item.flag}", default=None)


def given_options(config: pytest.Config) -> dict[str, str]:
    """Return the options that were typed, by flag, as they may be shown: passwords are hidden."""
    typed = {item: text for item in OPTIONS if (text := config.getoption(item.dest, None)) is not None}
    hidden = ("etcd", "against", "image")
    return {item.flag: item.show(text) if item.secret or item.field in hidden else text for item, text in typed.items()}


def read_settings(config: pytest.Config, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read every setting. :raises pytest.UsageError: at the first bad value."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for item in OPTIONS:
        values[item.field], sources[item.field] = _read(item, config, environ)
    ignored = [*_target_segment(values, sources, environ), *_ignored(sources, environ)]
    settings = Settings(**values, sources=sources, ignored=tuple(ignored))
    _check_together(settings)
    return settings


def _read(item: Option, config: pytest.Config, environ: Mapping[str, str]) -> tuple[Any, str]:
    option, ini = config.getoption(item.dest, None), config.getini(item.ini)
    if option is not None:
        return _parse(item, item.parse, option, item.flag), "option"
    if ini:
        return _parse(item, item.parse, str(ini), f"ini value {item.ini}"), "ini"
    for name in item.environment:
        if environ.get(name):
            parse = _ENVIRONMENT_PARSERS.get(name, item.parse)
            text = _with_password(environ) if name == "ETCDCTL_USER" else environ[name]
            return _parse(item, parse, text, f"environment variable {name}"), f"environment {name}"
    # Nothing is the default of some; whoever types nothing meant something.
    return item.parse(item.default) if item.default else item.empty, "default"


def _with_password(environ: Mapping[str, str]) -> str:
    """ETCDCTL_USER, with the password of ETCDCTL_PASSWORD where it has none, as etcdctl takes them."""
    user, password = environ["ETCDCTL_USER"], environ.get("ETCDCTL_PASSWORD")
    return f"{user}:{password}" if password and ":" not in user else user


def _parse(item: Option, parse: Callable[[str], Any], text: str, source: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        message = str(error)
        if ": expected " not in message:
            message = f"{message}: expected {item.form}"
        raise pytest.UsageError(f"{source}: {message}") from None


def _target_segment(values: dict[str, Any], sources: dict[str, str], environ: Mapping[str, str]) -> Iterator[str]:
    """The seeds' NIXL_TARGET_SEG_TYPE: the target's memory, where ``--nixl-memory`` says nothing."""
    name = "NIXL_TARGET_SEG_TYPE"
    text = environ.get(name)
    if not text:
        return
    if sources["memory"] != "default":
        yield f"{name}={text} is set and ignored: --nixl-memory is given ({sources['memory']})"
    elif text.upper() not in MEMORIES:
        yield f"{name}={text} is set and ignored: it is neither DRAM nor VRAM"
    else:
        values["memory"], sources["memory"] = _target_memory(text), f"environment {name}"


def _ignored(sources: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[str]:
    for item in OPTIONS:
        used = sources[item.field].removeprefix("environment ")
        for name in item.environment:
            if environ.get(name) and name != used:
                value = "***" if item.secret else redact(environ[name])
                why = f"{item.flag} comes from {sources[item.field]}"
                yield f"{name}={value} is set and ignored: {why}"
    namespace = environ.get("NIXL_ETCD_NAMESPACE")
    if namespace:
        yield f"NIXL_ETCD_NAMESPACE={namespace} is set and ignored: our keys are under a prefix of each test's own"
    worker = environ.get("NIXL_WORKER_TYPE")
    if worker and worker.lower() != "nixl":
        yield f"NIXL_WORKER_TYPE={worker} is set and ignored: transfers are always made by NIXL"


def _check_together(settings: Settings) -> None:
    if settings.etcd_server == "external" and not settings.etcd:
        raise pytest.UsageError(
            "--nixl-etcd-server=external needs an address: give --nixl-etcd URL or set NIXL_ETCD_ENDPOINTS"
        )
    if settings.etcd_server in ("container", "embedded") and settings.sources["etcd"] == "option":
        raise pytest.UsageError(
            f"--nixl-etcd names an etcd that is there already, and --nixl-etcd-server={settings.etcd_server} "
            "asks for one of our own: give one of the two"
        )
    from pytest_nixl.backends import BACKENDS

    for name in settings.backend:
        if not BACKENDS[name].STORAGE and all(pair.target == "FILE" for pair in settings.memory):
            raise pytest.UsageError(
                f"--nixl-backend={name} moves bytes from agent to agent, and --nixl-memory="
                f"{','.join(map(str, settings.memory))} names only files as targets: expected DRAM or VRAM, or POSIX"
            )
    _check_comparison(settings)
    if bool(settings.etcd_cert) != bool(settings.etcd_key):
        given, missing = ("cert", "key") if settings.etcd_cert else ("key", "cert")
        source = settings.sources[f"etcd_{given}"]
        raise pytest.UsageError(
            f"--nixl-etcd-{given}={getattr(settings, f'etcd_{given}')} ({source}) is of no use alone: "
            f"expected --nixl-etcd-{missing} FILE or ETCDCTL_{missing.upper()} beside it"
        )


def _check_comparison(settings: Settings) -> None:
    if settings.baseline and settings.against is not None:
        raise pytest.UsageError(
            "--nixl-baseline judges by a run of another time and --nixl-against by one made now: give one of the two"
        )
    if settings.baseline and not os.path.exists(settings.baseline) and not settings.store:
        raise pytest.UsageError(
            f"--nixl-baseline={settings.baseline} is no path, and an image is looked up in the store: "
            "expected --nixl-store DIR beside it, or the path of a record"
        )
    if settings.compares and importlib.util.find_spec("scipy") is None:
        flag = "--nixl-baseline" if settings.baseline else "--nixl-against"
        raise pytest.UsageError(f"{flag} needs SciPy, which is not installed: pip install 'pytest-nixl[compare]'")


def launcher_ranks(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return the variable by which a launcher asked for more than one rank, and how many; None where none did."""
    for name in LAUNCHER_SIZES:
        if environ.get(name, "").isdecimal() and int(environ[name]) > 1:
            return name, int(environ[name])
    return None


assert {item.field for item in OPTIONS} == {f.name for f in fields(Settings)} - {"sources", "ignored"}
