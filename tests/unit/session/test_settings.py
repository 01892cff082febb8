# SPDX-License-Identifier: Apache-2.0
"""Reading of settings: an option wins over an ini value, an ini value over the environment; each has its source."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from helpers.pytester_run import parse_config

from pytest_nixl.model.agent_options import AgentOptions, BackendParameter, ThreadCounts
from pytest_nixl.model.kv_cache import GENERIC, KV_MODELS
from pytest_nixl.model.memory import DevicePair, MemoryPair
from pytest_nixl.model.settings import DEFAULT_ETCD_IMAGE, OPTIONS, AlternateImage, Settings
from pytest_nixl.model.traffic_pattern import PatternChoice, RankPairing
from pytest_nixl.session.given_options import given_options, printable_error
from pytest_nixl.session.settings import changed_settings, read_settings, readable_settings, setting_lines

pytest_plugins = ["settings_fixtures"]

Read = Callable[..., Settings]
Configure = Callable[..., pytest.Config]

SECRET = "hunter2"
KIB = 1 << 10

#: For each setting a text that is not its default, what is read from it, and the default.
SETTINGS: dict[str, tuple[str, object, object]] = {
    "backend": ("ucx", ("UCX",), ("UCX",)),
    "etcd": ("http://h:1,https://g:2", "http://h:1,https://g:2", ""),
    "etcd_server": ("external", "external", "auto"),
    "etcd_image": ("localhost/etcd:v3.5.1", "localhost/etcd:v3.5.1", DEFAULT_ETCD_IMAGE),
    "etcd_cacert": ("here.pem", "here.pem", ""),
    "etcd_cert": ("here.pem", "here.pem", ""),
    "etcd_key": ("here.pem", "here.pem", ""),
    "etcd_user": ("root:pass:word", "root:pass:word", ""),
    "etcd_listen": (":12379", "0.0.0.0:12379", ""),
    "ranks": ("8", 8, None),
    "rank": ("3", 3, None),
    "group": ("nightly-1.2_a", "nightly-1.2_a", ""),
    "group_token": ("of us", "of us", ""),
    "pairs": ("0:1, 3:2", RankPairing("", ((0, 1), (3, 2))), RankPairing("ring")),
    "pattern": ("incast:8", PatternChoice("incast:8", "incast", 8), None),
    "join_timeout": ("1h", 3600.0, 300.0),
    "lease": ("1.5 min", 90, 6),
    "log_dir": ("logs", "logs", ""),
    "op": ("read, Write", ("READ", "WRITE"), ("WRITE", "READ")),
    "memory": (
        "dram:vram, VRAM:VRAM",
        (MemoryPair("DRAM", "VRAM"), MemoryPair("VRAM", "VRAM")),
        (MemoryPair("DRAM", "DRAM"),),
    ),
    "devices": ("0:1", DevicePair(0, 1), None),
    "file_dir": ("/", "/", ""),
    "s3": ("http://h:1/", "http://h:1", ""),
    "blocks": ("1KiB..4KiB", (KIB, 2 * KIB, 4 * KIB), tuple(4 * KIB << step for step in range(15))),
    "batch": ("4, 1", (4, 1), (1,)),
    "depth": ("2,8", (2, 8), (1,)),
    "footprint": ("64MiB", 65536 * KIB, None),
    "notify": ("each", "each", "last"),
    "pages": ("base", "base", "huge"),
    "kv_model": ("Qwen3-8B", KV_MODELS["qwen3-8b"], GENERIC),
    "kv_tokens": ("100", 100, 1024),
    "kv_tp": ("2:4", (2, 4), (1, 1)),
    "kv_requests": ("4", 4, 1),
    "kv_rate": (" 12.5/s ", 12.5, None),
    "kv_block_tokens": ("64", 64, 16),
    "kv_dtype": ("fp8", "fp8", None),
    "iterations": ("7", 7, None),
    "warmup": ("0", 0, 10),
    "duration": ("250ms", 0.25, 0.07),
    "timeout": ("2min", 120.0, 60.0),
    "start_timeout": ("10min", 600.0, 180.0),
    "profile": ("own.toml", "own.toml", "loopback"),
    "nixlbench": ("/bin/sh", "/bin/sh", ""),
    "nixlbench_runtime": ("ASIO", "ASIO", "auto"),
    "nixlbench_args": ("-mode MG --check_consistency", ("--mode=MG", "--check_consistency"), ()),
    "raw_tools_dir": ("raw", "raw", ""),
    "level": ("3", "extended", "standard"),
    "gate": ("yes", True, False),
    "keep_going": ("yes", True, False),
    "image": ("registry/nixl:2", "registry/nixl:2", ""),
    "baseline": ("here.pem", "here.pem", ""),
    "compare_image": (
        "nixl:1 env UCX_TLS=tcp 'A=b c'",
        AlternateImage("nixl:1", ("env", "UCX_TLS=tcp", "A=b c")),
        None,
    ),
    "max_regression": ("2.5 %", 0.025, 0.05),
    "min_launches": ("7", 7, None),
    "store": ("runs", "runs", ""),
    "report": ("a.html,b.csv", ("a.html", "b.csv"), ()),
    "agent": ("sglang", "sglang", "default"),
    "progress_thread": ("off, on", ("off", "on"), ("auto",)),
    "threads": ("8:0", ThreadCounts(8, 0), None),
    "sync_mode": ("rw", "rw", "auto"),
    "backend_params": (
        "ucx:num_workers=4,UCX:a=1",
        (BackendParameter("UCX", "a", "1"), BackendParameter("UCX", "num_workers", "4")),
        (),
    ),
}
TEXTS = {name: text for name, (text, _, _) in SETTINGS.items()}
VALUES = {name: value for name, (_, value, _) in SETTINGS.items()}
DEFAULTS = {name: default for name, (_, _, default) in SETTINGS.items()}
#: What cannot be given with ``baseline``.
APART = "compare_image"
TOGETHER = {name: text for name, text in TEXTS.items() if name != APART}


def values_of(settings: Settings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in SETTINGS}


def test_every_setting_has_a_text_in_this_file() -> None:
    names = {item.field for item in OPTIONS}
    assert set(SETTINGS) == names == {item.name for item in fields(Settings)} - {"sources", "ignored"}
    assert all(VALUES[name] != DEFAULTS[name] for name in names - {"backend"})  # there is only one backend


def test_ranks_may_differ_in_what_reaches_the_etcd_and_in_what_they_write() -> None:
    assert " ".join(item.field for item in OPTIONS if item.per_rank) == (
        "etcd etcd_server etcd_image etcd_cacert etcd_cert etcd_key etcd_user etcd_listen rank group_token log_dir "
        "file_dir s3 nixlbench raw_tools_dir image store report"
    )


def test_defaults(read: Read) -> None:
    settings = read()
    assert values_of(settings) == DEFAULTS
    assert (set(settings.sources.values()), settings.ignored) == ({"default"}, ())
    shown = {"join_timeout": "300s", "timeout": "60s", "start_timeout": "180s"}
    assert list(setting_lines(settings)) == [
        f"{item.flag}={shown.get(item.field, item.default or 'none')} (default)" for item in OPTIONS
    ]
    with pytest.raises(FrozenInstanceError):
        settings.gate = True  # type: ignore[misc]


@pytest.mark.parametrize("place", ["ini", "option"])
def test_every_setting_is_an_option_that_wins_over_its_ini_value(
    pytester: pytest.Pytester, configure: Configure, files: Path, place: str
) -> None:
    """Pytest's own configuration and the double of the other tests say the same."""
    switches = {item.field for item in OPTIONS if item.switch}
    for texts in (TOGETHER, {APART: TEXTS[APART]}):
        options = {name: text for name, text in texts.items() if place == "option"}
        worthless = {name: "no" if name in switches else "worthless: it is not even read" for name in options}
        ini = worthless or texts
        lines = [f"nixl_{name} = {text}" for name, text in ini.items()]
        (files / "pytest.ini").write_text("\n".join(["[pytest]", *lines]))
        flags = [item.flag if item.switch else f"{item.flag}={options[item.field]}"
                 for item in OPTIONS if item.field in options]  # fmt: skip
        for config in (parse_config(pytester, *flags), configure(options, ini)):
            settings = read_settings(config, {})
            assert values_of(settings) == {**DEFAULTS, **{name: VALUES[name] for name in texts}}
            assert settings.sources == {name: place if name in texts else "default" for name in SETTINGS}


