# SPDX-License-Identifier: Apache-2.0
"""A project in which the plugin is installed and unused loads little of it, and reads none of its settings."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.cli_run import WITHOUT
from helpers.pytester_run import PLUGIN, run_pytest

#: Of ours, what the table of options, the hooks and the fixtures' names need.
NEEDED = {
    "pytest_nixl",
    "pytest_nixl.core",
    "pytest_nixl.core.lazy_module",
    "pytest_nixl.fixtures",
    "pytest_nixl.fixtures.agents",
    "pytest_nixl.fixtures.etcd",
    "pytest_nixl.fixtures.s3",
    "pytest_nixl.plugin",
    "pytest_nixl.session",
    "pytest_nixl.session.option_table",
    "pytest_nixl.session.options",
}
#: The only parts of the package that an unused plugin may ever need: none of profiles, launchers, cluster.
LIGHT = ("core", "fixtures", "plugin", "session")
UNUSED = "def test_nothing(tmp_path): pass\nclass TestMore:\n    def test_more(self, request): pass\n"
#: A way to use the plugin: the test file, the options, the ini values.
USES = [
    pytest.param(UNUSED, ("--nixl-blocks=4KiB",), "", id="option"),
    pytest.param(UNUSED, (), "nixl_blocks = 4KiB", id="ini"),
    pytest.param("def test_it(nixl_settings): pass", (), "", id="fixture"),
    pytest.param("import pytest\n@pytest.mark.nixl_check('mine')\ndef test_it(): pass", (), "", id="marker"),
    pytest.param(
        "import pytest\n@pytest.mark.parametrize('a', [pytest.param(1, marks=pytest.mark.nixl_check('mine'))])\n"
        "def test_it(a): pass",
        (),
        "",
        id="marker of a parameter",
    ),
]


def modules(pytester: pytest.Pytester, *arguments: str, plugin: tuple[str, ...] = PLUGIN) -> dict[str, str]:
    """Run pytest, and return what it has loaded at its end: the names of modules, and the class of their loader."""
    pytester.makeconftest(
        """
        import sys

        def pytest_unconfigure():
            for name, module in sys.modules.items():
                print("loaded:", name, type(getattr(module, "__loader__", None)).__name__)
        """
    )
    run = run_pytest(pytester, "-s", "-p", "no:benchmark", *arguments, plugin=plugin, fork=False)
    assert run.ret == 0
    return dict(line.split()[1:] for line in run.stdout.lines if line.startswith("loaded:"))


def loaded(pytester: pytest.Pytester, *arguments: str, plugin: tuple[str, ...] = PLUGIN) -> set[str]:
    """Run pytest, and return the names of the modules that it has loaded at its end."""
    return set(modules(pytester, *arguments, plugin=plugin))


def of_ours(names: set[str]) -> set[str]:
    return {name for name in names if name.partition(".")[0] == "pytest_nixl"}


def test_the_doctor_does_without_pytest() -> None:
    """It would take a twentieth of the command's time."""
    script = "import sys; from pytest_nixl.cli import main; main(['doctor']); print('pytest' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr


def test_an_unrelated_project_loads_nothing_else(pytester: pytest.Pytester) -> None:
    """With the plugin, an unrelated project loads the modules above and no others that pytest does not load."""
    pytester.makepyfile(UNUSED)
    without = loaded(pytester, plugin=("-p", "no:nixl", *WITHOUT))
    with_plugin = loaded(pytester)
    assert of_ours(without) == set()
    assert with_plugin - without == NEEDED
    assert {name.split(".")[1] for name in NEEDED if "." in name} == set(LIGHT)


@pytest.mark.parametrize(("test", "arguments", "ini"), USES)
def test_whatever_uses_the_plugin_begins_a_run(
    pytester: pytest.Pytester, test: str, arguments: tuple[str, ...], ini: str
) -> None:
    """The test above proves something only if each use of the plugin loads more."""
    pytester.makepyfile(test)
    pytester.makeini(f"[pytest]\n{ini}\n")
    assert of_ours(loaded(pytester, *arguments)) > {*NEEDED, "pytest_nixl.session.run", "pytest_nixl.session.settings"}


def test_pytest_rewrites_no_module_but_those_of_the_suites(pytester: pytest.Pytester) -> None:
    """To rewrite a module takes longer than to import it, at each start where pytest cannot keep the result."""
    listed = modules(pytester, "--pyargs", "pytest_nixl.suites.control_path", "--collect-only")
    rewritten = {name for name, loader in listed.items() if loader == "AssertionRewritingHook"}
    assert any(name.endswith("suites.control_path.test_control_path") for name in rewritten)
    # pytest loads the package before any code of it runs.
    assert of_ours({name for name in rewritten if "suites" not in name}) == {"pytest_nixl"}


@pytest.mark.long
def test_no_setting_of_an_unrelated_project_is_read(pytester: pytest.Pytester) -> None:
    """Wrong values in the variables of a deployment or launcher do not disturb a project that does not use them."""
    pytester.makepyfile(UNUSED)
    wrong = {"NIXL_BACKEND": "banana", "NIXL_ETCD_ENDPOINTS": "banana", "OMPI_COMM_WORLD_RANK": "banana"}
    assert run_pytest(pytester, env=wrong).ret == 0
    assert run_pytest(pytester, "--nixl-blocks=4KiB", env=wrong).ret == pytest.ExitCode.USAGE_ERROR
