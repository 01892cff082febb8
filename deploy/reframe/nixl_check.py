# SPDX-License-Identifier: Apache-2.0
"""A ReFrame check that runs the suites and passes if their verdict is PASS. Each row is a performance variable.

    reframe -c deploy/reframe/nixl_check.py -r -S NixlCheck.backend=LIBFABRIC -S NixlCheck.profile=p5.48xlarge

ReFrame starts ``pytest`` in the environment of its partition: pytest-nixl and NIXL must be installed there. With
``-S NixlCheck.ranks=4`` the partition's launcher starts one rank on each of four nodes, and rank 0 serves an etcd.
"""

from __future__ import annotations

import json
import os
from typing import Any

import reframe as rfm
import reframe.utility.sanity as sn
import reframe.utility.typecheck as types
from reframe.core.builtins import run_before, sanity_function, variable

#: The file in the stage directory to which rank 0 writes the verdict.
VERDICT = "verdict.json"
#: The secret of all ranks: rank 0's etcd refuses clients without it. The job makes it when it starts, because others
#: may read the script of the job.
TOKEN = "export NIXL_GROUP_TOKEN=${NIXL_GROUP_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}"


@rfm.simple_test
class NixlCheck(rfm.RunOnlyRegressionTest):
    """The suites of pytest-nixl, as an acceptance gate."""

    #: NIXL's backends, as ``--nixl-backend`` takes them.
    backend = variable(str, value="UCX")
    #: The profile that judges the rows: a name that comes with the plugin, or the absolute path of a file.
    profile = variable(str, value="loopback")
    #: ``quick``, ``standard`` or ``extended``.
    level = variable(str, value="standard")
    #: The number of ranks, one on each node. Several need the launcher srun, which passes the token on.
    ranks = variable(int, value=1)
    #: Further options of pytest.
    more = variable(types.List[str], value=[])

    descr = "NIXL moves the right bytes at the speed that the profile expects"
    valid_systems = ["*"]  # noqa: RUF012 - these are variables of ReFrame
    valid_prog_environs = ["*"]  # noqa: RUF012
    executable = "pytest"
    num_tasks_per_node = 1
    time_limit = "1h"

    @run_before("run")
    def ask_for_the_verdict(self) -> None:
        """Set the number of ranks, what the job does before them, and the command line of each."""
        self.num_tasks = self.ranks
        self.prerun_cmds = [f"rm -f {VERDICT}"]
        self.executable_opts = [
            "-p no:cacheprovider", "--pyargs pytest_nixl.suites", "--nixl-gate", f"--nixl-backend={self.backend}",
            f"--nixl-profile={self.profile}", f"--nixl-level={self.level}", f"--nixl-report={VERDICT}",
        ]  # fmt: skip
        if self.ranks > 1:
            self.prerun_cmds.append(TOKEN)
            self.executable_opts.append("--nixl-etcd-listen=0.0.0.0:23790")
        self.executable_opts += self.more

    @sanity_function
    def verdict_is_pass(self) -> Any:
        """Pass if the verdict is PASS and the exit code 0; else fail with the reason and remedy of each failure."""
        sn.evaluate(sn.assert_true(os.path.exists(VERDICT), msg=f"pytest wrote no {VERDICT}: read {self.stdout}"))
        report = _verdict(self.stagedir)
        failures = [
            f"{result['verdict']} {result['check']}: {result['reason']}; remedy: {result['remedy']}"
            for result in report["results"]
            if result["outcome"] == "FAIL"
        ]
        code = f"exit code {report['exit_code']}"
        summary = "; ".join(filter(None, [report["verdict"], report["text"], *failures, code]))
        return sn.assert_eq((report["verdict"], report["exit_code"]), ("PASS", 0), msg=f"the verdict is {summary}")

    @run_before("performance")
    def set_performance_figures(self) -> None:
        """Make the bandwidth of each row a performance variable, in GB/s.

        The name of the variable is the row key with ``-`` for each ``:``: ReFrame reads ``:`` as the end of a system's
        name.
        """
        self.perf_variables = {
            row["row"].replace(":", "-"): sn.make_performance_function(sn.defer(row["bandwidth"] / 1e9), "GB/s")
            for row in _verdict(self.stagedir)["measured_rows"]
        }


def _verdict(folder: str) -> dict[str, Any]:
    with open(os.path.join(folder, VERDICT), encoding="utf-8") as file:
        report: dict[str, Any] = json.load(file)
    return report
