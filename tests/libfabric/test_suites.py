# SPDX-License-Identifier: Apache-2.0
"""All suites with LIBFABRIC use the requested backend and no other.

The backends are counted in the logs of all workers: NIXL logs each backend that an agent creates, and UCX logs its
start at level ``info``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cli_run import Finished, profile
from helpers.namespaces import Host, one_host, require_tools
from test_real_libfabric import ACCEPTS_TCP, FEW, run_in

#: Of each suite that makes agents, what makes them in another way; all of them are run in tox -e soak. Rows, and agents
#: that find each other through etcd or by a side channel, are in the run with and without a progress thread.
SAMPLE = (
    "suites/kv_cache",
    "suites/control_path/test_control_path.py::test_the_first_transfer_and_later_ones",
    "suites/faults/test_transfers.py",
    "suites/faults/test_workers.py::test_a_target_that_dies_is_named_and_the_initiator_lives",
    "suites/infrastructure/test_nixl.py",
    "suites/infrastructure/test_machine.py",
    "suites/metadata/test_lifecycle.py::test_an_agent_that_was_restarted_is_found_by_those_who_knew_it",
    "suites/metadata/test_namespaces.py::test_agents_of_one_name_in_two_namespaces_do_not_meet",
    "suites/uri_validation/test_deployment.py",
)
_INSTANTIATED = re.compile(r"Backend (\w+) was instantiated")
UCX_STARTS = "UCX  INFO  Version"


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    require_tools()
    with one_host() as namespace:
        yield namespace


def backends_created(written: list[str]) -> Counter[str]:
    """Return the number of agents by backend."""
    return Counter(name for text in written for name in _INSTANTIATED.findall(text))


def run_logged(host: Host, tmp_path: Path, *arguments: str) -> tuple[Finished, list[str]]:
    """Run suites with few transfers, and return the result and the log of each worker."""
    folder = tmp_path / "logs"
    folder.mkdir()
    done = run_in(
        host, *arguments, "--nixl-blocks=64KiB", "--nixl-kv-tokens=64", *FEW,
        f"--nixl-profile={profile(tmp_path / 'p.toml', ACCEPTS_TCP)}",
        "-p", "worker_logs", PYTHONPATH=str(Path(__file__).parent), PYTEST_NIXL_TEST_LOGS=str(folder),
        UCX_LOG_LEVEL="info", UCX_TLS="tcp",
    )  # fmt: skip
    return done, [log.read_text(errors="replace") for log in folder.glob("*.log")]


@pytest.mark.parametrize(
    "suites", [pytest.param(SAMPLE, id="sample"), pytest.param(("suites",), id="all", marks=pytest.mark.whole)]
)
def test_no_suite_creates_ucx_if_libfabric_is_requested(host: Host, tmp_path: Path, suites: tuple[str, ...]) -> None:
    done, written = run_logged(host, tmp_path, *suites, "--nixl-backend=LIBFABRIC")
    assert done.code == 0, done.output
    assert "ERROR " not in done.output, done.output
    agents = backends_created(written)
    assert list(agents) == ["LIBFABRIC"], agents
    assert agents["LIBFABRIC"] >= 10
    assert [text for text in written if UCX_STARTS in text] == []


def test_metadata_and_faults_use_each_requested_backend(host: Host, tmp_path: Path) -> None:
    done, written = run_logged(
        host, tmp_path, "suites/faults/test_workers.py::test_a_target_that_comes_back_under_its_name_is_written_to",
        "suites/metadata/test_exchange.py::test_an_agent_finds_another_by_a_side_channel",
        "--nixl-backend=UCX,LIBFABRIC",
    )  # fmt: skip
    assert done.code == 0, done.output
    assert "4 passed" in done.output, done.output
    # Two agents to exchange metadata, and three where one comes back.
    assert backends_created(written) == {"UCX": 5, "LIBFABRIC": 5}
    assert sum(UCX_STARTS in text for text in written) == 5


def test_suites_of_agents_work_with_and_without_a_progress_thread(host: Host, tmp_path: Path) -> None:
    done, written = run_logged(
        host, tmp_path, "suites/bandwidth/test_bandwidth.py",
        "suites/faults/test_workers.py::test_a_target_that_comes_back_under_its_name_is_written_to",
        "suites/metadata/test_exchange.py::test_an_agent_finds_another_through_etcd",
        "suites/metadata/test_exchange.py::test_an_agent_finds_another_by_a_side_channel",
        "--nixl-backend=LIBFABRIC", "--nixl-progress-thread=off,on", "--nixl-op=WRITE",
    )  # fmt: skip
    assert done.code == 0, done.output
    assert "8 passed" in done.output, done.output
    assert list(backends_created(written)) == ["LIBFABRIC"]
    assert [text for text in written if UCX_STARTS in text] == []


def test_one_agent_uses_ucx_libfabric_and_a_file_as_chosen(host: Host, tmp_path: Path) -> None:
    where = ("suites/metadata/test_backends.py", "--nixl-level=extended")
    done, written = run_logged(host, tmp_path, *where, "--nixl-backend=UCX,LIBFABRIC")
    assert done.code == 0, done.output
    for part in ("an agent with UCX and LIBFABRIC and POSIX: ", "DRAM:DRAM by UCX", "DRAM:DRAM by LIBFABRIC",
                 "DRAM:FILE by POSIX"):  # fmt: skip
        assert part in done.output, done.output
    assert backends_created(written) == {"UCX": 2, "LIBFABRIC": 2, "POSIX": 1}
