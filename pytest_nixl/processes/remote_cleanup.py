# SPDX-License-Identifier: Apache-2.0
"""Remove containers and prefixes of a run that has ended. The supervisor does it in a forked child."""

from __future__ import annotations

import time
from typing import Any


def clean_remote(items: list[dict[str, Any]]) -> list[str]:
    """Remove containers and prefixes; try each one even if others fail. Return a sentence for each that is left."""
    left = []
    for item in items:
        try:
            if item["kind"] == "container":
                _remove_container(item)
            else:
                _delete_prefix(item)
        except Exception as error:
            left.append(_left(item, str(error).partition("\n")[0]))
    return left


def _left(item: dict[str, Any], why: str) -> str:
    if item["kind"] == "container":
        return f"the container {item['name']} is left ({why}): `docker rm --force --volumes {item['name']}`"
    where = ",".join(f"{scheme}://{host}:{port}" for scheme, host, port, *_ in item["endpoints"])
    command = f"etcdctl --endpoints={where} del --prefix {item['name']}"
    login = "; set ETCDCTL_USER=NAME:PASSWORD first" if item.get("login") else ""
    return f"the keys below {item['name']} are left in the etcd at {where} ({why}): `{command}`{login}"


def _remove_container(item: dict[str, Any]) -> None:
    import docker

    environment = item["environment"]
    # The library needs the ssh program only for an ssh:// address.
    ssh = environment.get("DOCKER_HOST", "").startswith("ssh://")
    engine = docker.from_env(environment=environment, timeout=5, use_ssh_client=ssh)
    # The engine may still be creating it, even if the process that requested it was killed.
    deadline = time.monotonic() + (2.0 if item["expected"] else 0.0)
    while True:
        try:
            engine.containers.get(item["name"]).remove(force=True, v=True)
            return
        except docker.errors.NotFound:
            if time.monotonic() >= deadline:
                return
            time.sleep(0.1)
        except docker.errors.APIError as error:
            # 409: another process is removing it.
            if error.status_code != 409:
                raise
            return


def _delete_prefix(item: dict[str, Any]) -> None:
    from pytest_nixl.etcd.client import connect
    from pytest_nixl.etcd.endpoints import Endpoint

    with connect([Endpoint(*parts) for parts in item["endpoints"]], **item["credentials"], timeout=3.0) as client:
        client.delete_prefix(item["name"])
