# SPDX-License-Identifier: Apache-2.0
"""A wrong value of any setting, wherever it comes from, ends in pytest's usage error, and that is one sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from helpers.etcd import engine_image
from helpers.pytester_run import run_pytest

from pytest_nixl.core.units import BLOCKS_FORM, RATE_FORM, SIZE_FORM, TIME_FORM
from pytest_nixl.etcd.endpoints import ENDPOINTS_FORM
from pytest_nixl.judge.profiles import bundled_profiles
from pytest_nixl.model.rank_pairs import PAIRING_FORM
from pytest_nixl.session.options import OPTIONS, TAKES_FLAGS, join_flags

pytestmark = pytest.mark.apart

SECRET = "hunter2"
LONG = "x" * 300

OURS = "def test_it(nixl_settings): pass"
NOT_OURS = "def test_it(): pass"


@dataclass(frozen=True)
class Wrong:
    """Values of one setting, each with what is wrong with it."""

    field: str
    form: str
    faults: Mapping[str, str]

    @property
    def flag(self) -> str:
        return f"--nixl-{self.field.replace('_', '-')}"


def _no_count(*values: str) -> dict[str, str]:
    return {value: f"{value!r} is not a whole number above zero" for value in values}


def _too_many(text: str, most: int) -> str:
    return f"{text} is more than {most}, the most that can be asked for"


#: What nobody means: numbers that no worker has memory for, and that Python itself refuses to read.
HUGE, ENDLESS = "1" + 18 * "0", 5000 * "9"
TOO_LONG = {
    text: f"{text!r} is more than 168 h, the longest time that can be asked for" for text in ("1000000h", "169h")
}


def _huge(most: int) -> dict[str, str]:
    return {
        HUGE: _too_many(HUGE, most),
        str(most + 1): _too_many(str(most + 1), most),
        ENDLESS: _too_many(f"{30 * '9'}… (5000 digits)", most),
    }


def _no_file(*values: str) -> dict[str, str]:
    return {value: f"there is no file {value!r}" for value in values}


COUNTS = "a whole number above zero, or a list of them"
PEM = "an existing PEM file"
PROFILE = f"{', '.join(bundled_profiles())}, or the path of a TOML file"

WRONG = (
    Wrong(
        "backend",
        "UCX, LIBFABRIC or POSIX (any case), or a list of them",
        {
            "banana": "'banana' is no backend that this version can drive",
            "expected": "'expected' is no backend that this version can drive",
            "": "'' is no backend that this version can drive",
            "UCX,": "'' is no backend that this version can drive",
            "UCX,ucx": "UCX is named twice",
            "GDS": "'GDS' is no backend that this version can drive: it needs a GPU, the nvidia-fs driver and a file "
            "system with GPUDirect Storage",
        },
    ),
    Wrong(
        "etcd",
        ENDPOINTS_FORM,
        {
            "": "etcd endpoint '' is empty",
            "http://h:1/": "etcd endpoint 'http://h:1/' ends with a slash",
            "http://h:1/v3": "etcd endpoint 'http://h:1/v3' has the path '/v3'",
            "http://h": "etcd endpoint 'http://h' names no port",
            "http://h:0": "etcd endpoint 'http://h:0' has the port 0, which is not between 1 and 65535",
            "http://h:99999": "etcd endpoint 'http://h:99999' has the port 99999, which is not between 1 and 65535",
            "ftp://h:1": "etcd endpoint 'ftp://h:1' has the unknown scheme 'ftp'",
            "http://h:1, http://g:1": "etcd endpoint ' http://g:1' has a space in it",
            "http://h:1,,http://g:1": "etcd endpoint '' is empty",
            f"http://u:{SECRET}@h:1/": "etcd endpoint 'http://***@h:1/' ends with a slash",
            f"http://u:{SECRET}@h": "etcd endpoint 'http://***@h' names no port",
            f"http://u:{SECRET}/@h:1": (
                "etcd endpoint 'http://***@h:1' has a user or password with one of / @ ? # in it, "
                "which are written %2F %40 %3F %23"
            ),
            f"http://u:{SECRET},@h:1": (
                "etcd endpoint 1 of 2 cannot be read (it is not shown, as the list has a user or password in it, "
                "where a comma is written %2C)"
            ),
        },
    ),
    Wrong(
        "etcd_server",
        "auto | external | container | embedded",
        {"banana": "'banana' is none of them", "expected": "'expected' is none of them", "": "'' is none of them"},
    ),
    Wrong(
        "etcd_image",
        "REPOSITORY[:TAG]",
        {"a b": "'a b' is no image reference", " ": "' ' is no image reference", "": "'' is no image reference"},
    ),
    Wrong("etcd_cacert", PEM, _no_file("/nowhere/ca.pem", "/", LONG, "")),
    Wrong("etcd_cert", PEM, _no_file("/nowhere/cert.pem", LONG, "")),
    Wrong("etcd_key", PEM, _no_file("/nowhere/key.pem", LONG, "")),
    Wrong(
        "etcd_user",
        "NAME:PASSWORD",
        dict.fromkeys(
            (SECRET, f"{SECRET}:", f":{SECRET}", ":", ""),
            "the name or the password is missing (what was given is not shown)",
        ),
    ),
    Wrong(
        "etcd_listen",
        "ADDR:PORT, such as 0.0.0.0:12379",
        {
            "": "'' names no port",
            "host": "'host' names no port",
            "host:": "'host:' names no port",
            "host:0": "'host:0' has the port 0, which is not between 1 and 65535",
            "host:http": "'host:http' has the port 'http', which is no number",
            "256.0.0.1:80": "'256.0.0.1:80' has the host '256.0.0.1', which is no IPv4 address",
        },
    ),
    Wrong("ranks", "a whole number above zero", _no_count("0", "-1", "two", "1.5", "")),
    Wrong("ranks", "a whole number above zero", {**_huge(65_536), "1000000000": _too_many("1000000000", 65_536)}),
    Wrong("batch", COUNTS, _huge(1_000_000)),
    Wrong("depth", COUNTS, _huge(65_536)),
    Wrong("iterations", "a whole number above zero, or auto (1000 up to 1 MiB, 100 above)", _huge(100_000_000)),
    Wrong("warmup", "a whole number", _huge(100_000_000)),
    Wrong("duration", TIME_FORM, TOO_LONG),
    Wrong("timeout", TIME_FORM, TOO_LONG),
    Wrong("join_timeout", TIME_FORM, TOO_LONG),
    Wrong("start_timeout", TIME_FORM, {**TOO_LONG, "0s": "'0s' is not above zero"}),
    Wrong("rank", "a whole number", {text: f"{text!r} is no whole number" for text in ("-1", "one", "1.5", "")}),
    Wrong(
        "group",
        "letters, digits, . _ and -",
        {text: f"{text!r} is no name of 1 to 64 characters" for text in ("", "a b", "a/b", "x" * 65)},
    ),
    Wrong("group_token", "a text that is not empty", {"": "it is empty"}),
    Wrong(
        "pairs",
        PAIRING_FORM,
        {
            "": "'' is not a pair of ranks",
            "some": "'some' is not a pair of ranks",
            "0:1:2": "'0:1:2' is not a pair of ranks",
            "0:1,2": "'2' is not a pair of ranks",
            "1:1": "'1:1' pairs a rank with itself",
            "0:1,0:1": "0:1 is named twice",
        },
    ),
    Wrong("join_timeout", TIME_FORM, {"0s": "'0s' is not above zero", "banana": "'banana' is no time"}),
    Wrong("logs", "a directory, which is made where there is none", {"/dev/null": "'/dev/null' is no directory"}),
    Wrong(
        "op",
        "WRITE, READ or both separated by a comma",
        {
            "COPY": "'COPY' is no operation",
            "write,copy": "'copy' is no operation",
            "": "'' is no operation",
            "READ,read": "READ is named twice",
        },
    ),
    Wrong(
        "memory",
        "a list of INITIATOR:TARGET with DRAM or VRAM, and FILE as the target of a storage backend",
        {
            "DRAM": "'DRAM' is no pair of memory types",
            "FILE:DRAM": "'FILE:DRAM' is no pair of memory types",
            "DRAM:DISK": "'DRAM:DISK' is no pair of memory types",
            "DRAM:VRAM:DRAM": "'DRAM:VRAM:DRAM' is no pair of memory types",
            "": "'' is no pair of memory types",
            "DRAM:DRAM,dram:dram": "DRAM:DRAM is named twice",
        },
    ),
    Wrong(
        "directory",
        "an existing directory",
        {value: f"there is no directory {value!r}" for value in ("/nowhere", "/etc/passwd", LONG, "")},
    ),
    Wrong(
        "blocks",
        SIZE_FORM,
        {
            "many": "'many' is no size",
            "KiB": "'KiB' is no size",
            "": "'' is no size",
            "4KiB..": "'' is no size",
            "-4KiB": "'-4KiB' is no size",
            "0": "'0' is not a whole number of bytes above zero",
            "0.5": "'0.5' is not a whole number of bytes above zero",
            "4KX": "'4KX' has the unknown unit 'KX'",
        },
    ),
    Wrong(
        "blocks",
        BLOCKS_FORM,
        {
            "8KiB..4KiB": "'8KiB..4KiB' is a reversed range, 8KiB is more than 4KiB",
            "4KiB..12KiB": "'4KiB..12KiB' does not reach 12KiB by doubling 4KiB",
            "4KiB..8KiB..16KiB": "'4KiB..8KiB..16KiB' is not one range",
            "4KiB,4096": "'4KiB,4096' names a size twice",
        },
    ),
    Wrong("batch", COUNTS, {**_no_count("0", "-1", "1.5", "two", ""), "1,": "'' is not a whole number above zero"}),
    Wrong("batch", COUNTS, {"1,2,1": "1 is named twice"}),
    Wrong("depth", COUNTS, {**_no_count("0", "-1", "1.5", "two", "³", ""), "2,2": "2 is named twice"}),
    Wrong(
        "iterations",
        "a whole number above zero, or auto (1000 up to 1 MiB, 100 above)",
        _no_count("0", "-1", "1.5", "two", "1,2", ""),
    ),
    Wrong(
        "warmup",
        "a whole number",
        {value: f"{value!r} is no whole number" for value in ("-1", "1.5", "ten", "1,2", "")},
    ),
    Wrong(
        "duration",
        TIME_FORM,
        {
            "s": "'s' is no time",
            "": "'' is no time",
            "-1s": "'-1s' is no time",
            "1fortnight": "'1fortnight' has the wrong unit 'fortnight'",
        },
    ),
    Wrong(
        "timeout",
        TIME_FORM,
        {
            "soon": "'soon' is no time",
            "": "'' is no time",
            "5days": "'5days' has the wrong unit 'days'",
            "0": "'0' is not above zero",
            "0ms": "'0ms' is not above zero",
        },
    ),
    Wrong(
        "profile",
        PROFILE,
        {
            "h999": "there is no profile 'h999'",
            "nowhere.toml": "there is no profile 'nowhere.toml'",
            ".": "profile '.' is no file",
            "": "profile '' is no file",
            LONG: f"profile {LONG!r} cannot be read (File name too long)",
        },
    ),
    Wrong(
        "devices",
        "INITIATOR:TARGET as numbers of GPUs, or auto",
        {
            "0": "'0' is no pair of GPUs",
            "0:1:2": "'0:1:2' is no pair of GPUs",
            "-1:0": "'-1:0' is no pair of GPUs",
            "all": "'all' is no pair of GPUs",
            "": "'' is no pair of GPUs",
        },
    ),
    Wrong(
        "nixlbench",
        "the path of a program",
        {
            "nowhere": "'nowhere' is no file that can be executed",
            "/etc/passwd": "'/etc/passwd' is no file that can be executed",
            ".": "'.' is no file that can be executed",
            "": "'' is no file that can be executed",
        },
    ),
    Wrong(
        "nixlbench_runtime",
        "auto | ETCD | ASIO",
        {"MPI": "'MPI' is none of them", "etcd": "'etcd' is none of them", "": "'' is none of them"},
    ),
    Wrong(
        "nixlbench_args",
        "flags of nixlbench as they are typed, such as '--mode=MG --num_initiator_dev=8 --num_target_dev=8'",
        {
            "MG": "'MG' is no flag",
            "--mode MG SG": "'SG' is no flag",
            "--mode='MG": '"--mode=\'MG" cannot be split into words (No closing quotation)',
            "--mode=MG --mode=SG": "--mode is given twice",
            "--backend=UCX": "--backend is the suite's own to say, as --nixl-backend tells it",
            "-initiator_seg_type VRAM": "--initiator_seg_type is the suite's own to say, as --nixl-memory tells it",
            "--benchmark_group=default": "--benchmark_group cannot be added: each run has a group of its own",
            "--flagfile=/etc/passwd": "--flagfile cannot be added: flags are given one by one",
            "--num_initiator_dev=8": "without --mode=MG each of the 9 devices is a process of its own, and two are "
            "started",
            "--mode=MG --num_target_dev=many": "--num_target_dev=many is no number of devices",
        },
    ),
    Wrong(
        "raw_tools",
        "an existing directory with one of ucx_perftest, fi_rma_bw",
        {
            "nowhere": "there is no directory 'nowhere'",
            "": "there is no directory ''",
            "/etc": "'/etc' has none of them that can be executed",
        },
    ),
    Wrong("image", "REPOSITORY[:TAG][@DIGEST]", {"a b": "'a b' is no image reference"}),
    Wrong(
        "baseline",
        "an existing file or directory, or else an image of the store",
        {"a b": "'a b' is no image reference", "": "'' is no image reference"},
    ),
    Wrong(
        "against",
        "an image and then the command that its workers are started with, such as 'IMAGE env UCX_TLS=tcp'",
        {
            "image:1": "'image:1' names no command after the image",
            "": "'' names no command after the image",
            "image:1 'env": '"image:1 \'env" is no command (No closing quotation)',
            "'a b' env A=1": "'a b' is no image reference",
        },
    ),
    Wrong(
        "max_regression",
        "a percentage, such as 5%",
        {
            "5": "'5' is no percentage",
            "five%": "'five%' is no percentage",
            "-5%": "'-5%' is no percentage",
            "0%": "'0%' is not between 0 % and 100 %",
            "100%": "'100%' is not between 0 % and 100 %",
        },
    ),
    Wrong(
        "launches",
        "a whole number from 1 to 7, or auto (1; 5 where a comparison is asked for)",
        {**_no_count("0", "-1", "1.5", "many", ""), "8": _too_many("8", 7)},
    ),
    Wrong("store", "a directory, which is made where there is none", {"/etc/passwd": "'/etc/passwd' is no directory"}),
    Wrong(
        "report",
        "paths in directories that exist, ending with .html, .csv, .prom",
        {
            "report": "'report' ends with none of .html, .csv, .prom",
            "a.html,a.html": "a.html is named twice",
            "/nowhere/a.html": "there is no directory '/nowhere'",
        },
    ),
)


WRONG_VALUES = [
    pytest.param(wrong, value, fault, id=f"{wrong.field}-{'long' if value == LONG else value[:40] or 'empty'}")
    for wrong in WRONG
    for value, fault in wrong.faults.items()
]


def sentence(result: pytest.RunResult) -> str:
    """Return the one sentence with which a run was refused; nothing but that and pytest's own frame is written."""
    errors = [line for line in result.errlines if line]
    assert len(errors) == 1, errors
    assert errors[0].startswith("ERROR: ")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    written = "\n".join((*result.outlines, *result.errlines))
    assert "Traceback" not in written
    assert "INTERNALERROR" not in written
    assert SECRET not in written
    return errors[0].removeprefix("ERROR: ")