def test_an_ini_value_wins_over_the_environment_and_that_over_the_default(read: Read) -> None:
    variables = {
        "backend": ("NIXL_BACKEND",),
        "etcd": ("NIXL_ETCD_ENDPOINTS", "ETCD_ENDPOINTS"),
        "etcd_cacert": ("ETCDCTL_CACERT",),
        "etcd_cert": ("ETCDCTL_CERT",),
        "etcd_key": ("ETCDCTL_KEY",),
        "etcd_user": ("ETCDCTL_USER",),
        "group_token": ("NIXL_GROUP_TOKEN",),
        "image": ("NIXL_IMAGE",),
    }
    assert {item.field: item.environment for item in OPTIONS if item.environment} == variables
    for place in (0, -1):
        settings = read(environ={names[place]: TEXTS[field] for field, names in variables.items()})
        assert values_of(settings) == {**DEFAULTS, **{name: VALUES[name] for name in variables}}
        expected = {field: f"environment {names[place]}" for field, names in variables.items()}
        assert settings.sources == {**dict.fromkeys(SETTINGS, "default"), **expected}
        assert settings.ignored == ()
    settings = read(ini={name: TEXTS[name] for name in variables},
                    environ={name: "worthless" for names in variables.values() for name in names})  # fmt: skip
    assert values_of(settings) == {**DEFAULTS, **{name: VALUES[name] for name in variables}}
    assert settings.ignored == tuple(
        f"{name}={'***' if field in ('etcd_user', 'group_token') else 'worthless'} is set and ignored: "
        f"--nixl-{field.replace('_', '-')} comes from ini"
        for field in SETTINGS for name in variables.get(field, ())
    )  # fmt: skip
    empty = read(environ=dict.fromkeys([*(names[0] for names in variables.values()), "NIXL_TARGET_SEG_TYPE"], ""))
    assert (values_of(empty), set(empty.sources.values()), empty.ignored) == (DEFAULTS, {"default"}, ())


