# SPDX-License-Identifier: Apache-2.0
"""Profiles: what to expect of a kind of machine, read from TOML files. An unclear file is refused."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_nixl.core import extensions, units
from pytest_nixl.core.forms import MEMORY_FORM, RATE_FORM, TIME_FORM
from pytest_nixl.core.units import parse_share
from pytest_nixl.core.untrusted_file import read_regular
from pytest_nixl.judge.figure_bounds import read_bounds
from pytest_nixl.judge.profile_table import (
    SOURCE_FORM,
    ProfileTable,
    backend_name,
    check_name,
    filled,
    one_line,
    one_of,
    operation,
    positive,
    share,
    size_range,
    transport_name,
)
from pytest_nixl.model.expectation import (
    NO_IMAGE_REQUIREMENTS,
    SOFTWARE,
    VERSION_FORM,
    Expectation,
    ImageRequirements,
    Machine,
    ReferenceRun,
    VersionRange,
)
from pytest_nixl.model.figure import Bound
from pytest_nixl.model.findings import Acceptance, known_finding
from pytest_nixl.model.memory import OPS, MemoryPair
from pytest_nixl.model.row_key import BASE, EACH, HUGE, LAST
from pytest_nixl.model.transports import is_network


def read_image(document: ProfileTable) -> ImageRequirements:
    """Read the two tables of a profile's file.

    :raises ValueError: if one is not valid: one sentence.
    """
    image = document.table("image")
    image.allow("plugins", "etcd_uri_patch")
    versions = document.table("versions")
    versions.allow(*SOFTWARE)
    ranges = {key: versions.text(key, VERSION_FORM, VersionRange.parse) for key in versions.data}
    return ImageRequirements(
        plugins=image.texts("plugins", 'names of NIXL plugins such as "UCX"', backend_name) or (),
        etcd_uri_patch=image.flag("etcd_uri_patch", default=True) if "etcd_uri_patch" in image.data else None,
        versions={key: version_range for key, version_range in ranges.items() if version_range is not None},
    )


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from importlib.abc import Traversable

    from pytest_nixl.core.extensions import Extension
    from pytest_nixl.model.row_key import RowKey
    from pytest_nixl.model.settings import Settings

_log = logging.getLogger(__name__)

#: The most bytes of a profile. 1,000 tables have a quarter of it.
_LARGEST = 1 << 20
PROFILE_FORM = (
    "a [profile] table with a name, a [required] table with checks, [[expect]], [[bound]] and [[accept]] tables"
)
RAW_FORM = 'a share of the bandwidth of a raw tool, above 0 and at most 1, as text: "0.5"'
RANGE_FORM = 'one size ("4KiB") or an inclusive range A..B ("4KiB..512KiB")'
TRANSPORTS_FORM = 'names of transports without the "/DEVICE" that the backend reports, such as "cma"'


@dataclass(frozen=True)
class Profile:
    """What to expect of a kind of machine.

    :param path_or_origin: the path as it was given, or ``NAME.toml of pytest-nixl``.
    :param required: the checks that a gated run must include and that must not be NOT-APPLICABLE.
    :param expectations: what is expected of rows; at most one of them applies to a row.
    :param machine: the hardware, from which ceilings follow; None: not given.
    :param references: published figures, never used as a floor.
    :param accepted: the findings that only warn, each until a day.
    :param bounds: the bounds of figures; at most one of them applies to a figure.
    :param image: what is expected of the installed software.
    """

    name: str
    summary: str
    path_or_origin: str
    required: tuple[str, ...]
    expectations: tuple[Expectation, ...]
    machine: Machine | None = None
    references: tuple[ReferenceRun, ...] = ()
    accepted: tuple[Acceptance, ...] = ()
    bounds: tuple[Bound, ...] = ()
    image: ImageRequirements = NO_IMAGE_REQUIREMENTS

    def acceptance(self, finding: str) -> Acceptance | None:
        """Return the acceptance of the finding with this id; None: the profile does not accept it."""
        return next((item for item in self.accepted if item.id == finding), None)

    def transports(self, backend: str) -> tuple[tuple[str, ...], ...]:
        """Return the different lists of transports that the expectations of a backend accept."""
        matches = (
            expectation.transports
            for expectation in self.expectations
            if expectation.backend is None or backend in expectation.backend
        )
        return tuple(dict.fromkeys(names for names in matches if names is not None))

    def expectation(self, key: RowKey) -> Expectation | None:
        """Return the expectation that applies to the row ``key``; None: there is none.

        The floors, ceilings and latency bounds of a profile are for rows of whole blocks. A row of requests for KV
        blocks gets only the accepted transports of the rows of one such block, and so does a row of a traffic pattern.
        """
        if not key.kv and not key.pattern:
            return next((item for item in self.expectations if item.applies(key)), None)
        block = replace(key, batch=1, variant=())
        match = next((item for item in self.expectations if item.applies(block)), None)
        return match and replace(match, floor=None, ceiling=None, p50=None, p99=None, raw=None)

    def expectation_in(self, settings: Settings, key: RowKey) -> Expectation | None:
        """Return the expectation that applies to a row in a run with these settings; None: there is none.

        Floors and latency bounds are those of rows in place. They are not for the rows of the check ``bandwidth-cold``,
        whose transfers walk a buffer. They are for the rows of a run with ``--nixl-footprint``, because whoever gives
        that option chooses the profile as well.
        """
        expectation = self.expectation(key)
        if expectation is None or not key.walks or settings.footprint is not None:
            return expectation
        return replace(expectation, floor=None, p50=None, p99=None, raw=None)


def bundled_profiles() -> tuple[str, ...]:
    """Return the names of the profiles that come with the plugin."""
    folder = resources.files("pytest_nixl").joinpath("profiles")
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def added_profiles() -> dict[str, tuple[Extension, Traversable]]:
    """Return the profiles of other distributions: by name, who adds it and its file.

    An entry point of the group ``pytest_nixl.profiles`` names a package that has them beside its ``__init__.py``.

    :raises ExtensionError: if one cannot be loaded, or has a name that is taken.
    """
    profiles: dict[str, tuple[Extension, Traversable]] = {}
    for extension in extensions.PROFILES.extensions(()).values():
        files = extension.call(partial(_files, extension.load()), "names no package")
        if not files:
            raise extension.fault("has no .toml file")
        for file in files:
            name = file.name.removesuffix(".toml")
            if name in profiles or name in bundled_profiles():
                other = profiles[name][0].owner if name in profiles else "pytest-nixl"
                raise extension.fault(f"has a profile {name!r}, and so has {other}")
            profiles[name] = extension, file
    return profiles


def _files(package: Any) -> list[Traversable]:
    files = [item for item in resources.files(package).iterdir() if item.name.endswith(".toml")]
    return sorted(files, key=lambda item: item.name)


def load_profile(name_or_path: str) -> Profile:
    """Read a profile, installed or of the user. It is cached until its file changes.

    :param name_or_path: the name of a profile that comes with the plugin, or the path of a TOML file; a name wins.
    :raises ValueError: if there is no such profile, or if it is not valid: one sentence with the file, the table, the
        key, the fault and the accepted form.
    """
    added = added_profiles()
    if name_or_path in bundled_profiles():
        content = resources.files("pytest_nixl").joinpath("profiles").joinpath(f"{name_or_path}.toml").read_bytes()
        return _parsed(content, f"{name_or_path}.toml of pytest-nixl")
    if name_or_path in added:
        extension, file = added[name_or_path]
        return _parsed(file.read_bytes(), f"{name_or_path}.toml of {extension.owner}")
    form = f"expected {', '.join((*bundled_profiles(), *added))}, or the path of a TOML file"
    try:
        path = Path(name_or_path)
        path.stat()
        if not path.is_file():
            raise ValueError(f"profile {name_or_path!r} is not a file: {form}")
        return _parsed(read_regular(path, _LARGEST, PROFILE_FORM), name_or_path)
    except FileNotFoundError:
        raise ValueError(f"there is no profile {name_or_path!r}: {form}") from None
    except OSError as error:
        raise ValueError(f"profile {name_or_path!r} cannot be read ({error.strerror}): {form}") from None


def bundled_text(name: str) -> str:
    """Return the text of a profile that comes with the plugin."""
    return resources.files("pytest_nixl").joinpath("profiles").joinpath(f"{name}.toml").read_text(encoding="utf-8")


@lru_cache(maxsize=32)
def _parsed(content: bytes, origin: str) -> Profile:
    return parse_profile(content, origin)


def parse_profile(content: bytes, origin: str) -> Profile:
    """Read a profile from the bytes of a TOML file.

    :param origin: the name of the file in error messages.
    :raises ValueError: as :func:`load_profile`.
    """
    where = f"profile {origin}"
    try:
        data = tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not UTF-8 text: expected {PROFILE_FORM}") from None
    except (ValueError, RecursionError) as error:
        fault = str(error).rstrip(".") or "nested too deeply"
        raise ValueError(f"{where} is not TOML ({fault}): expected {PROFILE_FORM}") from None
    document = ProfileTable(where, data, PROFILE_FORM)
    document.allow("profile", "required", "machine", "expect", "reference", "accept", "bound", "image", "versions")
    head = document.table("profile", mandatory=True)
    head.allow("name", "summary")
    required = document.table("required")
    required.allow("checks")
    machine = _machine(document.table("machine")) if "machine" in data else None
    expectations = tuple(_expectation(table, machine) for table in document.tables("expect"))
    for (first, earlier), (second, other) in combinations(enumerate(expectations, 1), 2):
        row = _shared_row(earlier, other)
        if row is not None:
            raise ValueError(
                f"{where}, expect #{second}: applies to {row}, as expect #{first} does: "
                "expected at most one [[expect]] for each row"
            )
    profile = Profile(
        name=head.text("name", 'a name such as "loopback"', one_line, mandatory=True) or "",
        summary=head.text("summary", "one line of text", one_line) or "",
        path_or_origin=origin,
        required=required.texts("checks", 'names of checks such as "nixl-loads"', check_name) or (),
        expectations=expectations,
        machine=machine,
        references=tuple(_reference(table, machine) for table in document.tables("reference")),
        accepted=_accepted(document.tables("accept")),
        bounds=read_bounds(document.tables("bound")),
        image=read_image(document),
    )
    _log.debug("read profile %s", origin)
    return profile


def _accepted(tables: Sequence[ProfileTable]) -> tuple[Acceptance, ...]:
    accepted: dict[str, Acceptance] = {}
    for table in tables:
        table.allow("id", "reason", "expires")
        id = table.text("id", "the id of a finding", known_finding, mandatory=True) or ""
        if id in accepted:
            raise table.fault("id", f"{id} is accepted twice", "one [[accept]] for each finding")
        reason = table.text("reason", "a text that says why it is accepted here", filled, mandatory=True) or ""
        accepted[id] = Acceptance(id, reason, table.day("expires"))
    return tuple(accepted.values())


def _machine(table: ProfileTable) -> Machine:
    table.allow("nics", "nic_rate", "nic_kind", "nics_per_gpu", "gpus", "gpu", "scaling", "source")
    # A machine is described by its network cards, its GPUs, or both.
    cards = not {"gpus", "gpu"} & set(table.data) or bool(
        {"nics", "nic_rate", "nic_kind", "nics_per_gpu"} & set(table.data)
    )
    nics = table.count("nics", mandatory=cards) or 0
    nics_per_gpu = table.count("nics_per_gpu")
    if nics_per_gpu is not None and nics_per_gpu > nics:
        raise table.fault("nics_per_gpu", f"{nics_per_gpu} is more than nics", f"at most {nics}")
    return Machine(
        nics=nics,
        nic_rate=table.text("nic_rate", RATE_FORM, positive(units.parse_rate), mandatory=cards) or 0.0,
        gpus=table.count("gpus"),
        gpu=table.text("gpu", 'a model such as "H100"', one_line) or "",
        nic_kind=table.text("nic_kind", 'a name such as "efa" or "rc"', transport_name) or "",
        source=table.text("source", SOURCE_FORM, filled, mandatory=True) or "",
        nics_per_gpu=nics_per_gpu,
        scaling=table.text("scaling", 'a share such as "90%"', parse_share),
    )


def _reference(table: ProfileTable, machine: Machine | None) -> ReferenceRun:
    table.allow(
        "backend", "op", "memory", "blocks", "bandwidth", "p50", "p99", "latency", "plausible", "note", "source"
    )
    item = ReferenceRun(
        source=table.text("source", "a text that names the document and quotes it", filled, mandatory=True) or "",
        note=table.text("note", "a text", filled) or "",
        plausible=table.flag("plausible", default=True),
        backend=table.text("backend", 'the name of a backend such as "UCX"', backend_name),
        op=table.text("op", " or ".join(OPS), operation),
        memory=table.text("memory", MEMORY_FORM, MemoryPair.parse),
        blocks=table.text("blocks", RANGE_FORM, size_range),
        bandwidth=table.text("bandwidth", RATE_FORM, positive(units.parse_rate)),
        p50=table.text("p50", TIME_FORM, positive(units.parse_time)),
        p99=table.text("p99", TIME_FORM, positive(units.parse_time)),
        latency=table.text("latency", TIME_FORM, positive(units.parse_time)),
    )
    if all(part is None for part in (item.bandwidth, item.p50, item.p99, item.latency)):
        raise ValueError(f"{table.where}: has no figure: expected bandwidth, p50, p99 or latency")
    if machine is not None and machine.nics and item.bandwidth is not None and item.plausible:
        cards = machine.most([item.memory] if item.memory else None)
        if item.bandwidth > cards * machine.nic_rate:
            fault = _above_line_rate(table, "bandwidth", machine, cards)
            raise table.fault("bandwidth", fault, "plausible = false in the same table")
    return item


def _above_line_rate(table: ProfileTable, key: str, machine: Machine, cards: int) -> str:
    total = units.gigabytes(cards * machine.nic_rate)
    return f"{table.data[key]!r} is above the line rate of {machine.describe(cards)}, {total} GB/s"


def _check_line_rate(table: ProfileTable, item: Expectation, machine: Machine) -> None:
    """Refuse a floor or ceiling above the line rate, unless an accepted transport needs no network card."""
    if item.transports is not None and not all(is_network(name) for name in item.transports):
        return
    cards = machine.most(item.memory)
    for key, value in (("floor", item.floor), ("ceiling", item.ceiling)):
        if value is not None and value > cards * machine.nic_rate:
            raise table.fault(
                key,
                _above_line_rate(table, key, machine, cards),
                "less, or a transport that needs no network card, such as cma or cuda_ipc, in transports",
            )


def _expectation(table: ProfileTable, machine: Machine | None) -> Expectation:
    table.allow(
        "backend",
        "op",
        "memory",
        "blocks",
        "batch",
        "depth",
        "notify",
        "pages",
        "floor",
        "ceiling",
        "p50",
        "p99",
        "transports",
        "raw",
        "source",
    )
    notify = table.texts("notify", f"{EACH} or {LAST}", one_of(EACH, LAST))
    item = Expectation(
        source=table.text("source", SOURCE_FORM, filled, mandatory=True) or "",
        backend=table.texts("backend", 'names of backends such as "UCX"', backend_name),
        op=table.texts("op", " or ".join(OPS), operation),
        memory=table.texts("memory", MEMORY_FORM, MemoryPair.parse),
        batch=table.counts("batch"),
        depth=table.counts("depth"),
        blocks=table.text("blocks", RANGE_FORM, size_range),
        notify=notify,
        # Without the key, an expectation that was learned is of a version whose buffers were always in huge pages.
        pages=table.texts("pages", f"{HUGE} or {BASE}", one_of(HUGE, BASE)) or (notify and (HUGE,)),
        floor=table.text("floor", RATE_FORM, positive(units.parse_rate)),
        ceiling=table.text("ceiling", RATE_FORM, positive(units.parse_rate)),
        p50=table.text("p50", TIME_FORM, positive(units.parse_time)),
        p99=table.text("p99", TIME_FORM, positive(units.parse_time)),
        transports=table.texts("transports", TRANSPORTS_FORM, transport_name),
        raw=table.text("raw", RAW_FORM, share),
    )
    if item.floor is not None and item.ceiling is not None and item.floor > item.ceiling:
        raise table.fault("floor", f"{table.data['floor']!r} is above the ceiling", f"at most {table.data['ceiling']}")
    if item.p50 is not None and item.p99 is not None and item.p50 > item.p99:
        raise table.fault("p50", f"{table.data['p50']!r} is above p99", f"at most {table.data['p99']}")
    if all(part is None for part in (item.floor, item.ceiling, item.p50, item.p99, item.transports)):
        raise ValueError(f"{table.where}: expects nothing of a row: expected floor, ceiling, p50, p99 or transports")
    if machine is not None and machine.nics:
        _check_line_rate(table, item, machine)
    return item


def _shared_row(earlier: Expectation, later: Expectation) -> str | None:
    """Describe a row that both expectations apply to; None: there is none."""
    parts = []
    for name in ("backend", "op", "memory", "batch", "depth", "notify", "pages"):
        mine, theirs = getattr(earlier, name), getattr(later, name)
        if mine is None and theirs is None:
            continue
        both = [value for value in mine or theirs if theirs is None or value in theirs]
        if not both:
            return None
        parts.append(f"{name} {both[0]}")
    ranges = [item.blocks for item in (earlier, later) if item.blocks is not None]
    if ranges:
        first, last = max(low for low, _ in ranges), min(high for _, high in ranges)
        if first > last:
            return None
        parts.append(f"blocks of {units.format_size(first)}")
    return ", ".join(parts) or "every row"