@pytest.mark.parametrize(("wrong", "value", "fault"), WRONG_VALUES)
def test_a_wrong_option_is_refused_in_one_sentence(
    pytester: pytest.Pytester, wrong: Wrong, value: str, fault: str
) -> None:
    result = run_pytest(pytester, f"{wrong.flag}={value}", in_process=True)
    assert sentence(result) == f"{wrong.flag}: {fault}: expected {wrong.form}"
    assert result.outlines == []


@pytest.mark.parametrize(
    ("arguments", "row", "wanted"),
    [
        (("--nixl-blocks=1024GiB",), "1099511627776 bytes a block, batch 1, depth 1", 2 * (1 << 40) + 1024),
        (
            ("--nixl-blocks=1GiB", "--nixl-batch=1000,1", "--nixl-depth=4"),
            "1073741824 bytes a block, batch 1000, depth 4",
            2 * (4000 << 30) + 4000 * 1024,
        ),
        (
            ("--nixl-batch=1000000", "--nixl-ranks=2"),
            "67108864 bytes a block, batch 1000000, depth 1",
            (1_000_000 << 26) + 1_000_000 * 1024,
        ),
    ],
)
def test_a_row_that_does_not_fit_the_host_is_refused_with_the_bytes_wanted_and_there(
    pytester: pytest.Pytester, arguments: tuple[str, ...], row: str, wanted: int
) -> None:
    said = sentence(run_pytest(pytester, *arguments, in_process=True))
    assert said.startswith(f"the largest row ({row}) needs ")
    assert f"({wanted} bytes) of host memory here, and " in said
    match = re.search(r"and \S+ \S+ \(([0-9]+) bytes\) by (?:MemAvailable|the limit of .*) are available", said)
    assert match is not None, said
    assert 0 <= int(match[1]) < wanted


