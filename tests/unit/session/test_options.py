# SPDX-License-Identifier: Apache-2.0
"""A wrong value of a setting ends pytest with a usage error of one sentence, whatever the value's source."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import pytest
from helpers.pytester_run import run_pytest

from pytest_nixl.core.forms import RATE_FORM, SIZE_FORM, TIME_FORM
from pytest_nixl.judge.profiles import bundled_profiles
from pytest_nixl.model.settings import OPTIONS, Option, Settings
from pytest_nixl.session.options import TAKES_FLAGS, join_flags, report_ending
from pytest_nixl.session.settings import read_settings

pytest_plugins = ["settings_fixtures"]

Configure = Callable[..., pytest.Config]

SECRET = "hunter2"
LONG = "x" * 300
#: Numbers that no worker has memory for, and numbers that Python itself refuses to convert.
HUGE, ENDLESS = "1" + 18 * "0", 5000 * "9"
PROFILE_FORM = f"{', '.join(bundled_profiles())}, or the path of a TOML file"

CHOICE, COUNT = "{!r} is not one of the choices", "{!r} is not a positive integer"
NO_FILE, IMAGE, PERCENTAGE = "there is no file {!r}", "{!r} is not an image reference", "{!r} is not a percentage"
BEYOND, TOO_LONG = "{{}} is more than the maximum of {}", "{!r} is more than the maximum of 168 h"
#: Of an option: what a refusal says of some wrong values; ``{}`` is the value. The option's own accepted form follows,
#: if none is in the fault.
WRONG: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("backend", "{!r} is not a supported backend", ("banana", "expected", "")),
    ("backend", "'' is not a supported backend", ("UCX,",)),
    ("backend", "UCX is named twice", ("UCX,ucx",)),
    ("backend", "'GDS' is not a supported backend: it needs a GPU, the nvidia-fs driver and a file system with "
     "GPUDirect Storage", ("GDS",)),
    ("etcd", "etcd endpoint '' is empty", ("", "http://h:1,,http://g:1")),
    ("etcd", "etcd endpoint 'http://***@h:1/' ends with a slash", (f"http://u:{SECRET}@h:1/",)),
    ("etcd", "etcd endpoint 1 of 2 is malformed (not shown, because the list contains a user or password; write a "
     "comma in a password as %2C)", (f"http://u:{SECRET},@h:1",)),
    ("etcd_server", CHOICE, ("banana", "expected", "", "AUTO")),
    ("etcd_image", IMAGE, ("a b", " ", "", "a ")),
    ("etcd_cacert", NO_FILE, ("/nowhere/ca.pem", "/", LONG, "")),
    ("etcd_cert", NO_FILE, ("/nowhere/cert.pem",)),
    ("etcd_key", NO_FILE, ("/nowhere/key.pem",)),
    ("etcd_user", "the name or the password is missing (the value is not shown)",
     (SECRET, f"{SECRET}:", f":{SECRET}", f":{SECRET}:x", ":", "")),
    ("etcd_listen", "{!r} names no port", ("", "host")),
    ("etcd_listen", "'host:0' has the port 0, which is not between 1 and 65535", ("host:0",)),
    ("ranks", COUNT, ("0", "-1", "two", "1.5", "", "³")),
    ("ranks", BEYOND.format(65_536), ("65537", HUGE)),
    ("ranks", f"{30 * '9'}… (5000 digits) is more than the maximum of 65536", (ENDLESS,)),
    ("rank", "{!r} is not a non-negative integer of at most 6 digits", ("-1", "one", "1.5", "", "1000000")),
    ("group", "{!r} is not a valid name", ("", "a b", "a/b", 65 * "x")),
    ("group_token", "the token is empty", ("", " ")),
    ("pairs", "{!r} is not a pair of ranks", ("", "some", "0:1:2")),
    ("pairs", "'2' is not a pair of ranks", ("0:1,2",)),
    ("pairs", "'1:1' pairs a rank with itself", ("1:1",)),
    ("pairs", "0:1 is named twice", ("0:1,0:1",)),
    ("pattern", "'' is not a pattern", ("",)),
    ("pattern", "incst cannot be read: No such file or directory", ("incst",)),
    ("pattern", "no such\\nfile cannot be read: No such file or directory", ("no such\nfile",)),
    ("pattern", "http://***@h cannot be read: No such file or directory", (f"http://u:{SECRET}@h",)),
    ("join_timeout", "{!r} is not above zero", ("0s",)),
    ("join_timeout", "{!r} is not a time", ("banana",)),
    ("lease", "{!r} is not a whole number of seconds from 2 to 3600", ("0", "1s", "6.5", "2h", "3601")),
    ("lease", f"{{!r}} is not a time: expected {TIME_FORM}", ("", "-6", "long")),
    ("log_dir", "{!r} is not a directory", ("/dev/null", "")),
    ("op", "{!r} is not an operation", ("COPY", "")),
    ("op", "'copy' is not an operation", ("write,copy",)),
    ("op", "READ is named twice", ("READ,read",)),
    ("memory", "{!r} is not a pair of memory types", ("DRAM", "FILE:DRAM", "DRAM:DISK", "DRAM:VRAM:DRAM", "")),
    ("memory", "DRAM:DRAM is named twice", ("DRAM:DRAM,dram:dram",)),
    ("devices", "{!r} is not a pair of GPU numbers", ("0", "0:1:2", "-1:0", "all", "")),
    ("file_dir", "there is no directory {!r}", ("/nowhere", "/etc/passwd", LONG, "")),
    ("s3", "{!r} is not the URL of an S3 server", ("minio:9000", "http://h/bucket", "http://h:x", "", "podman:moto")),
    ("s3", "'a b' is not an image reference", ("container:a b",)),
    ("s3", "'' is not an image reference", ("container:",)),
    ("s3", "the URL has a user (not shown): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead",
     (f"http://me:{SECRET}@h",)),
    ("blocks", f"{{!r}} is not a size: expected {SIZE_FORM}", ("many", "KiB", "", "-4KiB")),
    ("blocks", f"{{!r}} is not a whole number of bytes above zero: expected {SIZE_FORM}", ("0", "0.5")),
    ("blocks", f"'4KX' has the unknown unit 'KX': expected {SIZE_FORM}", ("4KX",)),
    ("blocks", "'8KiB..4KiB' is a reversed range, 8KiB is more than 4KiB", ("8KiB..4KiB",)),
    ("blocks", "'4KiB..12KiB' does not reach 12KiB by doubling 4KiB", ("4KiB..12KiB",)),
    ("blocks", "{!r} is not one range", ("4KiB..8KiB..16KiB",)),
    ("blocks", "{!r} names a size twice", ("4KiB,4096",)),
    ("batch", COUNT, ("0", "two", "")),
    ("batch", "'' is not a positive integer", ("1,",)),
    ("batch", "1 is named twice", ("1,2,1",)),
    ("batch", BEYOND.format(1_000_000), ("1000001",)),
    ("depth", COUNT, ("0",)),
    ("depth", BEYOND.format(65_536), ("65537",)),
    ("footprint", "{!r} is neither row, auto nor a size", ("", "cold", "0", "-1", "1.5B", "1 parsec")),
    ("notify", CHOICE, ("each,last",)),
    ("pages", CHOICE, ("2MiB",)),
    ("kv_model", "there is no model {!r}", (LONG, "")),
    ("kv_model", "there is no model 'llama3-8b' (did you mean llama-3-8b or llama-3-70b?)", ("llama3-8b",)),
    ("kv_model", "there is no file 'Qwen/Qwen3-14B' (did you mean qwen3-14b?)", ("Qwen/Qwen3-14B",)),
    ("kv_model", "model config {!r} is not a file", (".", "/dev/null")),
    ("kv_model", "model config '/etc/passwd' cannot be used: it is not JSON ('Expecting value: line 1 column 1 (char "
     "0)')", ("/etc/passwd",)),
    ("kv_tokens", COUNT, ("0", "8k")),
    ("kv_tokens", BEYOND.format(16_777_216), ("16777217",)),
    ("kv_block_tokens", COUNT, ("16,32",)),
    ("kv_block_tokens", BEYOND.format(65_536), ("65537",)),
    ("kv_tp", COUNT, ("0", "")),
    ("kv_tp", "'' is not a positive integer", ("1:",)),
    ("kv_tp", "'2:4' is not a positive integer", ("1:2:4",)),
    ("kv_tp", "4097 is more than the maximum of 4096", ("4097", "1:4097", "4097:1")),
    ("kv_requests", COUNT, ("2,4",)),
    ("kv_requests", BEYOND.format(1024), ("1025",)),
    ("kv_rate", "{!r} is not a number of requests each second", ("fast", "-1", "1/m", "1e3", "", "1234567890")),
    ("kv_rate", "{!r} is not between 0.001/s and 1000000/s", ("0", "0/s", "0.0001", "2000000/s")),
    ("kv_dtype", CHOICE, ("float", "BF16", "")),
    ("iterations", COUNT, ("0", "1,2", "")),
    ("iterations", BEYOND.format(100_000_000), ("100000001",)),
    ("warmup", "{!r} is not a non-negative integer", ("-1", "1.5", "ten", "1,2", "")),
    ("warmup", BEYOND.format(100_000_000), ("100000001",)),
    ("duration", TOO_LONG, ("1000000h", "169h")),
    ("duration", "{!r} is not a time", ("s", "", "-1s")),
    ("duration", "'1fortnight' has the wrong unit 'fortnight'", ("1fortnight",)),
    ("timeout", TOO_LONG, ("169h",)),
    ("timeout", "{!r} is not above zero", ("0", "0ms")),
    ("start_timeout", "{!r} is not above zero", ("0s",)),
    ("profile", f"there is no profile {{!r}}: expected {PROFILE_FORM}", ("h999", "nowhere.toml")),
    ("profile", f"profile {{!r}} is not a file: expected {PROFILE_FORM}", (".", "")),
    ("profile", f"profile {{!r}} cannot be read (File name too long): expected {PROFILE_FORM}", (LONG,)),
    ("nixlbench", "{!r} is not an executable file", ("nowhere", "/etc/passwd", ".", "")),
    ("nixlbench_runtime", CHOICE, ("etcd",)),
    ("nixlbench_args", "{!r} is not a flag", ("MG", "--", "-", "--=1", "--Mode=MG", "---mode=MG", "--mode-x=MG")),
    ("nixlbench_args", "'SG' is not a flag", ("--mode MG SG",)),
    ("nixlbench_args", '"--mode=\'MG" cannot be split into words (No closing quotation)', ("--mode='MG",)),
    ("nixlbench_args", "--mode is given twice", ("--mode=MG --mode=SG",)),
    ("nixlbench_args", "--backend is set by the suite: use --nixl-backend instead", ("--backend=UCX",)),
    ("nixlbench_args", "--initiator_seg_type is set by the suite: use --nixl-memory instead",
     ("-initiator_seg_type VRAM",)),
    ("nixlbench_args", "--benchmark_group cannot be added: the suite makes a new group for each run",
     ("--benchmark_group=default",)),
    ("nixlbench_args", "--flagfile cannot be added: give each flag by itself", ("--flagfile=/etc/passwd",)),
    ("nixlbench_args", "without --mode=MG the 9 devices need one process each, but the suite starts two",
     ("--num_initiator_dev=8",)),
    ("nixlbench_args", "--num_target_dev=many is not a number of devices", ("--mode=MG --num_target_dev=many",)),
    ("raw_tools_dir", "there is no directory {!r}", ("nowhere", "")),
    ("raw_tools_dir", "directory {!r} has no executable raw tool", ("/etc",)),
    ("level", "{!r} is not a level", ("fast", "0", "4", "1,2", "", LONG)),
    ("image", IMAGE, ("a b",)),
    ("baseline", IMAGE, ("a b", "")),
    ("compare_image", "{!r} has no command after the image", ("image:1", "")),
    ("compare_image", '"image:1 \'env" is not a command (No closing quotation)', ("image:1 'env",)),
    ("compare_image", "'a b' is not an image reference", ("'a b' env A=1",)),
    ("max_regression", PERCENTAGE, ("5", "five%", "-5%")),
    ("max_regression", "{!r} is not between 0 % and 100 %", ("0%", "100%")),
    ("min_launches", COUNT, ("0", "many")),
    ("min_launches", BEYOND.format(7), ("8",)),
    ("store", "{!r} is not a directory", ("/etc/passwd",)),
    ("report", "{!r} does not end with one of .html, .csv, .prom, .json", ("report", "x/.html")),
    ("report", "a.html is named twice", ("a.html,a.html",)),
    ("report", "'/etc/passwd/b/a.csv' cannot be written, because '/etc/passwd' is not a directory",
     ("/etc/passwd/b/a.csv",)),
    ("agent", CHOICE, ("vLLM",)),
    ("progress_thread", "{!r} is neither auto, off nor on", ("yes", "ON", "")),
    ("progress_thread", "'' is neither auto, off nor on", ("on,",)),
    ("progress_thread", "on is named twice", ("on,on",)),
    ("progress_thread", "{!r} has auto and another value", ("auto,on",)),
    ("threads", "{!r} is not a number of threads from 1 to 256", ("0", "-1", "257", "1.5", "")),
    ("threads", f"{40 * '9'!r} is not a number of threads from 1 to 256", (ENDLESS,)),
    ("threads", "'257' is not a number of threads from 0 to 256", ("8:257",)),
    ("threads", "'' is not a number of threads from 0 to 256", ("8:",)),
    ("threads", "{!r} does not give threads to one side or both", ("0:0", "1:2:3")),
    ("sync_mode", CHOICE, ("STRICT",)),
    ("backend_params", "{!r} names no backend", ("", "num_workers=4", ":num_workers=4")),
    ("backend_params", "{!r} has no value", ("UCX:num_workers", "UCX:num_workers=")),
    ("backend_params", "'' names no backend", ("UCX:num_workers=4,",)),
    ("backend_params", "'' is not the name of a parameter", ("UCX:=4",)),
    ("backend_params", "'a-b' is not the name of a parameter", ("UCX:a-b=4",)),
    ("backend_params", "UCX:a is named twice", ("UCX:a=1,ucx:a=2",)),
    ("backend_params", "'UXC' is not a supported backend", ("UXC:a=1",)),
    ("backend_params", "'b/c' has a space or a /, or over 200 characters, which a row key cannot hold", ("UCX:a=b/c",)),
    ("backend_params", "{!r} is set by another option: expected --nixl-threads=N", ("UCX:num_threads=4",)),
    ("backend_params", "connection_string may hold a secret, and parameters are recorded: set "
     "AZURE_STORAGE_CONNECTION_STRING instead", ("AZURE_BLOB:connection_string=AccountName=a;AccountKey=Eby8vdM",)),
    ("backend_params", "secret_key may hold a secret, and parameters are recorded: set AWS_SECRET_ACCESS_KEY instead",
     ("OBJ:secret_key=Eby8vdM",)),
    ("backend_params", "a may hold a secret, and parameters are recorded: give it by the backend's own variable",
     ("UCX:a=AccountKey=Eby8vdM",)),
)  # fmt: skip

#: Of an option: further texts that are accepted, and the value of each.
ACCEPTED: tuple[tuple[str, str, object], ...] = (
    ("ranks", "0000065536", 65_536), ("rank", "999999", 999_999), ("group", 64 * "x", 64 * "x"),
    ("batch", " 4 ,1000000", (4, 1_000_000)), ("depth", "65536", (65_536,)), ("iterations", "auto", None),
    ("iterations", "100000000", 100_000_000), ("warmup", "007", 7), ("warmup", " 7 ", 7), ("rank", " 3 ", 3),
    ("min_launches", "auto", None), ("lease", "2s", 2), ("level", "1", "quick"),
    ("duration", "0", 0.0), ("duration", "168h", 604_800.0), ("timeout", "2", 2.0), ("lease", "1h", 3600),
    ("kv_tp", "4", (4, 4)), ("kv_tp", "4096:1", (4096, 1)), ("kv_dtype", "auto", None), ("kv_rate", "auto", None),
    ("kv_rate", "0.001", 0.001), ("kv_rate", "1000000/s", 1e6), ("s3", "embedded", "embedded"),
    ("s3", "container", "container"), ("s3", "container:moto:5", "container:moto:5"), ("level", "2", "standard"),
    ("level", " Quick ", "quick"), ("level", " 3 ", "extended"), ("gate", "TRUE", True), ("gate", "1", True),
    ("gate", "No", False), ("gate", "0", False), ("gate", "", False), ("image", f"u:{SECRET}@h/nixl:1", "***@h/nixl:1"),
    ("baseline", "/", "/"), ("baseline", "nixl:1", "nixl:1"), ("report", "a.html, b.csv", ("a.html", "b.csv")),
)  # fmt: skip


def sentence(result: pytest.RunResult) -> str:
    """Return the one sentence that refused a run; nothing else is written except pytest's own lines."""
    errors = [line for line in result.errlines if line]
    assert len(errors) == 1, errors
    assert errors[0].startswith("ERROR: ")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    written = "\n".join((*result.outlines, *result.errlines))
    assert "Traceback" not in written
    assert "INTERNALERROR" not in written
    assert SECRET not in written
    return errors[0].removeprefix("ERROR: ")


