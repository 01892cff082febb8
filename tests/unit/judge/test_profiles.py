# SPDX-License-Identifier: Apache-2.0
"""Profiles: every field of a valid one, the message for every fault, and the rows that an expectation applies to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from pytest_nixl.core.extensions import ExtensionError
from pytest_nixl.judge.profiles import Profile, added_profiles, bundled_profiles, load_profile, parse_profile
from pytest_nixl.model.expectation import Expectation
from pytest_nixl.model.memory import MemoryPair
from pytest_nixl.model.row_key import RowKey
from pytest_nixl.model.settings import Settings

KIB, MIB = 1 << 10, 1 << 20
DRAM = MemoryPair("DRAM", "DRAM")
VRAM = MemoryPair("VRAM", "VRAM")
EITHER = f"expected {', '.join(bundled_profiles())}, or the path of a TOML file"
KEY = RowKey("UCX", "WRITE", DRAM, 4 * KIB)

GOOD = """
[profile]
name = " rack "
summary = "two nodes"

[required]
checks = ["nixl-loads", "bandwidth"]

[[expect]]
backend = ["ucx", "LIBFABRIC"]
op = ["WRITE", "read"]
memory = ["DRAM:DRAM", "vram:VRAM"]
blocks = "4KiB..512KiB"
batch = [1, 8]
depth = [2]
notify = ["each", "last"]
pages = ["base", "huge"]
floor = "1.5 GB/s"
ceiling = "100 Gb/s"
p50 = "20 us"
p99 = "1.5 ms"
transports = ["rc_mlx5", "cma"]
source = "measured"

