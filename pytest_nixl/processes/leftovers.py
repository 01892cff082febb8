# SPDX-License-Identifier: Apache-2.0
"""What a run has outside its processes, and its removal: at the end of the run, or later if its supervisor was killed.

These are containers, keys below a prefix in an etcd, a run directory, and a directory in /dev/shm. A run directory has
the list of the containers and prefixes: by it, the next run and ``pytest-nixl clean`` remove them. Only the
removal of containers and prefixes needs more than the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_nixl.core.lazy_module import lazy_module

if TYPE_CHECKING:
    import docker

    from pytest_nixl.etcd import client as etcd_client
    from pytest_nixl.etcd import endpoints as etcd_endpoints
else:  # the supervisor starts without them, and loads them in a forked child
    docker = lazy_module("docker")
    etcd_client = lazy_module("pytest_nixl.etcd.client")
    etcd_endpoints = lazy_module("pytest_nixl.etcd.endpoints")

#: Seconds for which the removal of a directory is retried while processes still write to it.
REMOVE_SECONDS = 5.0

#: The directory in which a run has one for shared memory, with the same name as its run directory.
SHARED_MEMORY = "/dev/shm"

#: The file in a run's directories whose lock the supervisor holds as long as it lives. It contains the run's name.
#: It is the first file in a directory, and the last that is removed.
OWNER = "owner"
#: Seconds after which an empty directory is that of a run that was killed before its first file, or after its last.
EMPTY_SECONDS = 60.0
#: The file in a run directory with the containers and prefixes that its supervisor watches.
WATCHED = "watched.json"


def clean_remote(items: list[dict[str, Any]]) -> list[str]:
    """Remove containers and prefixes; try each one even if others fail. Return a sentence for each that is left."""
    remaining = []
    for item in items:
        try:
            if item["kind"] == "container":
                _remove_container(item)
            else:
                _delete_prefix(item)
        except Exception as error:
            remaining.append(_not_removed(item, str(error).partition("\n")[0]))
    return remaining


def _not_removed(item: dict[str, Any], reason: str) -> str:
    if item["kind"] == "container":
        return f"the container {item['name']} is left ({reason}): `docker rm --force --volumes {item['name']}`"
    where = ",".join(f"{scheme}://{host}:{port}" for scheme, host, port, *_ in item["endpoints"])
    command = f"etcdctl --endpoints={where} del --prefix {item['name']}"
    login = "; set ETCDCTL_USER=NAME:PASSWORD first" if item.get("login") else ""
    return f"the keys below {item['name']} are left in the etcd at {where} ({reason}): `{command}`{login}"


def _remove_container(item: dict[str, Any]) -> None:
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
    members = [etcd_endpoints.Endpoint(*parts) for parts in item["endpoints"]]
    with etcd_client.connect(members, **item["credentials"], timeout=3.0) as client:
        client.delete_prefix(item["name"])


def by_place(items: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group items by etcd or engine, so that one that does not answer does not delay the others."""
    places: dict[str, list[dict[str, Any]]] = {}
    for item in items:
        place = json.dumps([item["kind"], item.get("endpoints"), item.get("environment")], sort_keys=True)
        places.setdefault(place, []).append(item)
    return list(places.values())


def write_watched(directory: str, items: Mapping[str, dict[str, Any]]) -> None:
    """Write down what a supervisor watches, for the case that it is killed. Passwords are left out.

    :param items: the containers and prefixes, by their keys.
    """
    path = os.path.join(directory, WATCHED)
    with contextlib.suppress(OSError):  # the disk is full
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump({key: _without_password(item) for key, item in items.items()}, file)
        os.rename(f"{path}.new", path)


def _without_password(item: dict[str, Any]) -> dict[str, Any]:
    if item["kind"] == "container":
        return item
    endpoints = [[*parts[:3], "", ""] for parts in item["endpoints"]]
    login = bool(item["credentials"].get("user") or endpoints != item["endpoints"])
    credentials = {**item["credentials"], "user": "", "password": ""}
    return {**item, "endpoints": endpoints, "credentials": credentials, "login": login or item.get("login", False)}


