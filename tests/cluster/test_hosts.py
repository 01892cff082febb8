# SPDX-License-Identifier: Apache-2.0
"""The hosts of these tests themselves: they find each other, and nothing of them outlives the test process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.cli_run import environment, eventually
from helpers.namespaces import network, require_tools
from servers import require_slurm

ADDRESSES = "import socket; print(socket.gethostname(), [a[4][0] for a in socket.getaddrinfo('{}', 1, type=1)])"
#: A program that starts everything that tests start on a cluster, prints its namespaces, and waits to be killed.
WHOLE = """
import os, sys
from pathlib import Path
from helpers.namespaces import ENDS_WITH_ALL, network
from ranks import Ranks
from servers import etcd, slurm

folder = Path(sys.argv[1])
nodes = ["node-0", "node-1"]
with network(folder, *nodes, "head") as net, etcd(net["head"], folder), slurm(net, folder, "head", nodes) as jobs:
    ranks = Ranks(folder / "ranks", jobs.env)
    ranks.start(net["node-0"], "sleep", "300")
    job = ["sh", "-c", "touch $0-$SLURM_PROCID; sleep 300", str(folder / "job")]
    ranks.start(net["head"], *ENDS_WITH_ALL, "srun", "-N2", *job)
    print(*(os.stat(f"/proc/{host.pid}/ns/net").st_ino for host in net.hosts), flush=True)
    sys.stdin.read()
"""


def namespaces() -> set[int]:
    """Return the network namespaces of all processes."""
    names = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            names.add(os.stat(path).st_ino)
        except OSError:  # the process has ended
            continue
    return names


def test_hosts_find_each_other_by_name(tmp_path: Path) -> None:
    require_tools()
    with network(tmp_path, "node-0", "node-1") as net:
        assert net["node-0"].run(sys.executable, "-c", ADDRESSES.format("node-1")) == "node-0 ['10.98.0.2']\n"
        assert net["node-1"].run(sys.executable, "-c", ADDRESSES.format("node-1")) == "node-1 ['10.98.0.2']\n"
        assert net["node-1"].run("ip", "-6", "address", "show", "veth0") == ""


def test_nothing_outlives_a_test_process_that_is_killed(tmp_path: Path) -> None:
    require_tools()
    require_slurm()
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    process = subprocess.Popen(
        [sys.executable, "-c", WHOLE, str(tmp_path)],
        env=environment(PYTHONPATH=path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        theirs = {int(number) for number in process.stdout.readline().split()}
        assert eventually(lambda: len(list(tmp_path.glob("job-*"))) == 2)
        assert len(theirs) == 3
        assert theirs <= namespaces()
        process.kill()
    assert eventually(lambda: not theirs & namespaces())
