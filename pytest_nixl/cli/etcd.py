# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl etcd``: say what is wrong in the etcd of a deployment, and remove the keys of the dead."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_nixl.checks.deployment_etcd.agents import DEFAULT_NAMESPACE, NamespaceName
from pytest_nixl.checks.deployment_etcd.deployment import lines, plain, survey_deployment
from pytest_nixl.checks.deployment_etcd.problem import quoted
from pytest_nixl.checks.deployment_etcd.removal import RemovalRecord, plan_removal, remove
from pytest_nixl.core.sentences import plural
from pytest_nixl.core.strict import escape
from pytest_nixl.core.units import parse_size
from pytest_nixl.host.etcd import client_of

if TYPE_CHECKING:
    from pytest_nixl.checks.deployment_etcd.deployment import DeploymentEtcd
    from pytest_nixl.checks.deployment_etcd.removal import RemovalPlan
    from pytest_nixl.etcd.client import EtcdClient

#: Seconds for one answer: a page of values may be large, and the etcd busy.
_TIMEOUT = 10.0
#: The keys of one owner that a dry run prints.
_MOST_KEYS = 20


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    etcd = commands.add_parser(
        "etcd",
        help="say what is wrong in the etcd of a deployment, and remove the keys of the dead",
        description="Read the keys of NIXL's agents, of nixlbench and of pytest-nixl in an etcd, and the state of the "
        "etcd, and print what is wrong. Nothing is changed without --yes. The command exits with 1 if it finds a "
        "problem, or does not remove what it should. Certificates and user are read from the variables of etcdctl "
        "(ETCDCTL_CACERT, ETCDCTL_CERT, ETCDCTL_KEY, ETCDCTL_USER).",
    )
    etcd.add_argument(
        "endpoints", metavar="URL[,URL]", nargs="?", help="the etcd (default: NIXL_ETCD_ENDPOINTS, ETCD_ENDPOINTS)"
    )
    etcd.add_argument(
        "--namespace",
        metavar="NAME",
        help="the namespace of the agents; other spellings of its slashes are read, too (default: NIXL_ETCD_NAMESPACE, "
        "else NIXL's default, /nixl/agents/)",
    )
    etcd.add_argument(
        "--max-request-bytes",
        metavar="SIZE",
        default="1.5MiB",
        help="etcd's option of this name: the largest request that it accepts (default: 1.5MiB, as etcd's)",
    )
    etcd.add_argument("--no-connect", action="store_true", help="do not try the addresses that agents published")
    etcd.add_argument("--all", action="store_true", help="print all agents and all problems")
    etcd.add_argument("--json", action="store_true", help="print JSON, with all agents and all problems")
    removing = etcd.add_argument_group("removal")
    removing.add_argument(
        "--remove-dead",
        action="store_true",
        help="print which keys would be removed: those of groups of nixlbench and pytest-nixl whose members have lost "
        "their leases, and of the agents of --agent",
    )
    removing.add_argument(
        "--agent",
        metavar="NAME",
        action="append",
        default=[],
        help="this agent of the namespace, spelled exactly, is dead; repeatable. Its keys have no lease, so that only "
        "you can know it",
    )
    removing.add_argument(
        "--unchanged-since",
        metavar="REVISION",
        type=int,
        help="keep an agent that wrote after this revision; --yes needs it with --agent, and the dry run prints it",
    )
    removing.add_argument("--yes", action="store_true", help="remove the keys, each only if nobody has changed it")
    removing.add_argument(
        "--record",
        metavar="FILE",
        type=Path,
        help="write the removed keys with their values to a new JSON file; --yes needs it",
    )
    etcd.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    explicit = arguments.namespace if arguments.namespace is not None else os.environ.get("NIXL_ETCD_NAMESPACE")
    namespace = NamespaceName(DEFAULT_NAMESPACE if explicit is None else explicit)
    limit = parse_size(arguments.max_request_bytes)
    with client_of(arguments.endpoints, "give its URL", _TIMEOUT) as client:
        command = f"pytest-nixl etcd {','.join(client.endpoints)}"
        contents = survey_deployment(client, namespace, command=command, limit=limit, connect=not arguments.no_connect)
        if arguments.remove_dead:
            return _remove(arguments, client, contents, command)
    return _report(arguments, contents)


def _check(arguments: argparse.Namespace) -> None:
    """Check that the options fit together. :raises ValueError: if they do not."""
    for name in ("agent", "unchanged_since", "yes", "record"):
        value = getattr(arguments, name)
        present = value is not None and value is not False and value != []
        if present and not arguments.remove_dead:
            raise ValueError(f"--{name.replace('_', '-')} has no effect without --remove-dead: give both")
    if arguments.remove_dead and arguments.json:
        raise ValueError("--remove-dead prints no JSON: leave out --json; --record writes JSON")
    if arguments.yes and arguments.record is None:
        raise ValueError("--yes removes keys, and needs a record of them: give --record FILE, the name of a new file")
    if arguments.record is not None and not arguments.yes:
        raise ValueError("--record has nothing to record without --yes: give both")
    if arguments.yes and arguments.agent and arguments.unchanged_since is None:
        raise ValueError(
            "--yes with --agent needs --unchanged-since REVISION, so that an agent that started again is kept: run the "
            "command without --yes, which prints it"
        )
    if arguments.record is not None and arguments.record.exists():
        raise ValueError(f"{arguments.record} already exists: give --record the name of a new file")


def _report(arguments: argparse.Namespace, contents: DeploymentEtcd) -> int:
    if arguments.json:
        print(json.dumps(plain(contents), indent=1))
    else:
        for line in lines(contents, everything=arguments.all):
            print(line)
    return int(bool(contents.problems))


def _remove(arguments: argparse.Namespace, client: EtcdClient, contents: DeploymentEtcd, command: str) -> int:
    plan = plan_removal(contents, arguments.agent, arguments.unchanged_since)
    refusals = len(plan.refused)
    for refused in plan.refused:
        print(f"kept: {refused}")
    if not plan.dead:
        print("nothing to remove")
    elif not arguments.yes:
        _dry_run(arguments, plan, command, contents.namespace.text)
    else:
        removed = 0
        for removal in remove(client, plan, RemovalRecord(arguments.record, client.endpoints, plan.revision)):
            removed += removal.keys
            refusals += bool(removal.why_not)
            reason = f"; the others were kept, because {removal.why_not}" if removal.why_not else ""
            print(f"removed {plural(removal.keys, 'key')} of {removal.owner}{reason}")
        print(f"removed {plural(removed, 'key')}; {arguments.record} has them with their values")
    return int(refusals > 0)


def _dry_run(arguments: argparse.Namespace, plan: RemovalPlan, command: str, namespace: str) -> None:
    """Print which keys would be removed, and the command that removes them."""
    for dead in plan.dead:
        print(f"would remove {plural(len(dead.keys), 'key')} of {dead.owner}:")
        for key in dead.keys[:_MOST_KEYS]:
            print(f"  {escape(key.key)} (revision {key.mod_revision})")
        if len(dead.keys) > _MOST_KEYS:
            print(f"  and {len(dead.keys) - _MOST_KEYS:,} more")
    options = [f"--agent={quoted(name)}" for name in arguments.agent]
    if arguments.agent:
        since = plan.revision if arguments.unchanged_since is None else arguments.unchanged_since
        options += [f"--namespace={quoted(namespace)}", f"--unchanged-since={since}"]
    print("nothing is removed without --yes; to remove these keys, if their owners are dead:")
    print(" ".join([*map(shlex.quote, command.split()), "--remove-dead", *options, "--yes", "--record=removed.json"]))