@pytest.mark.parametrize("item", OPTIONS, ids=lambda item: item.field)
def test_a_wrong_value_is_refused_with_its_fault_and_the_accepted_form(configure: Configure, item: Option) -> None:
    rows = [(fault, values) for field, fault, values in WRONG if field == item.field]
    assert rows or item.switch, "an option has wrong values in this file"
    for fault, value in ((fault, value) for fault, values in rows for value in values):
        with pytest.raises(pytest.UsageError) as refused:
            read_settings(configure({item.field: value}), {})
        text = f"{item.flag}: {fault.format(value)}"
        assert str(refused.value) == (text if ": expected " in text else f"{text}: expected {item.form}")


def test_further_texts_are_accepted() -> None:
    options = {item.field: item for item in OPTIONS}
    values = [(field, text, options[field].parse(text)) for field, text, _ in ACCEPTED]
    assert values == list(ACCEPTED)


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("a.html", ".html"),
        ("a.b.html", ".b.html"),
        (".b.html", ".html"),
        (".html", ""),
        ("Makefile", "Makefile"),
        ("a", ""),
    ],
)
def test_a_report_has_the_longest_ending_of_its_name(name: str, ending: str) -> None:
    assert report_ending(name, (".html", ".b.html", "Makefile", ".csv")) == ending


