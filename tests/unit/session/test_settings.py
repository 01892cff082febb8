# SPDX-License-Identifier: Apache-2.0
"""Reading of settings: an option wins over an ini value, an ini value over the environment; each has its source."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from helpers.pytester_run import parse_config

from pytest_nixl.model.agent_options import AgentOptions, BackendParameter, ThreadCounts
from pytest_nixl.model.kv_cache import GENERIC, KV_MODELS
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.settings import DEFAULT_ETCD_IMAGE, OPTIONS, AlternateImage, Settings
from pytest_nixl.model.traffic_pattern import PatternChoice, RankPairing
from pytest_nixl.session.given_options import given_options, printable_error
from pytest_nixl.session.settings import read_settings, setting_lines

SECRET = "hunter2"
KIB, MIB = 1 << 10, 1 << 20

#: For each setting a text that is not its default, and what is read from it. ``here.pem`` exists in each test.
TEXTS: dict[str, tuple[str, object]] = {
    "backend": ("ucx", ("UCX",)),
    "etcd": ("http://h:1,https://g:2", "http://h:1,https://g:2"),
    "etcd_server": ("external", "external"),
    "etcd_image": ("localhost/etcd:v3.5.1", "localhost/etcd:v3.5.1"),
    "etcd_cacert": ("here.pem", "here.pem"),
    "etcd_cert": ("here.pem", "here.pem"),
    "etcd_key": ("here.pem", "here.pem"),
    "etcd_user": ("root:pass:word", "root:pass:word"),
    "etcd_listen": (":12379", "0.0.0.0:12379"),
    "ranks": ("8", 8),
    "rank": ("3", 3),
    "group": ("nightly-1.2_a", "nightly-1.2_a"),
    "group_token": ("of us", "of us"),
    "pairs": ("0:1, 3:2", RankPairing("", ((0, 1), (3, 2)))),
    "pattern": ("incast:8", PatternChoice("incast:8", "incast", 8)),
    "join_timeout": ("1h", 3600.0),
    "lease": ("1.5 min", 90),
    "log_dir": ("logs", "logs"),
    "op": ("read, Write", ("READ", "WRITE")),
    "memory": ("dram:vram, VRAM:VRAM", (MemoryPair("DRAM", "VRAM"), MemoryPair("VRAM", "VRAM"))),
    "devices": ("0:1", DevicePair(0, 1)),
    "file_dir": ("/", "/"),
    "s3": ("http://h:1/", "http://h:1"),
    "blocks": ("1KiB..4KiB", (KIB, 2 * KIB, 4 * KIB)),
    "batch": ("4, 1", (4, 1)),
    "depth": ("2,8", (2, 8)),
    "footprint": ("64MiB", 65536 * KIB),
    "notify": ("each", "each"),
    "pages": ("base", "base"),
    "kv_model": ("Qwen3-8B", KV_MODELS["qwen3-8b"]),
    "kv_tokens": ("100", 100),
    "kv_tp": ("2:4", (2, 4)),
    "kv_requests": ("4", 4),
    "kv_rate": (" 12.5/s ", 12.5),
    "kv_block_tokens": ("64", 64),
    "kv_dtype": ("fp8", "fp8"),
    "iterations": ("7", 7),
    "warmup": ("0", 0),
    "duration": ("250ms", 0.25),
    "timeout": ("2min", 120.0),
    "start_timeout": ("10min", 600.0),
    "profile": ("own.toml", "own.toml"),
    "nixlbench": ("/bin/sh", "/bin/sh"),
    "nixlbench_runtime": ("ASIO", "ASIO"),
    "nixlbench_args": ("-mode MG --check_consistency", ("--mode=MG", "--check_consistency")),
    "raw_tools_dir": ("raw", "raw"),
    "level": ("3", "extended"),
    "gate": ("yes", True),
    "keep_going": ("yes", True),
    "image": ("registry/nixl:2", "registry/nixl:2"),
    "baseline": ("here.pem", "here.pem"),
    "compare_image": ("nixl:1 env UCX_TLS=tcp 'A=b c'", AlternateImage("nixl:1", ("env", "UCX_TLS=tcp", "A=b c"))),
    "max_regression": ("2.5 %", 0.025),
    "min_launches": ("7", 7),
    "store": ("runs", "runs"),
    "report": ("a.html,b.csv", ("a.html", "b.csv")),
    "agent": ("sglang", "sglang"),
    "progress_thread": ("off, on", ("off", "on")),
    "threads": ("8:0", ThreadCounts(8, 0)),
    "sync_mode": ("rw", "rw"),
    "backend_params": (
        "ucx:num_workers=4,UCX:a=1",
        (BackendParameter("UCX", "a", "1"), BackendParameter("UCX", "num_workers", "4")),
    ),
}

#: What is on or off, and takes no value on the command line.
SWITCHES = tuple(item.field for item in OPTIONS if item.switch)

DEFAULTS: dict[str, object] = {
    "backend": ("UCX",),
    "etcd": "",
    "etcd_server": "auto",
    "etcd_image": DEFAULT_ETCD_IMAGE,
    "etcd_cacert": "",
    "etcd_cert": "",
    "etcd_key": "",
    "etcd_user": "",
    "etcd_listen": "",
    "ranks": None,
    "rank": None,
    "group": "",
    "group_token": "",
    "pairs": RankPairing("ring"),
    "pattern": None,
    "join_timeout": 300.0,
    "lease": 6,
    "log_dir": "",
    "op": ("WRITE", "READ"),
    "memory": (MemoryPair("DRAM", "DRAM"),),
    "devices": None,
    "file_dir": "",
    "s3": "",
    "blocks": tuple(4 * KIB << step for step in range(15)),
    "batch": (1,),
    "depth": (1,),
    "footprint": None,
    "notify": "last",
    "pages": "huge",
    "kv_model": GENERIC,
    "kv_tokens": 1024,
    "kv_tp": (1, 1),
    "kv_requests": 1,
    "kv_rate": None,
    "kv_block_tokens": 16,
    "kv_dtype": None,
    "iterations": None,
    "warmup": 10,
    "duration": 0.07,
    "timeout": 60.0,
    "start_timeout": 180.0,
    "profile": "loopback",
    "nixlbench": "",
    "nixlbench_runtime": "auto",
    "nixlbench_args": (),
    "raw_tools_dir": "",
    "level": "standard",
    "gate": False,
    "keep_going": False,
    "image": "",
    "baseline": "",
    "compare_image": None,
    "max_regression": 0.05,
    "min_launches": None,
    "store": "",
    "report": (),
    "agent": "default",
    "progress_thread": ("auto",),
    "threads": None,
    "sync_mode": "auto",
    "backend_params": (),
}

#: What has to be given beside a setting, so that it is accepted.
BESIDE = {
    "etcd_server": {"etcd": "http://h:1"},
    "etcd_cert": {"etcd_key": "here.pem"},
    "etcd_key": {"etcd_cert": "here.pem"},
    "rank": {"ranks": "8"},
}
#: What cannot be given beside each other.
APART = ("compare_image",)

EVERY_TEXT = pytest.mark.parametrize("name", TEXTS)


@pytest.fixture(autouse=True)
def files(pytester: pytest.Pytester) -> None:
    """Create the files that the settings of this file name."""
    pytester.path.joinpath("here.pem").touch()
    pytester.mkdir("raw").joinpath("ucx_perftest").touch(0o755)
    pytester.path.joinpath("own.toml").write_text('[profile]\nname = "own"\n')


def configure(
    pytester: pytest.Pytester, options: Mapping[str, str] | None = None, ini: Mapping[str, str] | None = None
) -> pytest.Config:
    """Return pytest's configuration with these options on the command line and these values in an ini file."""
    pytester.makeini("\n".join(["[pytest]", *(f"nixl_{name} = {text}" for name, text in (ini or {}).items())]))
    flags = {item.field: item.flag for item in OPTIONS}
    typed = [flags[name] if name in SWITCHES else f"{flags[name]}={text}" for name, text in (options or {}).items()]
    return parse_config(pytester, *typed)


