# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl doctor``: check this machine, or a recorded one, without running pytest."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_nixl.checks.doctor.catalogue import any_failed, examine, plain_results, result_lines
from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.core.lazy_module import lazy_module
from pytest_nixl.core.redaction import hide_all, hider
from pytest_nixl.core.strict import printable
from pytest_nixl.host.network import SIDE_CHANNEL_PORT
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.judge.profiles import load_profile
from pytest_nixl.measure.transfer_proof import ProofsInAdvance
from pytest_nixl.processes.supervisor import close_supervisor
from pytest_nixl.session.parsers import parse_backends

if TYPE_CHECKING:
    from pytest_nixl.checks.doctor import transfers
    from pytest_nixl.host import facts as host_facts
else:  # the first workers load NIXL while this process imports them
    transfers = lazy_module("pytest_nixl.checks.doctor.transfers")
    host_facts = lazy_module("pytest_nixl.host.facts")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser("doctor", help="check this machine, or a recorded one, and print what is wrong")
    doctor.add_argument(
        "--profile", metavar="NAME|FILE", default="loopback", help="the profile of the machine (default: loopback)"
    )
    doctor.add_argument("--gate", action="store_true", help="also fail undecided checks, as --nixl-gate does")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("-v", "--verbose", action="store_true", help="print each check, not only what is not good")
    doctor.add_argument(
        "--image",
        action="store_true",
        help="run only the checks that work while an image is built: they need no GPU, no network card and no etcd",
    )
    doctor.add_argument(
        "--no-transfer",
        dest="transfer",
        action="store_false",
        help="do not move bytes between two processes at the end",
    )
    add_sources(doctor)
    doctor.set_defaults(run=_run)


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the facts come from."""
    parser.add_argument(
        "--root", metavar="DIR", help="read the machine from a tree of `pytest-nixl facts --record DIR`"
    )
    parser.add_argument("--backend", metavar="NAME[,NAME]", help="backends to try (default: NIXL_BACKEND, else UCX)")
    parser.add_argument("--etcd", metavar="URL[,URL]", help="the etcd (default: NIXL_ETCD_ENDPOINTS, ETCD_ENDPOINTS)")
    parser.add_argument(
        "--peer", metavar="HOST[:PORT]", action="append", default=[], help="a host to reach; repeatable"
    )
    parser.add_argument(
        "--side-channel",
        metavar="HOST[:PORT]",
        action="append",
        default=[],
        help="an engine of vLLM whose NIXL side channel must answer, such as prefill's, asked in decode's pod (default "
        f"port: {SIDE_CHANNEL_PORT}, as VLLM_NIXL_SIDE_CHANNEL_PORT); repeatable",
    )
    parser.add_argument("--nixlbench", metavar="PATH", default="", help="the nixlbench to check (default: from PATH)")


def _run(arguments: argparse.Namespace) -> int:
    profile = load_profile(arguments.profile)
    root = FactsRoot(arguments.root)
    transfer = arguments.transfer and root.live and not arguments.image
    facts, backends = gathered(arguments, root, image=arguments.image, transfer=transfer)

    requirements = Requirements(profile, backends, image=arguments.image)
    answers = examine(facts, requirements, gate=arguments.gate)
    hide = hider(os.environ)
    if arguments.json:
        print(json.dumps(hide_all(plain_results(facts, requirements, answers), hide), indent=1))
    else:
        colours = _colours()
        note = ""
        if not (profile.machine and (profile.machine.nics or profile.machine.gpus)) and not arguments.image:
            note = (
                f"not noticed by the profile {profile.name}: a GPU or an RDMA device that is missing. `pytest-nixl "
                "init` on a good host writes a profile that names them, for --profile"
            )
        for line in result_lines(answers, every=arguments.verbose, note=note):
            colour = colours.get(line.outcome.name, "") if line.outcome is not None else ""
            # Only these control characters are ours; what the command prints otherwise is escaped.
            write = getattr(sys.stdout, "write_raw", sys.stdout.write)
            write(f"{colour}{printable(hide(line.text))}{colour and colours['END']}\n")
    return int(any_failed(answers))


def gathered(
    arguments: argparse.Namespace, root: FactsRoot, *, image: bool = False, transfer: bool = False
) -> tuple[host_facts.Facts, tuple[str, ...]]:
    """Gather the facts that the options ask for.

    :param arguments: the options of :func:`add_sources`.
    :param root: the machine or the recorded tree to read.
    :param image: whether to leave out etcd and peers, as for an image that is being built.
    :param transfer: whether two workers of this machine move bytes.
    :returns: the facts, and the backends to judge.
    :raises ValueError: if the recorded tree is not one that this version can read.
    """
    backend_text = arguments.backend or (os.environ.get("NIXL_BACKEND") if root.live else "")
    backends = parse_backends(backend_text or "UCX")
    proofs = ProofsInAdvance(backends) if transfer else None
    try:
        with refuse_unreadable_tree(root):
            facts = host_facts.gather(
                root,
                backends=backends,
                etcd="" if image else arguments.etcd,
                nixlbench=arguments.nixlbench,
                peers=() if image else arguments.peer,
                side_channels=() if image else arguments.side_channel,
            )
        if proofs is not None:
            facts = transfers.with_transfers(facts, proofs.results(gpus=bool(facts.gpu.gpus)))
    finally:
        if proofs is not None:
            proofs.close()
        close_supervisor()
    recorded = tuple(backend.name for backend in facts.software.backends)
    return facts, backends if root.live or backend_text else recorded or backends


@contextmanager
def refuse_unreadable_tree(root: FactsRoot) -> Iterator[None]:
    """Refuse a recorded tree whose answers have another form. :raises ValueError: in one sentence."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        if root.live:
            raise
        raise ValueError(
            f"{root.folder} is not a tree that this version can read ({error!r}): record it again with "
            "`pytest-nixl facts --record DIR`"
        ) from None


def _colours() -> dict[str, str]:
    """Return the terminal's colour of each outcome; none if stdout is not a terminal, or NO_COLOR is set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return {}
    return {"PASS": "\033[32m", "WARN": "\033[33m", "FAIL": "\033[31m", "SKIP": "\033[2m", "END": "\033[0m"}