@pytest.mark.parametrize(
    ("options", "row", "flags", "required"),
    [
        ({"blocks": "1024GiB"}, "1099511627776 bytes a block, batch 1, depth 1", "blocks", 2 * (1 << 40) + 1024),
        (
            {"blocks": "1GiB", "batch": "1000,1", "depth": "1,4"},
            "1073741824 bytes a block, batch 1000, depth 4",
            "blocks, --nixl-batch, --nixl-depth",
            2 * (4000 << 30) + 4000 * 1024,
        ),
        (
            {"batch": "1000000", "ranks": "2"},
            "67108864 bytes a block, batch 1000000, depth 1",
            "batch",
            (1_000_000 << 26) + 1_000_000 * 1024,
        ),
        (
            {"batch": "1000000", "level": "quick"},
            "67108864 bytes a block, batch 1000000, depth 1",
            "batch",
            2 * (1_000_000 << 26) + 1_000_000 * 1024,
        ),
    ],
)
def test_a_row_that_does_not_fit_into_memory_is_refused_with_bytes_needed_and_available(
    configure: Configure, options: dict[str, str], row: str, flags: str, required: int
) -> None:
    with pytest.raises(pytest.UsageError) as refused:
        read_settings(configure(options), {})
    match = re.fullmatch(
        rf"the largest row \({row}\) needs \S+ \S+ \({required} bytes\) of host memory on this host, but \S+ \S+ "
        r"\(([0-9]+) bytes\) according to (MemAvailable|the limit of .*) are available: "
        f"expected smaller values of --nixl-{flags}",
        str(refused.value),
    )
    assert match is not None, refused.value
    assert 0 <= int(match[1]) < required