@pytest.mark.parametrize(
    ("options", "ini", "environ", "expected", "ignored"),
    [
        # Endpoints of the deployment are judged by a suite: here any text is accepted.
        ({}, {}, {"NIXL_ETCD_ENDPOINTS": "no address at all"}, {"etcd": "no address at all"}, []),
        ({}, {}, {"ETCD_ENDPOINTS": "h:1,,h:2"}, {"etcd": "h:1,,h:2"}, []),
        (
            {},
            {},
            {"NIXL_ETCD_ENDPOINTS": "http://first:1", "ETCD_ENDPOINTS": f"http://u:{SECRET}@second:2"},
            {"etcd": "http://first:1"},
            ["ETCD_ENDPOINTS=http://***@second:2 is set and ignored: --nixl-etcd comes from environment "
             "NIXL_ETCD_ENDPOINTS"],
        ),
        (
            {"etcd": "http://typed:1", "etcd_user": "root:typed"},
            {},
            {"NIXL_ETCD_ENDPOINTS": "http://first:1", "ETCDCTL_USER": f"root:{SECRET}"},
            {"etcd": "http://typed:1", "etcd_user": "root:typed"},
            ["NIXL_ETCD_ENDPOINTS=http://first:1 is set and ignored: --nixl-etcd comes from option",
             "ETCDCTL_USER=*** is set and ignored: --nixl-etcd-user comes from option"],
        ),
        ({}, {}, {"ETCDCTL_USER": "root", "ETCDCTL_PASSWORD": "secret"}, {"etcd_user": "root:secret"}, []),
        ({}, {}, {"ETCDCTL_USER": "root:own", "ETCDCTL_PASSWORD": "other"}, {"etcd_user": "root:own"}, []),
        ({}, {}, {"NIXL_TARGET_SEG_TYPE": "vram"}, {"memory": (MemoryPair("DRAM", "VRAM"),)}, []),
        (
            {},
            {},
            {"NIXL_TARGET_SEG_TYPE": "RDMA"},
            {"memory": (MemoryPair("DRAM", "DRAM"),)},
            ["NIXL_TARGET_SEG_TYPE=RDMA is set and ignored: it is neither DRAM nor VRAM"],
        ),
        (
            {"memory": "DRAM:DRAM"},
            {},
            {"NIXL_TARGET_SEG_TYPE": "VRAM"},
            {"memory": (MemoryPair("DRAM", "DRAM"),)},
            ["NIXL_TARGET_SEG_TYPE=VRAM is set and ignored: --nixl-memory is given (option)"],
        ),
        (
            {},
            {"memory": "DRAM:DRAM"},
            {"NIXL_TARGET_SEG_TYPE": "VRAM"},
            {"memory": (MemoryPair("DRAM", "DRAM"),)},
            ["NIXL_TARGET_SEG_TYPE=VRAM is set and ignored: --nixl-memory is given (ini)"],
        ),
        (
            {},
            {},
            {"NIXL_WORKER_TYPE": "native", "NIXL_ETCD_NAMESPACE": "/prod/nixl"},
            {},
            ["NIXL_ETCD_NAMESPACE=/prod/nixl is set and ignored: each test has its own key prefix in etcd",
             "NIXL_WORKER_TYPE=native is set and ignored: transfers are always made by NIXL"],
        ),
        ({}, {}, {"NIXL_WORKER_TYPE": "NIXL"}, {}, []),
        ({"memory": "DRAM:FILE,DRAM:DRAM"}, {}, {}, {"backend": ("UCX",)}, []),
        ({"level": "quick"}, {}, {}, {"blocks": (4 * KIB, 1024 * KIB, 65536 * KIB), "extended": False}, []),
        ({"level": "quick", "blocks": "2KiB"}, {}, {}, {"blocks": (2 * KIB,)}, []),
        ({"level": "1"}, {"blocks": "2KiB"}, {}, {"blocks": (2 * KIB,)}, []),
        ({"level": "extended"}, {}, {}, {"blocks": DEFAULTS["blocks"], "extended": True}, []),
        ({}, {}, {}, {"fewest_launches": 1, "compares": False, "judged_by": ""}, []),
        ({"baseline": "here.pem"}, {}, {}, {"fewest_launches": 5, "judged_by": "--nixl-baseline"}, []),
        ({"baseline": "here.pem", "min_launches": "3"}, {}, {}, {"fewest_launches": 3, "compares": True}, []),
        ({"baseline": "new.json", "gate": ""}, {}, {}, {"first_baseline": True, "judged_by": "--nixl-gate"}, []),
        ({APART: TEXTS[APART]}, {}, {}, {"fewest_launches": 5, "judged_by": "--nixl-compare-image"}, []),
    ],
)  # fmt: skip
def test_what_is_read(
    read: Read,
    options: dict[str, str],
    ini: dict[str, str],
    environ: dict[str, str],
    expected: dict[str, object],
    ignored: list[str],
) -> None:
    settings = read(options, ini, environ)
    assert {name: getattr(settings, name) for name in expected} == expected
    assert list(settings.ignored) == ignored
    assert list(setting_lines(settings))[len(SETTINGS) :] == ignored
    assert SECRET not in repr(settings)


