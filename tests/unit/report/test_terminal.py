# SPDX-License-Identifier: Apache-2.0
"""The header with the settings; an unused plugin shows nothing and loads nothing."""

from __future__ import annotations

import re

import pytest
from helpers.cli_run import WITHOUT
from helpers.pytester_run import PLUGIN, run_pytest

from pytest_nixl.model.settings import OPTIONS

SECRET = "hunter2"
OURS = "def test_it(nixl_settings): pass"
NOT_OURS = "def test_it(): pass"

#: tests/unit/session/test_settings.py has the defaults.
HEADER = [f"  {item.flag}={item.show(item.usual)} (default)" for item in OPTIONS]


def changed(**lines: str) -> list[str]:
    """Return the expected header, with these values for some settings, by option name."""
    by_name = {line.split("=")[0].removeprefix("  --nixl-").replace("-", "_"): line for line in HEADER}
    assert lines.keys() <= by_name.keys()
    for name, line in lines.items():
        by_name[name] = f"  --nixl-{name.replace('_', '-')}={line}"
    return list(by_name.values())


def header(result: pytest.RunResult) -> list[str]:
    """Return the lines of the header, which must be shown exactly once."""
    [start] = [number for number, line in enumerate(result.outlines) if re.fullmatch(r"pytest-nixl .+:", line)]
    lines = result.outlines[start + 1 :]
    shown = next(number for number, line in enumerate(lines) if not line.startswith("  "))
    assert not any(line.startswith("  --nixl-") for line in lines[shown:])
    return lines[:shown]


def place(result: pytest.RunResult, beginning: str) -> int:
    """Return the index of the only line that begins with a text."""
    [number] = [number for number, line in enumerate(result.outlines) if line.startswith(beginning)]
    return number


@pytest.mark.parametrize("test", [OURS, NOT_OURS])
def test_an_option_shows_the_header_with_each_setting_and_its_source(pytester: pytest.Pytester, test: str) -> None:
    pytester.makepyfile(test)
    pytester.makeini("[pytest]\nnixl_depth = 1,4\nnixl_warmup = 0")
    environ = {
        "NIXL_ETCD_ENDPOINTS": f"http://root:{SECRET}@etcd:2379/",
        "ETCD_ENDPOINTS": "http://other:2379",
        "ETCDCTL_USER": f"root:{SECRET}",
        "NIXL_TARGET_SEG_TYPE": "VRAM",
        "NIXL_WORKER_TYPE": "native",
    }
    result = run_pytest(
        pytester, "-vv", "--nixl-blocks=4KiB,1MiB", "--nixl-duration=2min", env=environ, in_process=True
    )
    result.assert_outcomes(passed=1)
    assert header(result) == [
        *changed(
            blocks="4KiB,1MiB (option)",
            duration="120s (option)",
            depth="1,4 (ini)",
            warmup="0 (ini)",
            etcd="http://***@etcd:2379/ (environment NIXL_ETCD_ENDPOINTS)",
            etcd_user="*** (environment ETCDCTL_USER)",
            memory="DRAM:VRAM (environment NIXL_TARGET_SEG_TYPE)",
        ),
        "  ETCD_ENDPOINTS=http://other:2379 is set and ignored: --nixl-etcd comes from environment NIXL_ETCD_ENDPOINTS",
        "  NIXL_WORKER_TYPE=native is set and ignored: transfers are always made by NIXL",
    ]
    assert place(result, "pytest-nixl ") < place(result, "rootdir: ") < place(result, "collecting ")
    assert SECRET not in result.stdout.str()