[[expect]]
blocks = "1MiB"
transports = ["cma"]
source = "read"
"""


def profile(*expectations: str) -> Profile:
    tables = "".join(f"[[expect]]\n{text}\n" for text in expectations)
    return parse_profile(f'[profile]\nname = "t"\n{tables}'.encode(), "t.toml")


def fault_of(content: str) -> str:
    with pytest.raises(ValueError) as caught:
        parse_profile(content.encode(), "t.toml")
    return str(caught.value)


def test_every_field_of_a_good_profile() -> None:
    assert parse_profile(GOOD.encode(), "rack.toml") == Profile(
        name="rack",
        summary="two nodes",
        path_or_origin="rack.toml",
        required=("nixl-loads", "bandwidth"),
        expectations=(
            Expectation(
                source="measured",
                backend=("UCX", "LIBFABRIC"),
                op=("WRITE", "READ"),
                memory=(DRAM, VRAM),
                batch=(1, 8),
                depth=(2,),
                notify=("each", "last"),
                pages=("base", "huge"),
                blocks=(4 * KIB, 512 * KIB),
                floor=1.5e9,
                ceiling=12.5e9,
                p50=20 * 1e-6,
                p99=1.5 * 1e-3,
                transports=("rc_mlx5", "cma"),
            ),
            Expectation(source="read", blocks=(MIB, MIB), transports=("cma",)),
        ),
    )


def test_a_row_of_kv_requests_gets_only_the_transports_of_a_row_of_one_block() -> None:
    """A floor of 64 KiB says nothing about a request for thousands of them."""
    text = "blocks = '4KiB..64KiB'\nbatch = [1]\ndepth = [1]\nfloor = '1 GB/s'\nceiling = '9 GB/s'\nraw = '0.5'\n"
    text += "p50 = '1 us'\np99 = '2 us'\ntransports = ['cma']\nsource = 'a'"
    requests = replace(KEY, batch=4096, variant=(("kv", "scattered-prepped"), ("tokens", "1024")))
    expected = profile(text).expectation(requests)
    assert expected is not None
    assert expected.transports == ("cma",)
    assert {getattr(expected, name) for name in ("floor", "ceiling", "p50", "p99", "raw")} == {None}
    assert profile(text).expectation(replace(requests, block=1 << 20)) is None
    whole = profile(text).expectation(KEY)
    assert whole is not None
    assert whole.floor == 1e9


def test_a_profile_needs_only_a_name() -> None:
    assert parse_profile(b'[profile]\nname = "n"', "n.toml") == Profile("n", "", "n.toml", (), ())


NAMED = '[profile]\nname = "n"\n'
CHECKS = "expected a list of names of checks"


RATES = "expected a number with a unit GB/s, MB/s, GiB/s, Gb/s or Mb/s"
SHARE = 'expected a share of the bandwidth of a raw tool, above 0 and at most 1, as text: "0.5"'


BASE = 'transports = ["cma"]\nsource = "s"\n'
OTHER = '[[expect]]\nblocks = "1GiB"\ntransports = ["cma"]\nsource = "s"\n[[expect]]\n'
SOURCE = "expected a text that says where each figure is from"
NOTHING = "expect #2: expects nothing of a row: expected floor, ceiling, p50, p99 or transports"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "profile: missing: expected a [profile] table with a name"),
        ("[profile]", 'profile, name: missing: expected a name such as "loopback"'),
        ('[profile]\nname = " "', "profile, name: ' ' is not one line of text: expected a name"),
        ('[profile]\nname = "a\\nb"', "profile, name: 'a\\nb' is not one line of text: expected a name"),
        ("[profile]\nname = 3", "profile, name: the bare number 3, not a text: expected a name"),
        ('profile = "x"', "profile: a text, not a table: expected [profile]"),
        (f'{NAMED}summry = "x"', "profile, summry: unknown key (did you mean summary?): expected name, summary"),
        (
            f"{NAMED}[[expects]]",
            "expects: unknown key (did you mean expect?): expected profile, required, machine, expect, reference",
        ),
        (f"{NAMED}[zebra]", "zebra: unknown key: expected profile, required, machine, expect, reference"),
        (f"{NAMED}[expect]", "expect: a table, not a list of tables: expected [[expect]], with two brackets"),
        (f"expect = [1]\n{NAMED}", "expect: a list, not a list of tables: expected [[expect]], with two brackets"),
        (f"{NAMED}[required]\ncheck = []", "required, check: unknown key (did you mean checks?): expected checks"),
        (f'{NAMED}[required]\nchecks = "a"', f"required, checks: a text, not a list: {CHECKS}"),
        (f'{NAMED}[required]\nchecks = ["a", "B c"]', "required, checks: 'B c' is not a check id"),
        (f'{NAMED}[required]\nchecks = ["a", "a"]', f"required, checks: a is named twice: {CHECKS}"),
        # The second of two expectations.
        *((f'{NAMED}{OTHER}source = "s"\n{line}', f"expect #2, {sentence}") for line, sentence in (
            ('flor = "1 GB/s"', "flor: unknown key (did you mean floor?): expected backend, op, memory, blocks"),
            ("FLOOR = 1", "FLOOR: unknown key (did you mean floor?): expected backend"),
            ("floor = 5", f"floor: the bare number 5, not a text: {RATES}"),
            ('raw = "0"', f"raw: '0' is not a share: {SHARE}"),
            ('raw = "1.2"', f"raw: '1.2' is not a share: {SHARE}"),
            ('raw = "50 %"', f"raw: '50 %' is not a share: {SHARE}"),
            ('raw = " 0.5 "\nop = ["COPY"]', "op: 'COPY' is not an operation: expected a list of WRITE or READ"),
            ('memory = ["DRAM:DRAM:DRAM"]', "memory: 'DRAM:DRAM:DRAM' is not a pair of memory types: expected"),
            ('backend = ["U CX"]', "backend: 'U CX' is not a backend name: expected a list of names of backends"),
            ("batch = [0]", "batch: 0 is not above zero: expected a list of positive integers"),
            ("batch = [1.5]", "batch: the bare number 1.5, not an integer: expected a list of positive integers"),
            ("depth = [true]", "depth: a boolean, not an integer: expected a list of positive integers"),
            ("notify = ['all']", "notify: 'all' is neither each nor last: expected a list of each or last"),
            ("pages = ['2MiB']", "pages: '2MiB' is neither huge nor base: expected a list of huge or base"),
            ("depth = [4, 4]", "depth: 4 is named twice: expected a list of positive integers"),
            ('blocks = "1MiB..4KiB"', "blocks: '1MiB..4KiB' is a reversed range, because 1MiB is more than 4KiB"),
            ('blocks = "4KiB.."', "blocks: '4KiB..' is neither a size nor a range, because '' is"),
            ('blocks = "4XiB"', "blocks: '4XiB' has the unknown unit 'XiB': expected one size"),
            ('transports = ["cma/memory"]', "transports: 'cma/memory' is not a transport name: expected a list of"),
            ('floor = "2 GB/s"\nceiling = "8 Gb/s"', "floor: '2 GB/s' is above the ceiling: expected at most 8 Gb/s"),
            ('p50 = "2 ms"\np99 = "1 ms"', "p50: '2 ms' is above p99: expected at most 1 ms"),
        )),
        *((f'{NAMED}{OTHER}transports = ["cma"]\n{line}', f"expect #2, source: {fault}: {SOURCE}") for line, fault in (
            ("", "missing"), ('source = "  "', "empty"), ("source = 1", "the bare number 1, not a text")
        )),
        # A share of the raw bandwidth does not judge the row itself.
        *((f'{NAMED}{OTHER}source = "s"\n{line}', NOTHING) for line in ('op = ["WRITE"]', 'raw = "0.5"')),
        # Two expectations for one row.
        *((f"{NAMED}[[expect]]\n{BASE}{first}\n[[expect]]\n{BASE}{other}", f"expect #2: applies to {row}, as expect #1 "
           "does: expected at most one [[expect]] for each row") for first, other, row in (
            ("", "", "every row"),
            ("", 'op = ["READ"]', "op READ"),
            ("batch = [1, 2, 4]", "batch = [4, 2, 8]", "batch 2"),
            ('backend = ["UCX", "GDS"]', 'backend = ["LIBFABRIC", "GDS"]', "backend GDS"),
            ('memory = ["DRAM:VRAM"]', 'memory = ["DRAM:VRAM"]', "memory DRAM:VRAM"),
            ("batch = [1, 2]\ndepth = [3]", "batch = [2, 4]", "batch 2, depth 3"),
            ("notify = ['last']", "", "notify last, pages huge"),
            ("pages = ['base']", "", "pages base"),
            ('blocks = "1KiB..4KiB"', 'blocks = "4KiB..8KiB"', "blocks of 4KiB"),
            ('blocks = "1KiB..64KiB"', 'blocks = "2KiB"', "blocks of 2KiB"),
            ('blocks = "1KiB..64KiB"', "", "blocks of 1KiB"),
        )),
    ],
)  # fmt: skip
def test_a_fault_of_a_profile_is_one_sentence_with_its_table_and_key(content: str, sentence: str) -> None:
    message = fault_of(content)
    assert message.startswith(f"profile t.toml, {sentence}")
    assert "expected" in message
    assert "\n" not in message


def test_an_expectation_may_have_any_one_value_and_equal_bounds() -> None:
    for line in ('floor = "1 GB/s"', 'ceiling = "1 GB/s"', 'p50 = "1 us"', 'p99 = "1 us"', 'transports = ["cma"]'):
        assert len(profile(f'{line}\nsource = "s"').expectations) == 1
    (item,) = profile('floor = "1 GB/s"\nceiling = "8 Gb/s"\np50 = "1 ms"\np99 = "1000 us"\nsource = "s"').expectations
    assert item.floor == item.ceiling == 1e9
    for share in ("0.5", "1"):
        (item,) = profile(f'floor = "1 GB/s"\nraw = "{share}"\nsource = "s"').expectations
        assert item.raw == float(share)


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "rack.toml"
    path.write_text(GOOD)
    first = load_profile(str(path))
    assert (first.name, first.path_or_origin) == ("rack", str(path))
    assert load_profile(str(path)) is first
    path.write_text('[profile]\nname = "changed"')
    assert load_profile(str(path)).name == "changed"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, f"there is no profile {name!r}") for name in ("loobpack", "no/such/file.toml")),
        *((name, f"profile {name!r} is not a file") for name in ("", ".")),
    ],
)
def test_a_name_without_a_profile_is_refused_with_the_existing_ones(name: str, fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_profile(name)
    assert str(caught.value) == f"{fault}: {EITHER}"


NOT_TOML = ("[profile", 'name = "a"\nname = "b"', "a = " + "[" * 20000, "a = 1" + "0" * 10000 + "x", 'a = "\x01"')


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        *((text.encode(), r"TOML \(.*\)") for text in NOT_TOML),
        (b"\xff\xfe", "UTF-8 text"),
    ],
    ids=["open", "twice", "nested", "huge", "control", "no text"],
)
def test_a_file_that_is_not_toml_is_refused_in_one_sentence(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        load_profile(str(path))
    expected = (
        "expected a [profile] table with a name, a [required] table with checks, [[expect]], [[bound]] and [[accept]] "
        "tables"
    )
    assert re.fullmatch(rf"profile {re.escape(str(path))} is not {fault}: {re.escape(expected)}", str(caught.value))


@pytest.mark.parametrize("name", bundled_profiles())
def test_every_bundled_profile_loads_under_its_own_name(name: str) -> None:
    loaded = load_profile(name)
    assert loaded.name == name
    assert loaded.path_or_origin == f"{name}.toml of pytest-nixl"
    assert loaded.required
    assert loaded.expectations or loaded.machine
    assert load_profile(name) is loaded


def test_bundled_profiles_are_the_files_of_the_package() -> None:
    folder = resources.files("pytest_nixl").joinpath("profiles")
    assert set(bundled_profiles()) == {item.name[: -len(".toml")] for item in folder.iterdir()}
    assert "loopback" in bundled_profiles()


def test_loopback_requires_only_checks_that_a_laptop_passes() -> None:
    assert load_profile("loopback").required == (
        "nixl-loads",
        "backend-loads",
        "etcd-answers",
        "metadata-by-etcd",
        "metadata-by-side-channel",
        "endpoints-well-formed",
        "bandwidth",
    )


@pytest.mark.parametrize(
    "module",
    ["judge.profiles", "judge.row", "model.expectation", "judge.floors", "model.verdicts", "model.results",
     "model.samples", "session.settings", "core.units", "etcd.endpoints", "model.row_key", "session.check_result"],
)  # fmt: skip
def test_each_module_can_be_the_first_to_be_imported(module: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", f"import pytest_nixl.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_a_profile_of_the_largest_size_is_read_and_a_larger_one_refused(tmp_path: Path) -> None:
    text = b'[profile]\nname = "large"\nsummary = "x"\n'
    path = tmp_path / "large.toml"
    path.write_bytes(text + b"#" * ((1 << 20) - len(text)))
    assert load_profile(str(path)).name == "large"
    path.write_bytes(text + b"#" * ((1 << 20) - len(text) + 1))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        load_profile(str(path))


@pytest.mark.parametrize(("tables", "message"), [(1000, ""), (1001, "reference: 1,001 tables: expected at most 1,000")])
def test_a_profile_has_at_most_a_thousand_tables_of_a_kind(tables: int, message: str) -> None:
    text = '[profile]\nname = "n"\n' + '[[reference]]\nsource = "s"\np50 = "1 us"\n' * tables
    if message:
        assert fault_of(text) == f"profile t.toml, {message}"
    else:
        assert len(parse_profile(text.encode(), "t.toml").references) == tables


def test_the_transports_of_a_backend_are_those_of_its_expectations() -> None:
    loaded = profile(
        f'{BASE}backend = ["UCX"]\nblocks = "1KiB"', f'{BASE}backend = ["UCX"]\nblocks = "2KiB"',
        'backend = ["GDS"]\nblocks = "1KiB"\ntransports = ["nvme"]\nsource = "s"',
        'blocks = "4KiB"\ntransports = ["tcp"]\nsource = "s"',
        'backend = ["UCX"]\nblocks = "8KiB"\nfloor = "1 GB/s"\nsource = "s"',
    )  # fmt: skip
    assert loaded.transports("UCX") == (("cma",), ("tcp",))
    assert loaded.transports("GDS") == (("nvme",), ("tcp",))
    assert loaded.transports("POSIX") == (("tcp",),)
    last = profile(f'{BASE}backend = ["UCX"]', 'backend = ["GDS"]\ntransports = ["nvme"]\nsource = "s"')
    assert last.transports("GDS")[-1] == ("nvme",)


@pytest.mark.parametrize(
    ("walks", "footprint", "retained"), [(False, None, True), (True, None, False), (True, 4096, True)]
)
def test_rows_that_walk_a_buffer_have_floors_only_if_the_run_asks_for_it(
    make_settings: Callable[..., Settings], walks: bool, footprint: int | None, retained: bool
) -> None:
    loaded = profile(f'{BASE}floor = "1 GB/s"\nceiling = "9 GB/s"\np50 = "1 us"\np99 = "2 us"\nraw = "0.5"')
    key = replace(KEY, variant=(("footprint", "4KiB"),) if walks else ())
    settings = make_settings(footprint=footprint)
    expected = loaded.expectation_in(settings, key)
    assert expected is not None
    assert {getattr(expected, name) is not None for name in ("floor", "p50", "p99", "raw")} == {retained}
    assert (expected.ceiling, expected.transports) == (9e9, ("cma",))
    assert profile(f'{BASE}op = ["READ"]').expectation_in(settings, key) is None


def a_distribution(path: Path, name: str, *profiles: str) -> None:
    """Make a distribution that adds profiles, as pip installs one; its package has the name of the distribution."""
    (path / name).mkdir()
    (path / name / "__init__.py").write_text("")
    for package in profiles:
        (path / name / f"{package}.toml").write_text(f'[profile]\nname = "{package}"')
    (path / f"{name}-1.0.dist-info").mkdir()
    (path / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (path / f"{name}-1.0.dist-info" / "entry_points.txt").write_text(f"[pytest_nixl.profiles]\n{name} = {name}\n")


@pytest.mark.parametrize(
    ("profiles", "fault"),
    [
        ((("rack", "row"), ("hall",)), ""),
        (((), ()), "has no .toml file"),
        ((("rack",), ("hall", "rack")), "has a profile 'rack', and so has {0} 1.0"),
        ((("rack",), ("loopback",)), "has a profile 'loopback', and so has pytest-nixl"),
    ],
)
def test_profiles_of_other_distributions_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profiles: tuple[tuple[str, ...], tuple[str, ...]], fault: str
) -> None:
    names = [f"{tmp_path.name}_{part}" for part in "ab"]  # each package is imported once
    for name, text in zip(names, profiles, strict=True):
        a_distribution(tmp_path, name, *text)
    monkeypatch.syspath_prepend(tmp_path)
    if fault:
        with pytest.raises(ExtensionError, match=fault.format(*names)):
            added_profiles()
        return
    assert {name: extension.owner for name, (extension, _) in added_profiles().items()} == {
        "rack": f"{names[0]} 1.0", "row": f"{names[0]} 1.0", "hall": f"{names[1]} 1.0",
    }  # fmt: skip
    assert load_profile("hall").path_or_origin == f"hall.toml of {names[1]} 1.0"


def test_pages_do_not_matter_to_a_row_without_host_memory() -> None:
    of_gpus, of_hosts = (RowKey("UCX", "READ", MemoryPair(kind, kind), 4096) for kind in ("VRAM", "DRAM"))
    base = profile(f"{BASE}pages = ['base']")
    assert base.expectation(of_gpus) is not None
    assert base.expectation(of_hosts) is None