def test_a_row_that_fits_is_not_refused(pytester: pytest.Pytester) -> None:
    result = run_pytest(pytester, "--nixl-blocks=1MiB", "--nixl-batch=2", "--nixl-depth=2", in_process=True)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_every_option_is_among_those_cases() -> None:
    assert {wrong.field for wrong in WRONG} | {"gate", "keep_going"} == {item.field for item in OPTIONS}


@pytest.mark.parametrize(
    "argument", ["--nixl-backend=banana", f"--nixl-etcd=http://u:{SECRET}@h:1/", "--nixl-blocks=8KiB..4KiB"]
)
def test_a_process_of_its_own_says_the_same(pytester: pytest.Pytester, argument: str) -> None:
    here, alone = (run_pytest(pytester, argument, in_process=where) for where in (True, False))
    assert sentence(here) == sentence(alone)
    assert here.outlines == alone.outlines == []


def test_a_switch_takes_no_value(pytester: pytest.Pytester) -> None:
    result = run_pytest(pytester, "--nixl-gate=maybe", in_process=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*error: argument --nixl-gate: ignored explicit argument 'maybe'"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            ("--nixl-etcd-server=external",),
            "--nixl-etcd-server=external needs an address: give --nixl-etcd URL or set NIXL_ETCD_ENDPOINTS",
            id="external-without-address",
        ),
        pytest.param(
            ("--nixl-etcd-server=embedded", "--nixl-etcd=http://h:1"),
            "--nixl-etcd names an etcd that is there already, and --nixl-etcd-server=embedded asks for one of our own: "
            "give one of the two",
            id="embedded-with-address",
        ),
        pytest.param(
            ("--nixl-etcd-server=container", f"--nixl-etcd=http://u:{SECRET}@h:1"),
            "--nixl-etcd names an etcd that is there already, and --nixl-etcd-server=container asks for one of our "
            "own: give one of the two",
            id="container-with-address",
        ),
        pytest.param(
            ("--nixl-etcd-cert=here.pem",),
            "--nixl-etcd-cert=here.pem (option) is of no use alone: "
            "expected --nixl-etcd-key FILE or ETCDCTL_KEY beside it",
            id="cert-without-key",
        ),
        pytest.param(
            ("--nixl-etcd-key=here.pem",),
            "--nixl-etcd-key=here.pem (option) is of no use alone: "
            "expected --nixl-etcd-cert FILE or ETCDCTL_CERT beside it",
            id="key-without-cert",
        ),
        pytest.param(
            ("--nixl-baseline=here.pem", "--nixl-compare-image=nixl:1 env A=1"),
            "--nixl-baseline judges by a run of another time and --nixl-compare-image by one made now: give one of the two",
            id="baseline-and-against",
        ),
        pytest.param(
            ("--nixl-baseline=nixl:1",),
            "--nixl-baseline=nixl:1 is no path, and an image is looked up in the store: expected --nixl-store DIR "
            "beside it, or the path of a record",
            id="image-without-store",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    pytester: pytest.Pytester, arguments: tuple[str, ...], expected: str
) -> None:
    pytester.path.joinpath("here.pem").touch()
    result = run_pytest(pytester, *arguments, in_process=True)
    assert sentence(result) == expected
    assert result.outlines == []


