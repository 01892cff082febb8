# SPDX-License-Identifier: Apache-2.0
"""No secret of an option or a variable is in what a run prints or writes, also if one of its tests crashes."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.pytester_run import run_pytest

#: A check whose traceback has the settings, the command in a local variable, and the output of a program.
CRASHES = """
import pytest
pytestmark = pytest.mark.nixl_check("etcd-roundtrip")

def test_it(nixl_settings):
    words = nixl_settings.compare_image.prefix
    print("Authorization: Bearer Sw0rdfish-printed")
    word = words[-2]
    raise RuntimeError("the registry refuses " + word)
"""
VARIABLES = {
    "NIXL_APITOKEN": "Sw0rdfish-1",
    "NIXL_DBPASSWORD": "Sw0rdfish-2",
    "UCX_ARGS": "--password Sw0rdfish-3",
    "NIXL_HEADER": "Authorization: Bearer Sw0rdfish-4",
    "NIXL_EXTRA": '{"password": "Sw0rdfish-5"}',
}


def test_no_secret_is_in_what_a_run_with_a_crash_prints_and_writes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CRASHES)
    files = [Path(name) for name in ("j.xml", "r.html", "r.csv", "r.json", "r.prom")]
    done = run_pytest(
        pytester, "--showlocals", "-v", "--junit-xml=j.xml",
        "--nixl-report=" + ",".join(map(str, files[1:])),
        "--nixl-compare-image=IMG docker run -e API_TOKEN=Sw0rdfish-6 --password Sw0rdfish-7 image",
        "--nixl-nixlbench-args=--azure_blob_connection_string=AccountKey=Sw0rdfish-8",
        env=VARIABLES, in_process=True,
    )  # fmt: skip
    output = "\n".join([*done.outlines, *done.errlines, *((pytester.path / file).read_text() for file in files)])
    assert "the registry refuses ***" in output
    assert [line for line in output.splitlines() if "Sw0rdfish" in line] == []


def test_a_refused_option_does_not_print_its_secret(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(nixl_settings): pass")
    done = run_pytest(pytester, "--nixl-nixlbench-args=--backend --password=Sw0rdfish-1 '", in_process=True)
    assert "cannot be split into words" in "\n".join(done.errlines)
    assert "Sw0rdfish" not in "\n".join([*done.outlines, *done.errlines])


@pytest.mark.parametrize("style", ["long", "no", "native", "line"])
def test_a_secret_is_hidden_in_every_way_in_which_pytest_shows_a_failure(pytester: pytest.Pytester, style: str) -> None:
    pytester.makepyfile(
        """
        def test_missing_fixture(nixl_settings, absent, header="Authorization: Bearer Sw0rdfish-1"): pass

        def test_chain(nixl_settings):
            try:
                raise ValueError("Authorization: Bearer Sw0rdfish-2")
            except ValueError as error:
                raise KeyError("Authorization: Bearer Sw0rdfish-3") from error
        """
    )
    done = run_pytest(pytester, f"--tb={style}", "-rA", "--junit-xml=j.xml", in_process=True)
    done.assert_outcomes(errors=1, failed=1)
    output = "\n".join([*done.outlines, *done.errlines, (pytester.path / "j.xml").read_text()])
    assert "test_chain" in output
    assert [line for line in output.splitlines() if "Sw0rdfish" in line] == []


def test_a_test_that_uses_only_the_proxy_hides_its_secret_and_shows_its_own_lines(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_it(nixl_etcd_proxy):
            etcd = "http://root:Sw0rdfish@127.0.0.1:1"
            nixl_etcd_proxy("http://127.0.0.1:1").wait(lambda: False, f"a request to {etcd}", seconds=0)
        """
    )
    done = run_pytest(pytester, "--showlocals", in_process=True)
    done.assert_outcomes(failed=1)
    output = "\n".join([*done.outlines, *done.errlines])
    assert "ProxyLateError: waited 0 s for a request to http://***@127.0.0.1:1" in output
    assert [line for line in output.splitlines() if "Sw0rdfish" in line or "/pytest_nixl/" in line] == []