def test_an_option_names_a_parser_and_a_printer_of_the_type_of_its_setting() -> None:
    """They are named by a text, which mypy does not check."""
    for item in OPTIONS:
        parser = resolve_name(f"pytest_nixl.{item.parser}") if isinstance(item.parser, str) else None
        if "return" in getattr(parser, "__annotations__", ()):
            declared = Settings.__annotations__[item.field].removesuffix(" | None")
            assert parser.__annotations__["return"].removesuffix(" | None") == declared, item.field
        assert item.show(item.usual)


def test_a_separate_process_prints_the_same_message(pytester: pytest.Pytester) -> None:
    argument = f"--nixl-etcd=http://u:{SECRET}@h:1/"
    in_process, alone = (run_pytest(pytester, argument, in_process=where) for where in (True, False))
    assert sentence(in_process) == sentence(alone)
    assert in_process.outlines == alone.outlines == []


def test_a_switch_takes_no_value(pytester: pytest.Pytester) -> None:
    result = run_pytest(pytester, "--nixl-gate=maybe", in_process=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*error: argument --nixl-gate: ignored explicit argument 'maybe'"])


OTHER_ETCD = "--nixl-etcd names an existing etcd, but --nixl-etcd-server={} starts a new one: give only one of the two"
NEEDS = "--nixl-etcd-{0}=here.pem (option) cannot be used alone: expected --nixl-etcd-{1} FILE or ETCDCTL_{2} as well"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"etcd_server": "external"},
            "--nixl-etcd-server=external needs an endpoint: give --nixl-etcd URL or set NIXL_ETCD_ENDPOINTS",
        ),
        ({"etcd_server": "embedded", "etcd": "http://h:1"}, OTHER_ETCD.format("embedded")),
        ({"etcd_server": "container", "etcd": f"http://u:{SECRET}@h:1"}, OTHER_ETCD.format("container")),
        ({"etcd_cert": "here.pem"}, NEEDS.format("cert", "key", "KEY")),
        ({"etcd_key": "here.pem"}, NEEDS.format("key", "cert", "CERT")),
        ({"rank": "1"}, "--nixl-rank=1 is given without the number of ranks: expected --nixl-ranks N as well"),
        ({"rank": "2", "ranks": "2"}, "--nixl-rank=2 is not below --nixl-ranks=2: expected a rank from 0 to 1"),
        (
            {"memory": "DRAM:FILE,VRAM:OBJ"},
            "--nixl-backend=UCX moves bytes between two agents, but every target in --nixl-memory=DRAM:FILE,VRAM:OBJ "
            "is storage: expected a target of DRAM or VRAM, or --nixl-backend=POSIX",
        ),
        (
            {"kv_model": "llama-3-8b", "kv_tp": "3"},
            "--nixl-kv-tp=3: tensor-parallel size 3 does not split the 32 attention heads and 8 KV heads of llama-3-8b "
            "evenly: expected one of 1, 2, 4, 8, 16, 32",
        ),
        (
            {"kv_model": "deepseek-r1", "kv_tp": "1:3"},
            "--nixl-kv-tp=1:3: tensor-parallel size 3 does not split the 128 attention heads of deepseek-r1 evenly: "
            "expected one of 1, 2, 4, 8, 16, 32, 64, 128",
        ),
        (
            {"backend_params": "POSIX:use_aio=true"},
            "--nixl-backend-params=POSIX:use_aio=true is for a backend that is not requested by --nixl-backend=UCX: "
            "expected parameters of UCX only, or POSIX in --nixl-backend as well",
        ),
        (
            {"backend": "POSIX", "threads": "4"},
            "--nixl-threads=4 has no effect on --nixl-backend=POSIX: expected a backend with worker threads, UCX or "
            "LIBFABRIC",
        ),
        (
            {"baseline": "here.pem", "compare_image": "nixl:1 env A=1"},
            "--nixl-baseline compares with a recorded run and --nixl-compare-image with a run made now: give only one "
            "of the two",
        ),
        (
            {"baseline": "nixl:1"},
            "--nixl-baseline=nixl:1 is not an existing path, and an image is looked up in the store: expected "
            "--nixl-store DIR as well, or the path of a record (FILE.json), which the first run makes",
        ),
    ],
)
def test_contradicting_settings_are_refused(configure: Configure, options: dict[str, str], expected: str) -> None:
    with pytest.raises(pytest.UsageError) as refused:
        read_settings(configure(options), {})
    assert str(refused.value) == expected