@pytest.mark.parametrize(
    ("expectation", "fault"),
    [
        pytest.param(
            'floor = "1 MPH"\nsource = "test"',
            f"profile own.toml, expect #1, floor: '1 MPH' has the wrong unit 'MPH': expected {RATE_FORM}",
            id="wrong-unit",
        ),
        pytest.param(
            'flor = "1 GB/s"\nsource = "test"',
            "profile own.toml, expect #1, flor: unknown key (did you mean floor?): expected backend, op, memory, "
            "blocks, batch, depth, floor, ceiling, p50, p99, transports, raw, source",
            id="unknown-key",
        ),
        pytest.param(
            'floor = "1 GB/s"',
            "profile own.toml, expect #1, source: missing: expected a text that says where each figure is from",
            id="no-source",
        ),
    ],
)
def test_a_wrong_profile_is_refused_in_one_sentence(pytester: pytest.Pytester, expectation: str, fault: str) -> None:
    pytester.path.joinpath("own.toml").write_text(f'[profile]\nname = "own"\n[[expect]]\n{expectation}\n')
    result = run_pytest(pytester, "--nixl-profile=own.toml", in_process=True)
    assert sentence(result) == f"--nixl-profile: {fault}"


def test_a_profile_that_is_not_toml_is_refused_with_its_line(pytester: pytest.Pytester) -> None:
    pytester.path.joinpath("own.toml").write_text('[profile]\nname = "own\n')
    result = run_pytest(pytester, "--nixl-profile=own.toml", in_process=True)
    said = sentence(result)
    assert said.startswith("--nixl-profile: profile own.toml is not TOML (")
    assert "(at line 2, column 12)" in said
    assert ": expected a [profile] table with a name" in said


