# SPDX-License-Identifier: Apache-2.0
"""A wrong value of a setting ends pytest with a usage error of one sentence, whatever the value's source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name

import pytest
from helpers.etcd import engine_image
from helpers.pytester_run import run_pytest

from pytest_nixl.core.forms import BLOCKS_FORM, ENDPOINTS_FORM, KV_MODEL_FORM, RATE_FORM, SIZE_FORM, TIME_FORM
from pytest_nixl.judge.profiles import bundled_profiles
from pytest_nixl.model.settings import OPTIONS, Option, Settings
from pytest_nixl.session.options import TAKES_FLAGS, join_flags

SECRET = "hunter2"
LONG = "x" * 300

OURS = "def test_it(nixl_settings): pass"
NOT_OURS = "def test_it(): pass"


@dataclass(frozen=True)
class Wrong:
    """Wrong values of one setting, each with the expected message."""

    field: str
    form: str
    faults: Mapping[str, str]

    @property
    def flag(self) -> str:
        return f"--nixl-{self.field.replace('_', '-')}"


def _no_count(*values: str) -> dict[str, str]:
    return {value: f"{value!r} is not a positive integer" for value in values}


def _too_many(text: str, most: int) -> str:
    return f"{text} is more than the maximum of {most}"


#: Numbers that no worker has memory for, and numbers that Python itself refuses to convert.
HUGE, ENDLESS = "1" + 18 * "0", 5000 * "9"
TOO_LONG = {text: f"{text!r} is more than the maximum of 168 h" for text in ("1000000h", "169h")}


def _huge(most: int) -> dict[str, str]:
    return {
        HUGE: _too_many(HUGE, most),
        str(most + 1): _too_many(str(most + 1), most),
        ENDLESS: _too_many(f"{30 * '9'}… (5000 digits)", most),
    }


def _no_file(*values: str) -> dict[str, str]:
    return {value: f"there is no file {value!r}" for value in values}


#: The accepted form of each option in words.
FORMS = {item.field: item.form for item in OPTIONS}
COUNTS = "a positive integer, or a list of them"
PEM = "an existing PEM file"
PROFILE = f"{', '.join(bundled_profiles())}, or the path of a TOML file"

WRONG = (
    Wrong(
        "backend",
        "UCX, LIBFABRIC, POSIX, OBJ or AZURE_BLOB (any case), or a list of them",
        {
            "banana": "'banana' is not a supported backend",
            "expected": "'expected' is not a supported backend",
            "": "'' is not a supported backend",
            "UCX,": "'' is not a supported backend",
            "UCX,ucx": "UCX is named twice",
            "GDS": "'GDS' is not a supported backend: it needs a GPU, the nvidia-fs driver and a file "
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
                "etcd endpoint 'http://***@h:1' has one of / @ ? # in its user or password: write %2F %40 %3F %23"
            ),
            f"http://u:{SECRET},@h:1": (
                "etcd endpoint 1 of 2 is malformed (not shown, because the list contains a user or password; "
                "write a comma in a password as %2C)"
            ),
        },
    ),
    Wrong(
        "etcd_server",
        "auto | external | container | embedded",
        {
            "banana": "'banana' is not one of the choices",
            "expected": "'expected' is not one of the choices",
            "": "'' is not one of the choices",
        },
    ),
    Wrong(
        "etcd_image",
        "REPOSITORY[:TAG]",
        {
            "a b": "'a b' is not an image reference",
            " ": "' ' is not an image reference",
            "": "'' is not an image reference",
        },
    ),
    Wrong("etcd_cacert", PEM, _no_file("/nowhere/ca.pem", "/", LONG, "")),
    Wrong("etcd_cert", PEM, _no_file("/nowhere/cert.pem", LONG, "")),
    Wrong("etcd_key", PEM, _no_file("/nowhere/key.pem", LONG, "")),
    Wrong(
        "etcd_user",
        "NAME:PASSWORD",
        dict.fromkeys(
            (SECRET, f"{SECRET}:", f":{SECRET}", ":", ""),
            "the name or the password is missing (the value is not shown)",
        ),
    ),
    Wrong(
        "etcd_listen",
        "ADDR:PORT, such as 0.0.0.0:23790",
        {
            "": "'' names no port",
            "host": "'host' names no port",
            "host:": "'host:' names no port",
            "host:0": "'host:0' has the port 0, which is not between 1 and 65535",
            "host:http": "'host:http' has the port 'http', which is not a number",
            "256.0.0.1:80": "'256.0.0.1:80' has the host '256.0.0.1', which is not an IPv4 address",
        },
    ),
    Wrong("ranks", "a positive integer", _no_count("0", "-1", "two", "1.5", "")),
    Wrong("ranks", "a positive integer", {**_huge(65_536), "1000000000": _too_many("1000000000", 65_536)}),
    Wrong("batch", COUNTS, _huge(1_000_000)),
    Wrong("depth", COUNTS, _huge(65_536)),
    Wrong(
        "iterations",
        "a positive integer, or auto (1000 up to 1 MiB; above, at least 10 and 160 MiB)",
        _huge(100_000_000),
    ),
    Wrong("warmup", "a non-negative integer", _huge(100_000_000)),
    Wrong(
        "level", FORMS["level"], {value: f"{value!r} is not a level" for value in ("fast", "0", "4", "1,2", "", LONG)}
    ),
    Wrong("duration", TIME_FORM, TOO_LONG),
    Wrong("timeout", TIME_FORM, TOO_LONG),
    Wrong(
        "pattern",
        FORMS["pattern"],
        {"": "'' is not a pattern", "incst": "incst cannot be read: No such file or directory"},
    ),
    Wrong("join_timeout", TIME_FORM, TOO_LONG),
    Wrong("start_timeout", TIME_FORM, {**TOO_LONG, "0s": "'0s' is not above zero"}),
    Wrong(
        "rank",
        "a non-negative integer",
        {text: f"{text!r} is not a non-negative integer of at most 6 digits" for text in ("-1", "one", "1.5", "")},
    ),
    Wrong(
        "group",
        "1 to 64 letters, digits, . _ or -",
        {text: f"{text!r} is not a valid name" for text in ("", "a b", "a/b", "x" * 65)},
    ),
    Wrong("group_token", "a text that is not empty", {"": "the token is empty"}),
    Wrong(
        "pairs",
        FORMS["pairs"],
        {
            "": "'' is not a pair of ranks",
            "some": "'some' is not a pair of ranks",
            "0:1:2": "'0:1:2' is not a pair of ranks",
            "0:1,2": "'2' is not a pair of ranks",
            "1:1": "'1:1' pairs a rank with itself",
            "0:1,0:1": "0:1 is named twice",
        },
    ),
    Wrong(
        "lease",
        FORMS["lease"],
        {
            text: f"{text!r} is not a whole number of seconds from 2 to 3600"
            for text in ("0", "1s", "6.5", "2h", "3601")
        },
    ),
    Wrong("lease", TIME_FORM, {text: f"{text!r} is not a time" for text in ("", "-6", "long")}),
    Wrong("join_timeout", TIME_FORM, {"0s": "'0s' is not above zero", "banana": "'banana' is not a time"}),
    Wrong(
        "log_dir", "a directory, which is created if it does not exist", {"/dev/null": "'/dev/null' is not a directory"}
    ),
    Wrong(
        "op",
        "WRITE, READ or both separated by a comma",
        {
            "COPY": "'COPY' is not an operation",
            "write,copy": "'copy' is not an operation",
            "": "'' is not an operation",
            "READ,read": "READ is named twice",
        },
    ),
    Wrong(
        "memory",
        "a list of INITIATOR:TARGET with DRAM or VRAM, and FILE or OBJ as the target of a storage backend",
        {
            "DRAM": "'DRAM' is not a pair of memory types",
            "FILE:DRAM": "'FILE:DRAM' is not a pair of memory types",
            "DRAM:DISK": "'DRAM:DISK' is not a pair of memory types",
            "DRAM:VRAM:DRAM": "'DRAM:VRAM:DRAM' is not a pair of memory types",
            "": "'' is not a pair of memory types",
            "DRAM:DRAM,dram:dram": "DRAM:DRAM is named twice",
        },
    ),
    Wrong(
        "s3",
        "http://HOST[:PORT], https://HOST[:PORT], embedded, container, or container:IMAGE",
        {
            "minio:9000": "'minio:9000' is not the URL of an S3 server",
            "http://h/bucket": "'http://h/bucket' is not the URL of an S3 server",
            "http://h:x": "'http://h:x' is not the URL of an S3 server",
            f"http://me:{SECRET}@h": (
                "the URL has a user (not shown): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
            ),
            "": "'' is not the URL of an S3 server",
        },
    ),
    Wrong(
        "file_dir",
        "an existing directory",
        {value: f"there is no directory {value!r}" for value in ("/nowhere", "/etc/passwd", LONG, "")},
    ),
    Wrong(
        "blocks",
        SIZE_FORM,
        {
            "many": "'many' is not a size",
            "KiB": "'KiB' is not a size",
            "": "'' is not a size",
            "4KiB..": "'' is not a size",
            "-4KiB": "'-4KiB' is not a size",
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
    Wrong("batch", COUNTS, {**_no_count("0", "-1", "1.5", "two", ""), "1,": "'' is not a positive integer"}),
    Wrong("batch", COUNTS, {"1,2,1": "1 is named twice"}),
    Wrong("depth", COUNTS, {**_no_count("0", "-1", "1.5", "two", "³", ""), "2,2": "2 is named twice"}),
    Wrong(
        "kv_model",
        KV_MODEL_FORM,
        {
            "llama3-8b": "there is no model 'llama3-8b' (did you mean llama-3-8b or llama-3-70b?)",
            "Qwen/Qwen3-14B": "there is no file 'Qwen/Qwen3-14B' (did you mean qwen3-14b?)",
            "nowhere/config.json": "there is no file 'nowhere/config.json'",
            "": "there is no model ''",
            LONG: f"there is no model {LONG!r}",
            ".": "model config '.' is not a file",
            "/dev/null": "model config '/dev/null' is not a file",
            "/etc/passwd": "model config '/etc/passwd' cannot be used: it is not JSON ('Expecting value: line 1 "
            "column 1 (char 0)')",
        },
    ),
    Wrong("kv_tokens", "a positive integer", {**_no_count("0", "-1", "8k", ""), **_huge(16_777_216)}),
    Wrong("kv_block_tokens", "a positive integer", {**_no_count("0", "-1", "16,32", ""), **_huge(65_536)}),
    Wrong(
        "kv_tp",
        "a positive integer, or PREFILL:DECODE",
        {
            **_no_count("0", "-1", "two", ""),
            "1:": "'' is not a positive integer",
            "1:0": "'0' is not a positive integer",
            "1:2:4": "'2:4' is not a positive integer",
            **_huge(4096),
        },
    ),
    Wrong("kv_requests", "a positive integer", {**_no_count("0", "-1", "2,4", ""), **_huge(1024)}),
    Wrong(
        "footprint",
        "row, auto, or a size such as 1GiB",
        {value: f"{value!r} is neither row, auto nor a size" for value in ("", "cold", "0", "-1", "1.5B", "1 parsec")},
    ),
    Wrong(
        "notify", "each | last", {value: f"{value!r} is not one of the choices" for value in ("", "all", "each,last")}
    ),
    Wrong("pages", "huge | base", {value: f"{value!r} is not one of the choices" for value in ("", "2MiB", "auto")}),
    Wrong(
        "kv_rate",
        "auto, or a number of requests each second, such as 50/s",
        {
            **{text: f"{text!r} is not a number of requests each second" for text in ("fast", "-1", "1/m", "1e3", "")},
            **{text: f"{text!r} is not between 0.001/s and 1000000/s" for text in ("0", "0/s", "0.0001", "2000000/s")},
        },
    ),
    Wrong(
        "kv_dtype",
        "auto | bf16 | fp16 | fp32 | fp8 | int8",
        {
            "float": "'float' is not one of the choices",
            "BF16": "'BF16' is not one of the choices",
            "": "'' is not one of the choices",
        },
    ),
    Wrong(
        "agent",
        FORMS["agent"],
        {value: f"{value!r} is not one of the choices" for value in ("trtllm", "vLLM", "vllm,dynamo", "")},
    ),
    Wrong(
        "progress_thread",
        FORMS["progress_thread"],
        {
            **{value: f"{value!r} is neither auto, off nor on" for value in ("yes", "ON", "")},
            "on,": "'' is neither auto, off nor on",
            "on,on": "on is named twice",
            "auto,on": "'auto,on' has auto and another value",
        },
    ),
    Wrong(
        "threads",
        FORMS["threads"],
        {
            **{value: f"{value!r} is not a number of threads from 1 to 256" for value in ("0", "-1", "257", "1.5", "")},
            ENDLESS: f"{40 * '9'!r} is not a number of threads from 1 to 256",
            "8:257": "'257' is not a number of threads from 0 to 256",
            "8:": "'' is not a number of threads from 0 to 256",
            "0:0": "'0:0' does not give threads to one side or both",
            "1:2:3": "'1:2:3' does not give threads to one side or both",
        },
    ),
    Wrong(
        "sync_mode",
        FORMS["sync_mode"],
        {value: f"{value!r} is not one of the choices" for value in ("fast", "STRICT", "")},
    ),
    Wrong(
        "backend_params",
        FORMS["backend_params"],
        {
            "": "'' names no backend",
            "num_workers=4": "'num_workers=4' names no backend",
            ":num_workers=4": "':num_workers=4' names no backend",
            "UCX:num_workers": "'UCX:num_workers' has no value",
            "UCX:num_workers=": "'UCX:num_workers=' has no value",
            "UCX:num_workers=4,": "'' names no backend",
            "UCX:=4": "'' is not the name of a parameter",
            "UCX:a-b=4": "'a-b' is not the name of a parameter",
            "UCX:a=1,ucx:a=2": "UCX:a is named twice",
            "UXC:a=1": "'UXC' is not a supported backend",
            "UCX:a=b/c": "'b/c' has a space or a /, or over 200 characters, which a row key cannot hold",
            "AZURE_BLOB:connection_string=AccountName=a;AccountKey=Eby8vdM": (
                "connection_string may hold a secret, and parameters are recorded: "
                "set AZURE_STORAGE_CONNECTION_STRING instead"
            ),
            "OBJ:secret_key=Eby8vdM": (
                "secret_key may hold a secret, and parameters are recorded: set AWS_SECRET_ACCESS_KEY instead"
            ),
            "UCX:a=AccountKey=Eby8vdM": (
                "a may hold a secret, and parameters are recorded: give it by the backend's own variable"
            ),
        },
    ),
    Wrong(
        "iterations",
        "a positive integer, or auto (1000 up to 1 MiB; above, at least 10 and 160 MiB)",
        _no_count("0", "-1", "1.5", "two", "1,2", ""),
    ),
    Wrong(
        "warmup",
        "a non-negative integer",
        {value: f"{value!r} is not a non-negative integer" for value in ("-1", "1.5", "ten", "1,2", "")},
    ),
    Wrong(
        "duration",
        TIME_FORM,
        {
            "s": "'s' is not a time",
            "": "'' is not a time",
            "-1s": "'-1s' is not a time",
            "1fortnight": "'1fortnight' has the wrong unit 'fortnight'",
        },
    ),
    Wrong(
        "timeout",
        TIME_FORM,
        {
            "soon": "'soon' is not a time",
            "": "'' is not a time",
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
            ".": "profile '.' is not a file",
            "": "profile '' is not a file",
            LONG: f"profile {LONG!r} cannot be read (File name too long)",
        },
    ),
    Wrong(
        "devices",
        "INITIATOR:TARGET as GPU numbers, or auto",
        {
            "0": "'0' is not a pair of GPU numbers",
            "0:1:2": "'0:1:2' is not a pair of GPU numbers",
            "-1:0": "'-1:0' is not a pair of GPU numbers",
            "all": "'all' is not a pair of GPU numbers",
            "": "'' is not a pair of GPU numbers",
        },
    ),
    Wrong(
        "nixlbench",
        "the path of a program",
        {
            "nowhere": "'nowhere' is not an executable file",
            "/etc/passwd": "'/etc/passwd' is not an executable file",
            ".": "'.' is not an executable file",
            "": "'' is not an executable file",
        },
    ),
    Wrong(
        "nixlbench_runtime",
        "auto | ETCD | ASIO",
        {
            "MPI": "'MPI' is not one of the choices",
            "etcd": "'etcd' is not one of the choices",
            "": "'' is not one of the choices",
        },
    ),
    Wrong(
        "nixlbench_args",
        "flags of nixlbench as on its command line, such as '--mode=MG --num_initiator_dev=8 --num_target_dev=8'",
        {
            "MG": "'MG' is not a flag",
            "--mode MG SG": "'SG' is not a flag",
            "--mode='MG": '"--mode=\'MG" cannot be split into words (No closing quotation)',
            "--mode=MG --mode=SG": "--mode is given twice",
            "--backend=UCX": "--backend is set by the suite: use --nixl-backend instead",
            "-initiator_seg_type VRAM": "--initiator_seg_type is set by the suite: use --nixl-memory instead",
            "--benchmark_group=default": "--benchmark_group cannot be added: the suite makes a new group for each run",
            "--flagfile=/etc/passwd": "--flagfile cannot be added: give each flag by itself",
            "--num_initiator_dev=8": "without --mode=MG the 9 devices need one process each, but the suite starts two",
            "--mode=MG --num_target_dev=many": "--num_target_dev=many is not a number of devices",
        },
    ),
    Wrong(
        "raw_tools_dir",
        "an existing directory with one of ucx_perftest, fi_rma_bw",
        {
            "nowhere": "there is no directory 'nowhere'",
            "": "there is no directory ''",
            "/etc": "directory '/etc' has no executable raw tool",
        },
    ),
    Wrong("image", "REPOSITORY[:TAG][@DIGEST]", {"a b": "'a b' is not an image reference"}),
    Wrong(
        "baseline",
        "an existing file or directory, or else an image of the store",
        {"a b": "'a b' is not an image reference", "": "'' is not an image reference"},
    ),
    Wrong(
        "compare_image",
        "an image and then the command that its workers are started with, such as 'IMAGE env UCX_TLS=tcp'",
        {
            "image:1": "'image:1' has no command after the image",
            "": "'' has no command after the image",
            "image:1 'env": '"image:1 \'env" is not a command (No closing quotation)',
            "'a b' env A=1": "'a b' is not an image reference",
        },
    ),
    Wrong(
        "max_regression",
        "a percentage, such as 5%",
        {
            "5": "'5' is not a percentage",
            "five%": "'five%' is not a percentage",
            "-5%": "'-5%' is not a percentage",
            "0%": "'0%' is not between 0 % and 100 %",
            "100%": "'100%' is not between 0 % and 100 %",
        },
    ),
    Wrong(
        "min_launches",
        "an integer from 1 to 7, or auto (1; 5 if runs are compared)",
        {**_no_count("0", "-1", "1.5", "many", ""), "8": _too_many("8", 7)},
    ),
    Wrong(
        "store",
        "a directory, which is created if it does not exist",
        {"/etc/passwd": "'/etc/passwd' is not a directory"},
    ),
    Wrong(
        "report",
        "paths whose directories are created if needed, ending with .html, .csv, .prom, .json",
        {
            "report": "'report' does not end with one of .html, .csv, .prom, .json",
            "a.html,a.html": "a.html is named twice",
            "/etc/passwd/a.csv": "'/etc/passwd/a.csv' cannot be written, because '/etc/passwd' is not a directory",
        },
    ),
)


WRONG_VALUES = [
    pytest.param(wrong, value, fault, id=f"{wrong.field}-{'long' if value == LONG else value[:40] or 'empty'}")
    for wrong in WRONG
    for value, fault in wrong.faults.items()
]


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


@pytest.mark.parametrize(("wrong", "value", "fault"), WRONG_VALUES)
def test_a_wrong_value_is_refused_with_its_fault_and_the_accepted_form(wrong: Wrong, value: str, fault: str) -> None:
    [item] = [item for item in OPTIONS if item.field == wrong.field]
    with pytest.raises(ValueError) as refused:
        item.parse(value)
    reason, _, form = str(refused.value).partition(": expected ")
    assert (reason, form or item.form) == (fault, wrong.form)
    assert SECRET not in reason


@pytest.mark.parametrize(
    ("arguments", "row", "required"),
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
def test_a_row_that_does_not_fit_into_memory_is_refused_with_bytes_needed_and_available(
    pytester: pytest.Pytester, arguments: tuple[str, ...], row: str, required: int
) -> None:
    message = sentence(run_pytest(pytester, *arguments, in_process=True))
    assert message.startswith(f"the largest row ({row}) needs ")
    assert f"({required} bytes) of host memory on this host, but " in message
    match = re.search(
        r"but \S+ \S+ \(([0-9]+) bytes\) according to (MemAvailable|the limit of .*) are available", message
    )
    assert match is not None, message
    assert 0 <= int(match[1]) < required


def test_a_row_that_fits_is_not_refused(pytester: pytest.Pytester) -> None:
    result = run_pytest(pytester, "--nixl-blocks=1MiB", "--nixl-batch=2", "--nixl-depth=2", in_process=True)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize(
    "item", [item for item in OPTIONS if isinstance(item.parser, str)], ids=lambda item: item.field
)
def test_an_option_names_a_parser_and_a_printer_of_the_type_of_its_setting(item: Option) -> None:
    """They are named by a text, which mypy does not check."""
    declared = Settings.__annotations__[item.field].removesuffix(" | None")
    parser = resolve_name(f"pytest_nixl.{item.parser}")
    if "return" in getattr(parser, "__annotations__", ()):
        assert parser.__annotations__["return"].removesuffix(" | None") == declared
    assert item.show(item.usual)


def test_every_option_has_a_wrong_value_in_this_file() -> None:
    assert {wrong.field for wrong in WRONG} | {"gate", "keep_going"} == {item.field for item in OPTIONS}


@pytest.mark.parametrize(
    "argument", ["--nixl-backend=banana", f"--nixl-etcd=http://u:{SECRET}@h:1/", "--nixl-blocks=8KiB..4KiB"]
)
def test_a_separate_process_prints_the_same_message(pytester: pytest.Pytester, argument: str) -> None:
    in_process, alone = (run_pytest(pytester, argument, in_process=where) for where in (True, False))
    assert sentence(in_process) == sentence(alone)
    assert in_process.outlines == alone.outlines == []


def test_a_switch_takes_no_value(pytester: pytest.Pytester) -> None:
    result = run_pytest(pytester, "--nixl-gate=maybe", in_process=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*error: argument --nixl-gate: ignored explicit argument 'maybe'"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            ("--nixl-etcd-server=external",),
            "--nixl-etcd-server=external needs an endpoint: give --nixl-etcd URL or set NIXL_ETCD_ENDPOINTS",
            id="external-without-address",
        ),
        pytest.param(
            ("--nixl-etcd-server=embedded", "--nixl-etcd=http://h:1"),
            "--nixl-etcd names an existing etcd, but --nixl-etcd-server=embedded starts a new one: give only one of "
            "the two",
            id="embedded-with-address",
        ),
        pytest.param(
            ("--nixl-etcd-server=container", f"--nixl-etcd=http://u:{SECRET}@h:1"),
            "--nixl-etcd names an existing etcd, but --nixl-etcd-server=container starts a new one: give only one of "
            "the two",
            id="container-with-address",
        ),
        pytest.param(
            ("--nixl-etcd-cert=here.pem",),
            "--nixl-etcd-cert=here.pem (option) cannot be used alone: "
            "expected --nixl-etcd-key FILE or ETCDCTL_KEY as well",
            id="cert-without-key",
        ),
        pytest.param(
            ("--nixl-etcd-key=here.pem",),
            "--nixl-etcd-key=here.pem (option) cannot be used alone: "
            "expected --nixl-etcd-cert FILE or ETCDCTL_CERT as well",
            id="key-without-cert",
        ),
        pytest.param(
            ("--nixl-kv-model=llama-3-8b", "--nixl-kv-tp=3"),
            "--nixl-kv-tp=3: tensor-parallel size 3 does not split the 32 attention heads and 8 KV heads of llama-3-8b "
            "evenly: expected one of 1, 2, 4, 8, 16, 32",
            id="tp-that-does-not-split-the-heads",
        ),
        pytest.param(
            ("--nixl-kv-model=deepseek-r1", "--nixl-kv-tp=1:3"),
            "--nixl-kv-tp=1:3: tensor-parallel size 3 does not split the 128 attention heads of deepseek-r1 evenly: "
            "expected one of 1, 2, 4, 8, 16, 32, 64, 128",
            id="tp-that-does-not-split-the-heads-of-decode",
        ),
        pytest.param(
            ("--nixl-backend-params=POSIX:use_aio=true",),
            "--nixl-backend-params=POSIX:use_aio=true is for a backend that is not requested by --nixl-backend=UCX: "
            "expected parameters of UCX only, or POSIX in --nixl-backend as well",
            id="parameters-of-another-backend",
        ),
        pytest.param(
            ("--nixl-backend-params=UCX:num_threads=4",),
            "--nixl-backend-params: 'UCX:num_threads=4' is set by another option: expected --nixl-threads=N",
            id="threads-as-a-parameter",
        ),
        pytest.param(
            ("--nixl-backend=POSIX", "--nixl-threads=4"),
            "--nixl-threads=4 has no effect on --nixl-backend=POSIX: expected a backend with worker threads, UCX or "
            "LIBFABRIC",
            id="threads-without-a-backend-that-has-them",
        ),
        pytest.param(
            ("--nixl-baseline=here.pem", "--nixl-compare-image=nixl:1 env A=1"),
            "--nixl-baseline compares with a recorded run and --nixl-compare-image with a run made now: give only "
            "one of the two",
            id="baseline-and-against",
        ),
        pytest.param(
            ("--nixl-baseline=nixl:1",),
            "--nixl-baseline=nixl:1 is not an existing path, and an image is looked up in the store: expected "
            "--nixl-store DIR as well, or the path of a record (FILE.json), which the first run makes",
            id="image-without-store",
        ),
    ],
)
def test_contradicting_settings_are_refused(
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
            "blocks, batch, depth, notify, pages, floor, ceiling, p50, p99, transports, raw, source",
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
    message = sentence(result)
    assert message.startswith("--nixl-profile: profile own.toml is not TOML (")
    assert "(at line 2, column 12)" in message
    assert ": expected a [profile] table with a name" in message


@pytest.mark.parametrize(
    ("wrong", "value", "in_ini"),
    [
        pytest.param(
            wrong, next(value for value in wrong.faults if value), bool(number % 2), id=f"{wrong.field}-{number}"
        )
        for number, wrong in enumerate(WRONG)
        if any(wrong.faults)
    ],
)
def test_a_wrong_option_or_ini_value_is_refused_in_one_sentence(
    pytester: pytest.Pytester, wrong: Wrong, value: str, in_ini: bool
) -> None:
    if in_ini:
        pytester.makeini(f"[pytest]\nnixl_{wrong.field} = {value}")
    result = run_pytest(pytester, *([] if in_ini else [f"{wrong.flag}={value}"]), in_process=True)
    source = f"ini value nixl_{wrong.field}" if in_ini else wrong.flag
    assert sentence(result) == f"{source}: {wrong.faults[value]}: expected {wrong.form}"
    assert result.outlines == []


def test_a_wrong_switch_in_an_ini_file_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nnixl_gate = maybe")
    expected = "ini value nixl_gate: 'maybe' is neither yes nor no: expected yes or no"
    assert sentence(run_pytest(pytester, in_process=True)) == expected


def test_an_option_overrides_a_wrong_ini_value(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nnixl_blocks = many")
    assert run_pytest(pytester, "--nixl-blocks=4KiB", in_process=True).ret == pytest.ExitCode.NO_TESTS_COLLECTED


ENVIRONMENTS = [
    pytest.param(
        {"NIXL_BACKEND": "banana"},
        "environment variable NIXL_BACKEND: 'banana' is not a supported backend: "
        "expected UCX, LIBFABRIC, POSIX, OBJ or AZURE_BLOB (any case), or a list of them",
        id="NIXL_BACKEND",
    ),
    pytest.param(
        {"ETCDCTL_CACERT": "/nowhere"},
        "environment variable ETCDCTL_CACERT: there is no file '/nowhere': expected an existing PEM file",
        id="ETCDCTL_CACERT",
    ),
    pytest.param(
        {"ETCDCTL_CERT": __file__},
        f"--nixl-etcd-cert={__file__} (environment ETCDCTL_CERT) cannot be used alone: "
        "expected --nixl-etcd-key FILE or ETCDCTL_KEY as well",
        id="ETCDCTL_CERT",
    ),
    pytest.param(
        {"ETCDCTL_USER": SECRET},
        "environment variable ETCDCTL_USER: the name or the password is missing (the value is not shown): "
        "expected NAME:PASSWORD",
        id="ETCDCTL_USER",
    ),
]


@pytest.mark.parametrize(("env", "expected"), ENVIRONMENTS)
def test_a_wrong_variable_ends_a_run_with_a_test_of_the_plugin(
    pytester: pytest.Pytester, env: dict[str, str], expected: str
) -> None:
    pytester.makepyfile(OURS)
    result = run_pytest(pytester, env=env, in_process=True)
    assert sentence(result) == expected
    assert result.outlines[-1].strip("= ").startswith("no tests ran in")


@pytest.mark.parametrize(("env", "expected"), ENVIRONMENTS)
def test_a_wrong_variable_does_not_affect_a_run_without_tests_of_the_plugin(
    pytester: pytest.Pytester, env: dict[str, str], expected: str
) -> None:
    pytester.makepyfile(NOT_OURS)
    result = run_pytest(pytester, env=env, in_process=True)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1)
    assert result.errlines == []
    # The folder may be that of a user of this name.
    assert [line for line in result.outlines if "nixl" in line and not line.startswith("rootdir: ")] == []
    result.stdout.no_fnmatch_line(f"*{expected}*")


USES_ETCD = "def test_it(nixl_etcd): raise AssertionError('it has run')"


def test_a_container_is_refused_before_tests_run_if_no_engine_answers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(USES_ETCD)
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


def test_a_missing_image_is_refused_before_tests_run(pytester: pytest.Pytester) -> None:
    engine_image()
    pytester.makepyfile(USES_ETCD)
    image = "--nixl-etcd-image=registry.invalid/etcd:v0"
    result = run_pytest(pytester, "--nixl-etcd-server=container", image)
    expected = "--nixl-etcd-server=container: the image registry.invalid/etcd:v0 is not on this host"
    assert sentence(result).startswith(expected)
    result.stdout.no_fnmatch_line("*it has run*")


def test_an_engine_is_not_contacted_if_no_test_needs_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(OURS)
    env = {"DOCKER_HOST": "unix:///nonexistent.sock"}
    run_pytest(pytester, "--nixl-etcd-server=container", env=env, in_process=True).assert_outcomes(passed=1)


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
