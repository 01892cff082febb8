# SPDX-License-Identifier: Apache-2.0
"""``pytest-nixl profile``: show a profile, learn one from good runs, or judge recorded output of nixlbench by one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from pytest_nixl.checks.nixlbench.verdict import judge_run
from pytest_nixl.core import units
from pytest_nixl.judge.profile_learning import RUNS_FORM, learned_profile
from pytest_nixl.judge.profiles import Profile, added_profiles, bundled_profiles, load_profile
from pytest_nixl.judge.row import rate
from pytest_nixl.model.expectation import SOFTWARE, Expectation, Machine, ReferenceRun
from pytest_nixl.model.figure import FIGURE_KINDS, Bound
from pytest_nixl.model.nixlbench_table import read_files
from pytest_nixl.model.verdicts import Outcome, outcome
from pytest_nixl.report.table import lines


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    profile = commands.add_parser("profile", help="show a profile, learn one, or judge nixlbench output by one")
    actions = profile.add_subparsers(required=True, metavar="ACTION")

    listed = actions.add_parser("list", help="list the profiles that can be named, one in a line")
    listed.set_defaults(run=_list)

    show = actions.add_parser("show", help="print what a profile expects, and the source of each figure")
    show.add_argument("profile", metavar="NAME|FILE", help="a profile of pytest-nixl, or a TOML file")
    show.set_defaults(run=_show)

    learned = actions.add_parser("learn", help="write a profile from runs on a machine that is known to work well")
    learned.add_argument("runs", metavar="RUN.json", type=Path, nargs="+", help=RUNS_FORM)
    learned.add_argument("--name", required=True, help="the name of the new profile")
    learned.add_argument(
        "--like",
        metavar="NAME|FILE",
        help="a profile whose [machine] and required checks the new one has, too, such as that of `pytest-nixl init`",
    )
    learned.add_argument("--output", metavar="FILE", type=Path, required=True, help="a new file")
    learned.set_defaults(run=_learn)

    judged = actions.add_parser("judge", help="judge the output of nixlbench, without running anything")
    judged.add_argument("profile", metavar="PROFILE", help="a profile of pytest-nixl, or a TOML file")
    judged.add_argument(
        "--nixlbench",
        metavar="FILE",
        type=Path,
        required=True,
        action="append",
        help="the stdout and stderr of rank 0, which has the table; give the option again for each other rank",
    )
    judged.add_argument("--gate", action="store_true", help="also fail undecided rows, as --nixl-gate does")
    judged.set_defaults(run=_judge)


def _list(_: argparse.Namespace) -> int:
    names = sorted({*bundled_profiles(), *added_profiles()})
    width = max(map(len, names))
    for name in names:
        profile = load_profile(name)
        note = "" if profile.expectations else " (expects nothing of rows yet)"
        print(f"{name:<{width}}  {profile.summary}{note}")
    return 0


def _learn(arguments: argparse.Namespace) -> int:
    like = load_profile(arguments.like) if arguments.like is not None else None
    text, remarks = learned_profile(arguments.name, arguments.runs, like)
    try:
        with arguments.output.open("x") as file:
            file.write(text + "\n")
    except FileExistsError:
        raise ValueError(f"{arguments.output} already exists: give the path of a new file") from None
    for remark in remarks:
        print(remark)
    print(f"{arguments.output}: a profile of {text.count('[[expect]]')} rows from {len(arguments.runs)} runs")
    return 0


def _judge(arguments: argparse.Namespace) -> int:
    profile = load_profile(arguments.profile)
    output = read_files(arguments.nixlbench)
    try:
        judged = judge_run(output, profile)
    except ValueError as error:
        raise ValueError(f"{' and '.join(map(str, arguments.nixlbench))} {error}") from None
    print(f"profile: {profile.name} ({profile.path_or_origin})")
    for note in judged.notes:
        print(note)
    for line in lines(judged.results, gate=arguments.gate):
        print(line.text)
    failed = any(outcome(result.verdict, gate=arguments.gate) is Outcome.FAIL for result in judged.results)
    return int(failed)


def _show(arguments: argparse.Namespace) -> int:
    for line in _shown(load_profile(arguments.profile)):
        print(line)
    return 0


def _shown(profile: Profile) -> Iterator[str]:
    yield f"{profile.name}: {profile.summary}" if profile.summary else profile.name
    yield f"from {profile.path_or_origin}"
    yield f"required checks: {', '.join(profile.required) or 'none'}"
    if profile.machine is not None:
        yield from _machine(profile.machine)
    if profile.image.plugins:
        yield f"plugins that must load: {', '.join(profile.image.plugins)}"
    if profile.image.etcd_uri_patch is not None:
        must = "must" if profile.image.etcd_uri_patch else "must not"
        yield f"etcd's client library {must} skip the validation of addresses"
    if profile.image.versions:
        yield f"versions: {'; '.join(f'{SOFTWARE[key]} {limit.text}' for key, limit in profile.image.versions.items())}"
    for expectation in profile.expectations:
        yield ""
        yield _rows(expectation)
        yield f"    {', '.join(_figures(expectation))}"
        yield from _sources(expectation.source)
    for bound in profile.bounds:
        yield ""
        yield from _bound(bound)
    for accepted in profile.accepted:
        yield f"accepted until {accepted.expires}: {accepted.id}: {accepted.reason}"
    for figure in profile.references:
        yield ""
        yield from _recorded(figure)


def _machine(machine: Machine) -> Iterator[str]:
    kind = f" ({machine.nic_kind})" if machine.nic_kind else ""
    parts = []
    if machine.nics:
        parts.append(f"{machine.nics} NIC{'' if machine.nics == 1 else 's'} of {rate(machine.nic_rate)} each{kind}")
    if machine.gpus is not None or machine.gpu:
        number = "" if machine.gpus is None else str(machine.gpus)
        parts.append(" ".join(filter(None, (number, machine.gpu, "GPUs"))))
    if machine.nics_per_gpu is not None:
        parts.append(f"{machine.nics_per_gpu} of the NICs for each GPU")
    yield f"machine: {', '.join(parts)}"
    yield from _sources(machine.source)


def _bound(bound: Bound) -> Iterator[str]:
    kind = FIGURE_KINDS[bound.figure]
    parts = [
        f"{label} {','.join(bound.labels[label])}" if label in bound.labels else f"any {label}" for label in kind.labels
    ]
    limits = (("at most", bound.at_most), ("at least", bound.at_least))
    yield f"{bound.figure} of {', '.join(parts)}"
    yield f"    {', '.join(f'{direction} {kind.unit.show(value)}' for direction, value in limits if value is not None)}"
    yield from _sources(bound.source)


def _recorded(figure: ReferenceRun) -> Iterator[str]:
    parts = [figure.backend or "any backend", figure.op or "any operation", str(figure.memory or "any memory")]
    if figure.blocks is not None:
        parts.append("..".join(units.format_size(size) for size in dict.fromkeys(figure.blocks)))
    texts = [rate(figure.bandwidth)] if figure.bandwidth is not None else []
    for name, value in (("p50", figure.p50), ("p99", figure.p99), ("latency", figure.latency)):
        if value is not None:
            texts.append(f"{name} {units.microseconds(value)} us")
    doubt = "" if figure.plausible else " (implausible)"
    yield f"for reference only: {' '.join(parts)}: {', '.join(texts)}{doubt}"
    if figure.note:
        yield f"    {figure.note}"
    yield from _sources(figure.source)


def _sources(source: str) -> Iterator[str]:
    for sentence in source.splitlines():
        if sentence.strip():
            yield f"    source: {sentence.strip()}"


def _rows(expectation: Expectation) -> str:
    """Return a name for the rows of an expectation: ``UCX WRITE,READ DRAM:DRAM 4KiB..512KiB``."""
    parts = [
        ",".join(expectation.backend or ("any backend",)),
        ",".join(expectation.op or ("any operation",)),
        ",".join(str(pair) for pair in expectation.memory or ()) or "any memory",
    ]
    if expectation.blocks is None:
        parts.append("any block")
    else:
        parts.append("..".join(units.format_size(size) for size in dict.fromkeys(expectation.blocks)))
    for name in ("batch", "depth", "notify", "pages"):
        if (values := getattr(expectation, name)) is not None:
            parts.append(f"{name} {','.join(map(str, values))}")
    return " ".join(parts)


def _figures(expectation: Expectation) -> Iterator[str]:
    if expectation.floor is not None:
        yield f"at least {rate(expectation.floor)}"
    if expectation.ceiling is not None:
        yield f"at most {rate(expectation.ceiling)}"
    for name, bound in (("p50", expectation.p50), ("p99", expectation.p99)):
        if bound is not None:
            yield f"{name} at most {units.microseconds(bound)} us"
    if expectation.transports is not None:
        yield f"over {' or '.join(expectation.transports)}"
    if expectation.raw is not None:
        yield f"raw: at least {100 * expectation.raw:g} % of what the raw tool moves"