@pytest.mark.parametrize(
    ("wrong", "value"),
    [
        pytest.param(wrong, next(value for value in wrong.faults if value), id=f"{wrong.field}-{number}")
        for number, wrong in enumerate(WRONG)
        if any(wrong.faults)
    ],
)
def test_a_wrong_ini_value_is_refused_in_one_sentence(pytester: pytest.Pytester, wrong: Wrong, value: str) -> None:
    pytester.makeini(f"[pytest]\nnixl_{wrong.field} = {value}")
    result = run_pytest(pytester, in_process=True)
    assert sentence(result) == f"ini value nixl_{wrong.field}: {wrong.faults[value]}: expected {wrong.form}"
    assert result.outlines == []


def test_a_wrong_switch_in_an_ini_file_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nnixl_gate = maybe")
    expected = "ini value nixl_gate: 'maybe' is neither yes nor no: expected yes or no"
    assert sentence(run_pytest(pytester, in_process=True)) == expected


def test_a_wrong_ini_value_does_not_matter_beside_an_option(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nnixl_blocks = many")
    assert run_pytest(pytester, "--nixl-blocks=4KiB", in_process=True).ret == pytest.ExitCode.NO_TESTS_COLLECTED


ENVIRONMENTS = [
    pytest.param(
        {"NIXL_BACKEND": "banana"},
        "environment variable NIXL_BACKEND: 'banana' is no backend that this version can drive: "
        "expected UCX, LIBFABRIC or POSIX (any case), or a list of them",
        id="NIXL_BACKEND",
    ),
    pytest.param(
        {"ETCDCTL_CACERT": "/nowhere"},
        "environment variable ETCDCTL_CACERT: there is no file '/nowhere': expected an existing PEM file",
        id="ETCDCTL_CACERT",
    ),
    pytest.param(
        {"ETCDCTL_CERT": __file__},
        f"--nixl-etcd-cert={__file__} (environment ETCDCTL_CERT) is of no use alone: "
        "expected --nixl-etcd-key FILE or ETCDCTL_KEY beside it",
        id="ETCDCTL_CERT",
    ),
    pytest.param(
        {"ETCDCTL_USER": SECRET},
        "environment variable ETCDCTL_USER: the name or the password is missing (what was given is not shown): "
        "expected NAME:PASSWORD",
        id="ETCDCTL_USER",
    ),
]


@pytest.mark.parametrize(("env", "expected"), ENVIRONMENTS)
def test_a_wrong_variable_ends_a_run_that_has_a_test_of_ours(
    pytester: pytest.Pytester, env: dict[str, str], expected: str
) -> None:
    pytester.makepyfile(OURS)
    result = run_pytest(pytester, env=env)
    assert sentence(result) == expected
    assert result.outlines[-1].strip("= ").startswith("no tests ran in")


@pytest.mark.parametrize(("env", "expected"), ENVIRONMENTS)
def test_a_wrong_variable_does_not_touch_a_run_without_a_test_of_ours(
    pytester: pytest.Pytester, env: dict[str, str], expected: str
) -> None:
    pytester.makepyfile(NOT_OURS)
    result = run_pytest(pytester, env=env)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1)
    assert result.errlines == []
    result.stdout.no_fnmatch_line("*nixl*")
    result.stdout.no_fnmatch_line(f"*{expected}*")