def read(
    pytester: pytest.Pytester,
    options: Mapping[str, str] | None = None,
    ini: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    return read_settings(configure(pytester, options, ini), environ or {})


def test_every_setting_has_a_text_in_this_file() -> None:
    names = {item.field for item in OPTIONS}
    assert set(TEXTS) == set(DEFAULTS) == names
    assert names == {item.name for item in fields(Settings)} - {"sources", "ignored"}
    assert all(TEXTS[name][1] != DEFAULTS[name] for name in names - {"backend"})  # there is only one backend


def test_defaults(pytester: pytest.Pytester) -> None:
    settings = read(pytester)
    assert {name: getattr(settings, name) for name in DEFAULTS} == DEFAULTS
    assert set(settings.sources.values()) == {"default"}
    assert settings.ignored == ()


@EVERY_TEXT
def test_every_setting_is_an_ini_value(pytester: pytest.Pytester, name: str) -> None:
    text, value = TEXTS[name]
    settings = read(pytester, ini={name: text, **BESIDE.get(name, {})})
    assert (getattr(settings, name), settings.sources[name]) == (value, "ini")


@pytest.mark.parametrize(
    ("engine", "agent"),
    [
        ("vllm", AgentOptions(True, ThreadCounts(4, 4), telemetry=True)),
        ("dynamo", AgentOptions(True)),
        ("sglang", AgentOptions(True, ThreadCounts(8, 0), "strict")),
        ("default", AgentOptions()),
    ],
)
def test_agents_are_created_as_an_engine_does(pytester: pytest.Pytester, engine: str, agent: AgentOptions) -> None:
    settings = read(pytester, {"agent": engine})
    assert settings.agents == (agent,)
    imitated = {name for name, source in settings.sources.items() if source == f"--nixl-agent={engine}"}
    assert ("progress_thread" in imitated, "threads" in imitated, "sync_mode" in imitated) == (
        agent.progress_thread is True, agent.threads is not None, agent.sync_mode != "auto",
    )  # fmt: skip


def test_an_option_and_an_ini_value_win_over_the_engine(pytester: pytest.Pytester) -> None:
    options = {"agent": "sglang", "progress_thread": "off,on", "threads": "none"}
    settings = read(pytester, options, {"sync_mode": "rw"})
    assert settings.agents == (AgentOptions(False, None, "rw"), AgentOptions(True, None, "rw"))


def test_an_engine_gives_no_threads_to_libfabric(pytester: pytest.Pytester) -> None:
    for engine in ("vllm", "sglang"):
        assert read(pytester, {"agent": engine, "backend": "LIBFABRIC"}).threads is None


def test_the_level_quick_measures_three_sizes_unless_others_are_given(pytester: pytest.Pytester) -> None:
    quick = read(pytester, {"level": "quick"})
    assert quick.blocks == (4 * KIB, 1024 * KIB, 65536 * KIB)
    assert quick.sources["blocks"] == "default: three sizes at --nixl-level=quick"
    assert read(pytester, {"level": "quick", "blocks": "2KiB"}).blocks == (2 * KIB,)
    assert read(pytester, {"level": "1"}, {"blocks": "2KiB"}).blocks == (2 * KIB,)
    assert read(pytester, {"level": "extended"}).blocks == DEFAULTS["blocks"]


@EVERY_TEXT
def test_every_setting_is_an_option_that_wins_over_an_ini_value(pytester: pytest.Pytester, name: str) -> None:
    text, value = TEXTS[name]
    ini = "no" if name in SWITCHES else "worthless: it is not even read"
    settings = read(pytester, {name: text, **BESIDE.get(name, {})}, {name: ini})
    assert (getattr(settings, name), settings.sources[name]) == (value, "option")


@pytest.mark.parametrize(
    ("name", "variable"), [(item.field, variable) for item in OPTIONS for variable in item.environment]
)
def test_an_ini_value_wins_over_the_environment_and_that_over_the_default(
    pytester: pytest.Pytester, name: str, variable: str
) -> None:
    text, value = TEXTS[name]
    companions = BESIDE.get(name, {})
    settings = read(pytester, companions, environ={variable: text})
    assert (getattr(settings, name), settings.sources[name]) == (value, f"environment {variable}")
    assert settings.ignored == ()
    settings = read(pytester, companions, {name: text}, {variable: "worthless: it is not even read"})
    assert (getattr(settings, name), settings.sources[name]) == (value, "ini")
    [ignored] = settings.ignored
    assert ignored.startswith(f"{variable}=")
    assert ignored.endswith(f" is set and ignored: --nixl-{name.replace('_', '-')} comes from ini")


def test_which_variables_are_read() -> None:
    assert {item.field: item.environment for item in OPTIONS if item.environment} == {
        "backend": ("NIXL_BACKEND",),
        "etcd": ("NIXL_ETCD_ENDPOINTS", "ETCD_ENDPOINTS"),
        "etcd_cacert": ("ETCDCTL_CACERT",),
        "etcd_cert": ("ETCDCTL_CERT",),
        "etcd_key": ("ETCDCTL_KEY",),
        "etcd_user": ("ETCDCTL_USER",),
        "group_token": ("NIXL_GROUP_TOKEN",),
        "image": ("NIXL_IMAGE",),
    }


@pytest.mark.parametrize("variable", ["NIXL_BACKEND", "NIXL_ETCD_ENDPOINTS", "NIXL_TARGET_SEG_TYPE", "ETCDCTL_USER"])
def test_an_empty_variable_counts_as_not_set(pytester: pytest.Pytester, variable: str) -> None:
    settings = read(pytester, environ={variable: ""})
    assert set(settings.sources.values()) == {"default"}
    assert settings.ignored == ()


def test_the_process_environment_is_read(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_ETCD_ENDPOINTS", "http://from.the.process:1")
    assert read_settings(configure(pytester)).etcd == "http://from.the.process:1"


@pytest.mark.parametrize("variable", ["NIXL_ETCD_ENDPOINTS", "ETCD_ENDPOINTS"])
@pytest.mark.parametrize("text", ["http://h:1/", "no address at all", "h:1,,h:2"])
def test_malformed_endpoints_of_the_deployment_are_accepted(
    pytester: pytest.Pytester, variable: str, text: str
) -> None:
    settings = read(pytester, environ={variable: text})
    assert settings.etcd == text


@pytest.mark.parametrize("how", ["options", "ini"])
def test_an_etcd_given_by_option_or_ini_is_not_the_deployments(pytester: pytest.Pytester, how: str) -> None:
    options: dict[str, Any] = {how: {"etcd": "http://h:1"}}
    settings = read(pytester, **options)
    assert settings.etcd == "http://h:1"


def test_the_second_of_two_variables_is_reported_as_ignored(pytester: pytest.Pytester) -> None:
    settings = read(
        pytester,
        environ={"NIXL_ETCD_ENDPOINTS": "http://first:1", "ETCD_ENDPOINTS": f"http://u:{SECRET}@second:2"},
    )
    assert settings.etcd == "http://first:1"
    assert settings.ignored == (
        "ETCD_ENDPOINTS=http://***@second:2 is set and ignored: --nixl-etcd comes from environment NIXL_ETCD_ENDPOINTS",
    )


def test_variables_that_an_option_overrides_are_reported_as_ignored(pytester: pytest.Pytester) -> None:
    settings = read(
        pytester,
        {"etcd": "http://typed:1", "etcd_user": "root:typed", "backend": "UCX"},
        environ={
            "NIXL_ETCD_ENDPOINTS": "http://first:1",
            "ETCD_ENDPOINTS": "http://second:2",
            "ETCDCTL_USER": f"root:{SECRET}",
            "NIXL_BACKEND": "banana",
        },
    )
    assert settings.ignored == (
        "NIXL_BACKEND=banana is set and ignored: --nixl-backend comes from option",
        "NIXL_ETCD_ENDPOINTS=http://first:1 is set and ignored: --nixl-etcd comes from option",
        "ETCD_ENDPOINTS=http://second:2 is set and ignored: --nixl-etcd comes from option",
        "ETCDCTL_USER=*** is set and ignored: --nixl-etcd-user comes from option",
    )


@pytest.mark.parametrize("text", ["DRAM", "VRAM", "vram"])
def test_a_variable_sets_the_targets_memory(pytester: pytest.Pytester, text: str) -> None:
    settings = read(pytester, environ={"NIXL_TARGET_SEG_TYPE": text})
    assert settings.memory == (MemoryPair("DRAM", text.upper()),)
    assert settings.sources["memory"] == "environment NIXL_TARGET_SEG_TYPE"
    assert settings.ignored == ()


def test_an_unknown_memory_of_the_target_is_reported_as_ignored(pytester: pytest.Pytester) -> None:
    settings = read(pytester, environ={"NIXL_TARGET_SEG_TYPE": "RDMA"})
    assert settings.memory == (MemoryPair("DRAM", "DRAM"),)
    assert settings.sources["memory"] == "default"
    assert settings.ignored == ("NIXL_TARGET_SEG_TYPE=RDMA is set and ignored: it is neither DRAM nor VRAM",)


@pytest.mark.parametrize(("how", "source"), [("options", "option"), ("ini", "ini")])
def test_the_targets_memory_is_reported_as_ignored_if_the_memory_is_given(
    pytester: pytest.Pytester, how: str, source: str
) -> None:
    options: dict[str, Any] = {how: {"memory": "DRAM:DRAM"}}
    settings = read(pytester, **options, environ={"NIXL_TARGET_SEG_TYPE": "VRAM"})
    assert settings.memory == (MemoryPair("DRAM", "DRAM"),)
    assert settings.ignored == (f"NIXL_TARGET_SEG_TYPE=VRAM is set and ignored: --nixl-memory is given ({source})",)


def test_another_worker_type_is_reported_as_ignored(pytester: pytest.Pytester) -> None:
    expected = "NIXL_WORKER_TYPE=native is set and ignored: transfers are always made by NIXL"
    assert read(pytester, environ={"NIXL_WORKER_TYPE": "native"}).ignored == (expected,)
    assert read(pytester, environ={"NIXL_WORKER_TYPE": "NIXL"}).ignored == ()


@pytest.mark.parametrize("how", ["options", "ini", "environ"])
def test_no_secret_is_shown(pytester: pytest.Pytester, how: str) -> None:
    secrets = {"etcd": f"http://root:{SECRET}@h:1,http://root:{SECRET}@g:1", "etcd_user": f"root:{SECRET}"}
    variables = {"NIXL_ETCD_ENDPOINTS": secrets["etcd"], "ETCDCTL_USER": secrets["etcd_user"]}
    options: dict[str, Any] = {how: variables if how == "environ" else secrets}
    settings = read(pytester, **options)
    assert settings.etcd_user == f"root:{SECRET}"
    lines = list(setting_lines(settings))
    source = {"options": "option", "ini": "ini"}.get(how)
    assert f"--nixl-etcd=http://***@h:1,http://***@g:1 ({source or 'environment NIXL_ETCD_ENDPOINTS'})" in lines
    assert f"--nixl-etcd-user=*** ({source or 'environment ETCDCTL_USER'})" in lines
    assert SECRET not in "\n".join(lines)
    assert SECRET not in repr(settings)
    assert SECRET not in str(settings)


def test_a_malformed_address_of_the_deployment_shows_no_password(pytester: pytest.Pytester) -> None:
    settings = read(pytester, environ={"NIXL_ETCD_ENDPOINTS": f"http://root:{SECRET}/@h:1/, root:{SECRET}@g"})
    assert SECRET not in "\n".join(setting_lines(settings))
    assert SECRET not in repr(settings)


def test_given_options_hide_secrets(pytester: pytest.Pytester) -> None:
    typed = {
        "etcd_user": f"root:{SECRET}",
        "etcd": f"http://root:{SECRET}@h:1",
        "etcd_image": "localhost/etcd@sha256:0123",
        "profile": "own.toml",
        "gate": "yes",
    }
    assert given_options(configure(pytester, typed, {"depth": "2"})) == {
        "--nixl-etcd": "http://***@h:1",
        "--nixl-etcd-image": "localhost/etcd@sha256:0123",
        "--nixl-etcd-user": "***",
        "--nixl-profile": "own.toml",
        "--nixl-gate": "yes",
    }


@pytest.mark.parametrize("how", ["option", "ini", "both"])
def test_a_refusal_hides_what_the_options_hide(pytester: pytest.Pytester, how: str) -> None:
    hidden = {"etcd_user": f"root:{SECRET}", "s3": f"http://me:0-{SECRET}@h:1"}
    other = {name: f"{text}-2" for name, text in hidden.items()}
    config = configure(pytester, *{"option": (hidden, {}), "ini": ({}, hidden), "both": (hidden, other)}[how])
    refusal = pytest.UsageError(f"{SECRET} is wrong\x1b", f"0-{SECRET}")
    assert printable_error(config, refusal) == ("*** is wrong\\x1b", "***")


def test_each_setting_in_the_header_can_be_typed(pytester: pytest.Pytester) -> None:
    left_out = ("etcd_user", "group_token", *SWITCHES, *APART)
    first = read(pytester, {name: text for name, (text, _) in TEXTS.items() if name not in left_out})
    shown = dict(line.removeprefix("--nixl-").rsplit(" (", 1)[0].split("=", 1) for line in setting_lines(first))
    again = {
        name: shown[name.replace("_", "-")]
        for name in TEXTS
        if name not in left_out and shown[name.replace("_", "-")] != "none"
    }
    second = read(pytester, again)
    assert {name: getattr(second, name) for name in again} == {name: getattr(first, name) for name in again}
    assert len(again) == len(TEXTS) - len(left_out)
    apart = read(pytester, {name: TEXTS[name][0] for name in APART})
    assert f"--nixl-compare-image={TEXTS['compare_image'][0]} (option)" in setting_lines(apart)


@pytest.mark.parametrize(
    ("text", "shown"), [("0", "0s"), ("100ns", "0.0000001s"), ("100h", "360000s"), ("0.1234567s", "0.1234567s")]
)
def test_times_are_shown_in_a_form_that_can_be_typed(pytester: pytest.Pytester, text: str, shown: str) -> None:
    assert f"--nixl-duration={shown} (option)" in setting_lines(read(pytester, {"duration": text}))
    assert f"--nixl-duration={shown} (option)" in setting_lines(read(pytester, {"duration": shown}))


def test_settings_are_frozen(pytester: pytest.Pytester) -> None:
    settings = read(pytester)
    with pytest.raises(FrozenInstanceError):
        settings.gate = True  # type: ignore[misc]


def test_the_user_and_password_of_etcdctl_may_be_two_variables(pytestconfig: pytest.Config) -> None:
    apart = {"ETCDCTL_USER": "root", "ETCDCTL_PASSWORD": "secret"}
    assert read_settings(pytestconfig, apart).etcd_user == "root:secret"
    together = {"ETCDCTL_USER": "root:own", "ETCDCTL_PASSWORD": "other"}
    assert read_settings(pytestconfig, together).etcd_user == "root:own"


def test_a_namespace_is_reported_as_ignored(pytestconfig: pytest.Config) -> None:
    lines = list(setting_lines(read_settings(pytestconfig, {"NIXL_ETCD_NAMESPACE": "/prod/nixl"})))
    assert any(line.startswith("NIXL_ETCD_NAMESPACE=/prod/nixl is set and ignored") for line in lines)


@pytest.mark.parametrize("name", ["baseline", "compare_image"])
def test_a_comparison_without_scipy_is_refused(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(pytest.UsageError) as caught:
        read(pytester, {name: TEXTS[name][0]})
    expected_text = f"--nixl-{name.replace('_', '-')} needs SciPy, which is not installed: pip install 'scipy>=1.11.1'"
    assert str(caught.value) == expected_text


def test_compared_runs_have_more_launches(pytester: pytest.Pytester) -> None:
    assert read(pytester).fewest_launches == 1
    assert read(pytester, {"baseline": "here.pem"}).fewest_launches == 5
    assert read(pytester, {"baseline": "here.pem", "min_launches": "3"}).fewest_launches == 3


def test_a_secret_in_the_command_of_the_other_image_is_not_shown(pytester: pytest.Pytester) -> None:
    typed = {"compare_image": f"nixl:1 env UCX_TLS=tcp MY_TOKEN={SECRET} 'A_PASSWORD=x {SECRET}' http://u:{SECRET}@h:1"}
    assert SECRET not in "\n".join(setting_lines(read(pytester, typed)))
    assert given_options(configure(pytester, typed))["--nixl-compare-image"] == (
        "nixl:1 env UCX_TLS=tcp 'MY_TOKEN=***' 'A_PASSWORD=***' 'http://***@h:1'"
    )


def test_a_value_with_a_line_break_is_refused_in_one_line(pytester: pytest.Pytester) -> None:
    config = parse_config(pytester, "--nixl-pattern=no such\nfile")
    with pytest.raises(pytest.UsageError, match=r"^--nixl-pattern: no such\\nfile cannot be read"):
        read_settings(config, environ={})