def test_the_header_names_only_settings_that_are_not_the_default(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(OURS)
    pytester.makeini("[pytest]\nnixl_depth = 1,4")
    environ = {"ETCDCTL_USER": f"root:{SECRET}", "NIXL_WORKER_TYPE": "native"}
    result = run_pytest(pytester, "--nixl-blocks=4KiB,1MiB", "--nixl-duration=2min", env=environ, in_process=True)
    first = place(result, "pytest-nixl ")
    assert result.outlines[first].endswith(
        ": --nixl-etcd-user=*** (environment ETCDCTL_USER), --nixl-blocks=4KiB,1MiB, --nixl-depth=1,4 (ini), "
        "--nixl-duration=120s (-vv: all settings)"
    )
    assert (
        result.outlines[first + 1] == "  NIXL_WORKER_TYPE=native is set and ignored: transfers are always made by NIXL"
    )
    assert not result.outlines[first + 2].startswith(" ")
    assert SECRET not in result.stdout.str()


def test_the_header_says_that_nothing_differs_from_the_defaults(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(OURS)
    result = run_pytest(pytester, in_process=True)
    assert re.fullmatch(
        r"pytest-nixl \S+( a clone)?, (no NIXL|NIXL \S+(, UCX \d+\.\d+\S*)?): each setting has its default "
        r"\(-vv: all settings\)",
        result.outlines[place(result, "pytest-nixl ")],
    )


@pytest.mark.parametrize("quiet", ["-q", "--no-header"])
@pytest.mark.parametrize("option", [[], ["--nixl-depth=4"]], ids=["no-option", "option"])
def test_the_header_can_be_left_out(pytester: pytest.Pytester, quiet: str, option: list[str]) -> None:
    pytester.makepyfile(OURS)
    result = run_pytest(pytester, quiet, *option, in_process=True)
    result.assert_outcomes(passed=1)
    assert "pytest-nixl" not in result.stdout.str()


def test_an_ini_value_alone_shows_the_header(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(NOT_OURS)
    pytester.makeini("[pytest]\nnixl_timeout = 5s")
    result = run_pytest(pytester, "-vv", in_process=True)
    assert header(result) == changed(timeout="5s (ini)")
    assert place(result, "pytest-nixl ") < place(result, "collecting ")


FIXTURES = (
    *("nixl_settings", "nixl_etcd", "nixl_private_etcd", "nixl_agent", "nixl_link"),
    *("nixl_buffer", "gpu_buffer", "etcd3_client"),
)
A_CHECK = 'import pytest\n@pytest.mark.nixl_check("own")\ndef test_it(): pass'


@pytest.mark.parametrize("test", [*(f"def test_it({fixture}): pass" for fixture in FIXTURES), A_CHECK])
def test_what_uses_the_plugin_shows_the_header_after_collection(pytester: pytest.Pytester, test: str) -> None:
    pytester.makepyfile(test_used=test)
    result = run_pytest(pytester, "-vv", "--setup-plan", in_process=True)
    assert header(result) == HEADER
    first_test = next(number for number, line in enumerate(result.outlines) if line.startswith("test_used"))
    assert place(result, "collecting ") < place(result, "pytest-nixl ") < first_test


UNTOUCHED = """
import sys
HEAVY = {"nixl", "docker", "testcontainers", "requests", "numpy", "scipy", "torch", "etcd3"}
def test_it():
    assert "pytest_nixl.plugin" in sys.modules
    assert not HEAVY.intersection(sys.modules)
"""


def test_an_unused_plugin_loads_no_further_modules(pytester: pytest.Pytester) -> None:
    """An installed but unused plugin does not import NIXL or the etcd, container and number libraries."""
    pytester.makepyfile(UNTOUCHED)
    run_pytest(pytester, fork=False).assert_outcomes(passed=1)


@pytest.mark.long
def test_settings_load_no_further_modules(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(UNTOUCHED.replace("test_it()", "test_it(nixl_settings)"))
    run_pytest(pytester, "--nixl-backend=UCX", "--nixl-etcd=http://h:1", fork=False).assert_outcomes(passed=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("test", "code"), [(NOT_OURS, 0), ("def test_it(): assert False", 1), ("x = 1", 5)], ids=["pass", "fail", "none"]
)
def test_an_unused_plugin_shows_nothing(pytester: pytest.Pytester, test: str, code: int) -> None:
    """A run with the plugin has the same output as one without it, even if the plugin's variables are set wrongly."""
    pytester.makepyfile(test)
    environ = {"NIXL_BACKEND": "banana", "NIXL_ETCD_ENDPOINTS": "http://h:1/", "NIXL_WORKER_TYPE": "native"}
    plugins = (PLUGIN, ("-p", "no:nixl", *WITHOUT))
    runs = [run_pytest(pytester, env=environ, plugin=plugin, fork=False) for plugin in plugins]
    with_it, without_it = ([re.sub(r"in [0-9.]+s", "in TIME", line) for line in run.outlines] for run in runs)
    assert with_it == without_it
    assert [run.errlines for run in runs] == [[], []]
    assert [run.ret for run in runs] == [code, code]


SUITES = "no NIXL check ran, because the validation suites were not selected; to run them"


@pytest.mark.parametrize(
    ("test", "code"),
    [
        ("", pytest.ExitCode.NO_TESTS_COLLECTED),
        ("def test_it(): assert True", pytest.ExitCode.OK),
        ("def test_it(): assert False", pytest.ExitCode.TESTS_FAILED),
    ],
    ids=["none", "pass", "fail"],
)
def test_a_run_without_a_check_prints_the_command_to_type_and_keeps_its_exit_code(
    pytester: pytest.Pytester, test: str, code: int
) -> None:
    pytester.makepyfile(test)
    result = run_pytest(pytester, "--nixl-backend=UCX", in_process=True)
    assert result.ret == code
    command = place(result, SUITES)
    assert result.outlines[command + 1] == "type: pytest --pyargs pytest_nixl.suites --nixl-backend=UCX"
    assert result.errlines == []


def test_the_command_to_type_has_every_option_and_no_password(pytester: pytest.Pytester) -> None:
    arguments = ["--nixl-blocks=4KiB,8KiB", f"--nixl-etcd=http://u:{SECRET}@h:1", f"--nixl-etcd-user=root:{SECRET}"]
    result = run_pytest(pytester, *arguments, in_process=True)
    assert result.outlines[place(result, "type: ")] == (
        "type: pytest --pyargs pytest_nixl.suites '--nixl-etcd=http://***@h:1' '--nixl-etcd-user=***' "
        "--nixl-blocks=4KiB,8KiB"
    )
    assert SECRET not in result.stdout.str()