USES_ETCD = "def test_it(nixl_etcd): raise AssertionError('it has run')"


def test_a_container_where_no_engine_answers_is_refused_before_a_test_runs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(USES_ETCD)
    result = run_pytest(
        pytester,
        "--nixl-etcd-server=container",
        "--nixl-etcd-image=localhost/there/is:none",
        env={"DOCKER_HOST": "unix:///nonexistent.sock"},
    )
    expected = "--nixl-etcd-server=container: no container engine answers at unix:///nonexistent.sock: No such file"
    assert sentence(result) == expected
    result.stdout.no_fnmatch_line("*it has run*")


def test_an_image_that_is_not_there_is_refused_before_a_test_runs(pytester: pytest.Pytester) -> None:
    engine_image()
    pytester.makepyfile(USES_ETCD)
    image = "--nixl-etcd-image=registry.invalid/etcd:v0"
    result = run_pytest(pytester, "--nixl-etcd-server=container", image)
    expected = "--nixl-etcd-server=container: the etcd image registry.invalid/etcd:v0 is not on this machine"
    assert sentence(result).startswith(expected)
    result.stdout.no_fnmatch_line("*it has run*")


def test_an_engine_is_not_asked_where_no_test_needs_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(OURS)
    env = {"DOCKER_HOST": "unix:///nonexistent.sock"}
    run_pytest(pytester, "--nixl-etcd-server=container", env=env).assert_outcomes(passed=1)