EXPECT = '[profile]\nname = "own"\n[[expect]]\n'


@pytest.mark.parametrize(
    ("profile", "fault"),
    [
        (
            f'{EXPECT}floor = "1 MPH"\nsource = "test"',
            f"profile own.toml, expect #1, floor: '1 MPH' has the wrong unit 'MPH': expected {RATE_FORM}",
        ),
        (
            f'{EXPECT}flor = "1 GB/s"\nsource = "test"',
            "profile own.toml, expect #1, flor: unknown key (did you mean floor?): expected backend, op, memory, "
            "blocks, batch, depth, notify, pages, floor, ceiling, p50, p99, transports, raw, source",
        ),
        (
            f'{EXPECT}floor = "1 GB/s"',
            "profile own.toml, expect #1, source: missing: expected a text that says where each figure is from",
        ),
        (
            '[profile]\nname = "own\n',
            "profile own.toml is not TOML (… (at line 2, column 12)): expected a [profile] table with a name, "
            "a [required] table with checks, [[expect]], [[bound]] and [[accept]] tables",
        ),
    ],
)
def test_a_wrong_profile_is_refused_in_one_sentence(
    configure: Configure, files: Path, profile: str, fault: str
) -> None:
    (files / "own.toml").write_text(profile)
    with pytest.raises(pytest.UsageError) as refused:
        read_settings(configure({"profile": "own.toml"}), {})
    of_parser = re.sub(r"TOML \([^(]*", "TOML (… ", str(refused.value))
    assert of_parser == f"--nixl-profile: {fault}"