def test_a_default_that_depends_on_another_setting_names_it(read: Read) -> None:
    settings = read(
        {"level": "quick", "depth": "2", "backend_params": "UCX:a=1"}, {"batch": "3"}, {"NIXL_TARGET_SEG_TYPE": "DRAM"}
    )
    assert list(changed_settings(settings)) == [
        "--nixl-memory=DRAM:DRAM (environment NIXL_TARGET_SEG_TYPE)",
        "--nixl-blocks=4KiB,1MiB,64MiB (default: three sizes at --nixl-level=quick)",
        "--nixl-batch=3 (ini)",
        "--nixl-depth=2",
        "--nixl-level=quick",
        "--nixl-backend-params=UCX:a=1",
    ]


@pytest.mark.parametrize(
    ("engine", "agent"),
    [
        ("vllm", AgentOptions(True, ThreadCounts(4, 4), telemetry=True)),
        ("dynamo", AgentOptions(True)),
        ("sglang", AgentOptions(True, ThreadCounts(8, 0), "strict")),
        ("default", AgentOptions()),
    ],
)
def test_agents_are_created_as_an_engine_does(read: Read, engine: str, agent: AgentOptions) -> None:
    settings = read({"agent": engine})
    assert settings.agents == (agent,)
    imitated = {name for name, source in settings.sources.items() if source == f"--nixl-agent={engine}"}
    assert ("progress_thread" in imitated, "threads" in imitated, "sync_mode" in imitated) == (
        agent.progress_thread is True, agent.threads is not None, agent.sync_mode != "auto",
    )  # fmt: skip