def test_every_option_is_in_the_help_with_its_form_and_default(pytester: pytest.Pytester) -> None:
    result = run_pytest(pytester, "--help", in_process=True)
    assert result.ret == pytest.ExitCode.OK
    text = " ".join(" ".join(result.outlines).split())
    for item in OPTIONS:
        assert item.flag in text
        assert f"the same as {item.flag}" in text
        if not item.switch:
            assert f"(default: {item.default or 'none'})" in text


@pytest.mark.parametrize("value", ["--check_consistency=1", "--mode=MG", "--recreate_xfer", "--a_b=c d", "a", ""])
def test_flags_of_nixlbench_may_be_a_word_of_their_own(value: str) -> None:
    words = ["suites", TAKES_FLAGS, value, "-x", f"{TAKES_FLAGS}={value}", "--", TAKES_FLAGS]
    join_flags(words)
    assert words == ["suites", f"{TAKES_FLAGS}={value}", "-x", f"{TAKES_FLAGS}={value}", "--", TAKES_FLAGS]


@pytest.mark.parametrize(
    ("words", "what"), [([], "nothing"), (["--nixl-gate"], "'--nixl-gate'"), (["--verbose"], "'--verbose'")]
)
def test_flags_of_nixlbench_that_are_not_there_are_a_usage_error(words: list[str], what: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"^{TAKES_FLAGS} is followed by {what}: expected flags of nixlbench"):
        join_flags([TAKES_FLAGS, *words])