@pytest.mark.parametrize(
    ("arguments", "ini", "expected"),
    [
        (["--nixl-rank=1"], "", "--nixl-rank=1 is given without the number of ranks"),
        ([], "nixl_gate = maybe", "ini value nixl_gate: 'maybe' is neither yes nor no"),
        ([], f"nixl_etcd = http://u:{SECRET}@h:1/", "ini value nixl_etcd: etcd endpoint 'http://***@h:1/' ends with"),
        (["--nixl-blocks=4KiB"], "nixl_blocks = many", ""),
    ],
)
def test_a_run_is_refused_for_an_option_or_else_an_ini_value(
    pytester: pytest.Pytester, arguments: list[str], ini: str, expected: str
) -> None:
    pytester.makeini(f"[pytest]\n{ini}")
    result = run_pytest(pytester, *arguments, in_process=True)
    if expected:
        assert sentence(result).startswith(expected)
        assert result.outlines == []
    else:
        assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (
            {"NIXL_BACKEND": "banana"},
            "environment variable NIXL_BACKEND: 'banana' is not a supported backend: "
            "expected UCX, LIBFABRIC, POSIX, OBJ or AZURE_BLOB (any case), or a list of them",
        ),
        (
            {"ETCDCTL_CERT": __file__},
            f"--nixl-etcd-cert={__file__} (environment ETCDCTL_CERT) cannot be used alone: "
            "expected --nixl-etcd-key FILE or ETCDCTL_KEY as well",
        ),
        (
            {"ETCDCTL_USER": SECRET},
            "environment variable ETCDCTL_USER: the name or the password is missing (the value is not shown): "
            "expected NAME:PASSWORD",
        ),
    ],
)
def test_a_wrong_variable_ends_a_run_with_a_test_of_the_plugin_only(
    pytester: pytest.Pytester, env: dict[str, str], expected: str
) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = run_pytest(pytester, env=env, in_process=True)
    result.assert_outcomes(passed=1)
    assert (result.ret, result.errlines) == (pytest.ExitCode.OK, [])
    # The folder may be that of a user of this name.
    assert [line for line in result.outlines if "nixl" in line and not line.startswith("rootdir: ")] == []
    pytester.makepyfile("def test_it(nixl_settings): pass")
    result = run_pytest(pytester, env=env, in_process=True)
    assert sentence(result) == expected
    assert result.outlines[-1].strip("= ").startswith("no tests ran in")