def abandoned(folder: str) -> list[str]:
    """Return the directories of this user's runs whose supervisor has ended.

    :param folder: the folder of the run directories. A directory in /dev/shm is returned if its run has none there.
    """
    directories: dict[str, str] = {}
    for place in (folder, SHARED_MEMORY):
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                if entry.name.startswith("pytest-nixl-") and _is_abandoned(entry.path):
                    directories.setdefault(entry.name, entry.path)
    return list(directories.values())


def _is_abandoned(directory: str) -> bool:
    try:
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return False
        file = os.open(os.path.join(directory, OWNER), os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _is_emptied(directory)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(file)


def _is_emptied(directory: str) -> bool:
    """Whether a directory has a name as the supervisor gives it, is empty, and has been so for a while."""
    number = os.path.basename(directory).removeprefix("pytest-nixl-").partition("-")[0]
    if len(number) != 12 or set(number) - set("0123456789abcdef"):
        return False
    try:
        return time.time() - os.stat(directory).st_mtime > EMPTY_SECONDS and not os.listdir(directory)
    except OSError:
        return False


def watched(directory: str) -> dict[str, dict[str, Any]]:
    """Return the containers and prefixes that the supervisor of a run directory watched, by their keys."""
    try:
        with open(os.path.join(directory, WATCHED), encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError):  # it has watched none
        return {}


def remove_run(directory: str, resources: dict[str, dict[str, Any]] | None = None) -> list[str]:
    """Remove what is left of a run, unless a supervisor owns its directory; return what could not be removed.

    What could not be removed stays written down in the directory, under another name.

    :param resources: containers and prefixes with their passwords, by their keys.
    """
    with _taken(directory) as (path, name):
        written = watched(path) if path else {}
        remaining = {
            key: sentences
            for key, item in {**written, **(resources or {})}.items()
            if (sentences := clean_remote([item]))
        }
        if path and name.startswith("pytest-nixl-"):
            remove(f"{SHARED_MEMORY}/{name}")
        if path:
            _remove_but(path, {key: item for key, item in written.items() if key in remaining})
        elif _is_emptied(directory):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
    return [sentence for sentences in remaining.values() for sentence in sentences]


def _remove_but(path: str, remaining: dict[str, dict[str, Any]]) -> None:
    """Remove a run directory; if something is left, keep its owner's file and what is left in it."""
    if not remaining:
        remove(path)
        return
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                remove(entry.path)
            elif entry.name not in (OWNER, WATCHED):
                os.unlink(entry.path)
        with open(os.path.join(path, WATCHED), "w", encoding="utf-8") as file:
            json.dump(remaining, file)


@contextlib.contextmanager
def _taken(directory: str) -> Iterator[tuple[str, str]]:
    """Own a run directory and rename it; yield its new path and its first name. Both are empty if another owns it."""
    path = name = ""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            number = os.open(os.path.join(directory, OWNER), os.O_RDWR)
            held.callback(os.close, number)
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name = os.path.basename(os.fsdecode(os.pread(number, 255, 0)))
            new = os.path.join(os.path.dirname(directory), f"{name}-{os.getpid()}")
            os.rename(directory, new)
            path = new
        yield path, name


def remove(directory: str) -> None:
    """Remove a directory; retry while an ending process still creates files in it."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while True:
        try:
            remove_tree(directory)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                print(f"supervisor: {directory}: {error}", file=sys.stderr)
                return
            time.sleep(0.05)


def remove_tree(directory: str) -> None:
    """Remove a directory and its contents. (Importing ``shutil`` would take a third of the start time.)"""
    with contextlib.suppress(FileNotFoundError):
        with os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name == OWNER):
                if stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode):
                    remove_tree(entry.path)
                else:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.path)
        os.rmdir(directory)