def test_an_engine_sets_only_what_is_not_given_and_gives_no_threads_to_libfabric(read: Read) -> None:
    settings = read({"agent": "sglang", "progress_thread": "off,on", "threads": "none"}, {"sync_mode": "rw"})
    assert settings.agents == (AgentOptions(False, None, "rw"), AgentOptions(True, None, "rw"))
    for engine in ("vllm", "sglang"):
        assert read({"agent": engine, "backend": "LIBFABRIC"}).threads is None


def test_programs_that_options_name_are_absolute(read: Read, files: Path) -> None:
    (files / "raw" / "fi_rma_bw").touch(0o644)
    assert read().programs == {}
    (files / "bench").touch(0o755)
    programs = read({"nixlbench": "./bench", "raw_tools_dir": "raw"}).programs
    raw = str(files / "raw" / "ucx_perftest")
    assert programs == {"nixlbench": str(files / "bench"), "ucx_perftest": raw}


def test_the_process_environment_is_read(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_ETCD_ENDPOINTS", "http://from.the.process:1")
    assert read_settings(configure()).etcd == "http://from.the.process:1"


def test_the_reports_of_a_refused_run_have_the_settings_that_can_be_read(configure: Configure) -> None:
    config = configure({"batch": "many", "depth": "2", "ranks": "1", "rank": "3"})
    with pytest.raises(pytest.UsageError):
        read_settings(config, {})
    assert values_of(readable_settings(config, {})) == {**DEFAULTS, "depth": (2,), "ranks": 1, "rank": 3}


@pytest.mark.parametrize("place", ["option", "ini", "environ"])
def test_no_secret_is_shown(read: Read, place: str) -> None:
    secrets = {"etcd": f"http://root:{SECRET}@h:1,http://root:{SECRET}@g:1", "etcd_user": f"root:{SECRET}"}
    variables = {"NIXL_ETCD_ENDPOINTS": secrets["etcd"], "ETCDCTL_USER": secrets["etcd_user"]}
    settings = read(**{"options" if place == "option" else place: variables if place == "environ" else secrets})
    assert settings.etcd_user == f"root:{SECRET}"
    lines = list(setting_lines(settings))
    sources = [place] * 2 if place != "environ" else [f"environment {name}" for name in variables]
    assert f"--nixl-etcd=http://***@h:1,http://***@g:1 ({sources[0]})" in lines
    assert f"--nixl-etcd-user=*** ({sources[1]})" in lines
    assert SECRET not in "\n".join([*lines, repr(settings), str(settings)])
    malformed = read(environ={"NIXL_ETCD_ENDPOINTS": f"http://root:{SECRET}/@h:1/, root:{SECRET}@g"})
    assert SECRET not in "\n".join([*setting_lines(malformed), repr(malformed)])


def test_given_options_hide_secrets(configure: Configure) -> None:
    image = f"nixl:1 env UCX_TLS=tcp MY_TOKEN={SECRET} 'A_PASSWORD=x {SECRET}' http://u:{SECRET}@h:1"
    shown = "nixl:1 env UCX_TLS=tcp 'MY_TOKEN=***' 'A_PASSWORD=***' 'http://***@h:1'"
    typed = {
        "etcd_user": f"root:{SECRET}",
        "etcd": f"http://root:{SECRET}@h:1",
        "etcd_image": "localhost/etcd@sha256:0123",
        "profile": "own.toml",
        "gate": "yes",
        "compare_image": image,
    }
    config = configure(typed, {"depth": "2"})
    assert given_options(config) == {
        "--nixl-etcd": "http://***@h:1",
        "--nixl-etcd-image": "localhost/etcd@sha256:0123",
        "--nixl-etcd-user": "***",
        "--nixl-profile": "own.toml",
        "--nixl-gate": "yes",
        "--nixl-compare-image": shown,
    }
    lines = list(setting_lines(read_settings(config, {})))
    assert f"--nixl-compare-image={shown} (option)" in lines
    assert SECRET not in "\n".join(lines)


def test_a_refusal_hides_the_only_option(configure: Configure) -> None:
    for field in ("group_token", "s3", "etcd"):
        refusal = pytest.UsageError(f"{SECRET}-1 is wrong")
        assert printable_error(
            configure({field: f"http://me:{SECRET}-1@h" if field != "group_token" else f"{SECRET}-1"}), refusal
        ) == ("*** is wrong",)


@pytest.mark.parametrize("places", ["option", "ini", "both"])
def test_a_refusal_hides_what_the_options_hide(configure: Configure, places: str) -> None:
    hidden = {"etcd_user": f"root:{SECRET}", "s3": f"http://me:0-{SECRET}@h:1"}
    other = {name: f"{text}-2" for name, text in hidden.items()}
    config = configure(*{"option": (hidden, {}), "ini": ({}, hidden), "both": (hidden, other)}[places])
    refusal = pytest.UsageError(f"{SECRET} is wrong\x1b", f"0-{SECRET}")
    assert printable_error(config, refusal) == ("*** is wrong\\x1b", "***")


def test_each_setting_in_the_header_can_be_typed(read: Read) -> None:
    typed = {name: text for name, text in TOGETHER.items() if name not in ("etcd_user", "group_token")}
    shown = dict(line.removeprefix("--nixl-").rsplit(" (", 1)[0].split("=", 1) for line in setting_lines(read(typed)))
    again = {name: shown[name.replace("_", "-")] for name in typed}
    assert "none" not in again.values()
    assert values_of(read(again)) == {**DEFAULTS, **{name: VALUES[name] for name in typed}}
    assert f"--nixl-compare-image={TEXTS[APART]} (option)" in setting_lines(read({APART: TEXTS[APART]}))


@pytest.mark.parametrize(
    ("text", "shown"), [("0", "0s"), ("100ns", "0.0000001s"), ("100h", "360000s"), ("0.1234567s", "0.1234567s")]
)
def test_times_are_shown_in_a_form_that_can_be_typed(read: Read, text: str, shown: str) -> None:
    for typed in (text, shown):
        assert f"--nixl-duration={shown} (option)" in setting_lines(read({"duration": typed}))


@pytest.mark.parametrize("name", ["baseline", "compare_image"])
def test_a_comparison_without_scipy_is_refused(read: Read, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(pytest.UsageError) as caught:
        read({name: TEXTS[name]})
    expected_text = f"--nixl-{name.replace('_', '-')} needs SciPy, which is not installed: pip install 'scipy>=1.11.1'"
    assert str(caught.value) == expected_text