def test_a_container_is_refused_before_tests_run_if_no_engine_answers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(nixl_etcd): raise AssertionError('it has run')")
    result = run_pytest(
        pytester,
        "--nixl-etcd-server=container",
        "--nixl-etcd-image=localhost/there/is:none",
        env={"DOCKER_HOST": "unix:///nonexistent.sock"},
        in_process=True,
    )
    expected = "--nixl-etcd-server=container: no container engine answers at unix:///nonexistent.sock: No such file"
    assert sentence(result) == expected
    result.stdout.no_fnmatch_line("*it has run*")


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
def test_flags_of_nixlbench_may_be_a_separate_word(value: str) -> None:
    arguments = ["suites", TAKES_FLAGS, value, "-x", f"{TAKES_FLAGS}={value}", "--", TAKES_FLAGS]
    join_flags(arguments)
    assert arguments == ["suites", f"{TAKES_FLAGS}={value}", "-x", f"{TAKES_FLAGS}={value}", "--", TAKES_FLAGS]


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "nothing"), (["--nixl-gate"], "'--nixl-gate'"), (["--verbose"], "'--verbose'")]
)
def test_missing_flags_of_nixlbench_are_a_usage_error(arguments: list[str], message: str) -> None:
    with pytest.raises(
        pytest.UsageError, match=f"^{TAKES_FLAGS} is followed by {message}: expected flags of nixlbench"
    ):
        join_flags([TAKES_FLAGS, *arguments])


def test_an_option_and_its_value_in_one_word_leave_the_root_directory_of_pytest(pytester: pytest.Pytester) -> None:
    """Pytest takes a directory after a space for a test path, as the page of the options says."""
    elsewhere = pytester.path / "elsewhere"
    elsewhere.mkdir()
    project = pytester.mkdir("project")
    (project / "test_it.py").write_text("def test_it(pytestconfig): print('root:', pytestconfig.rootpath)\n")
    (project / "pytest.ini").write_text("[pytest]\ntestpaths = .\n")
    pytester.chdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        result = run_pytest(pytester, "-s", f"--nixl-store={elsewhere}")
    result.stdout.fnmatch_lines([f"*root: {project}*"])
