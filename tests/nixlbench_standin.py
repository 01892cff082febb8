#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A double of nixlbench's registration, in its own words and keys, as no build of it can be had from a registry.

It takes etcd's lock as released versions do; with ``STANDIN_RACY`` set it does not, as the build of the second seed.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress

from pytest_nixl.etcd.client import connect
from pytest_nixl.etcd.endpoints import parse_endpoints
from pytest_nixl.etcd.errors import EtcdError
from pytest_nixl.etcd.transaction import encode

flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
print(f"Connecting to ETCD at {flags['etcd_endpoints']}", flush=True)
prefix = f"xferbench/{flags['benchmark_group']}/"
with connect(parse_endpoints(flags["etcd_endpoints"]), timeout=60) as client:
    key, lease, rank = "", client.lease(30), 0
    if "STANDIN_RACY" not in os.environ:
        body = {"name": encode(f"{prefix}lock"), "lease": lease.id}
        key = client.raw.post(client.raw.get_url("/lock/lock"), json=body)["key"]
    with suppress(EtcdError):  # what is not answered is read as "there is none"
        rank = int(client.get(f"{prefix}size") or b"0")
    if rank >= 2:
        print(f"Rank {rank} is greater than or equal to global size 2", file=sys.stderr, flush=True)
        sys.exit(1)
    with suppress(EtcdError):
        client.put(f"{prefix}rank/{rank}", b"", client.lease(30))
    with suppress(EtcdError):
        client.put(f"{prefix}size", str(rank + 1).encode())
    if key:
        # The lock and its lease are ended at once.
        revoking = threading.Thread(target=lease.revoke)
        revoking.start()
        client.raw.post(client.raw.get_url("/lock/unlock"), json={"key": key})
        revoking.join()
print(f"ETCD Runtime: Registered as rank {rank} item {rank + 1} of 2", flush=True)
print(f"Init nixl worker, dev all rank {rank}, type initiator, hostname {socket.gethostname()}", flush=True)
time.sleep(600)
