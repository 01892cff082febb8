# SPDX-License-Identifier: Apache-2.0
"""Change a seeded sample of lines, one at a time, and count the changes that the unit tests notice.

``python -m helpers.mutants [--sample=N] [--seed=N] [--jobs=N] [--least=PERCENT] [--quick] [--own] [MODULE…]``

cosmic-ray makes the changes; two operators are added here: a call that is left out, and ``all`` for ``any`` or ``min``
for ``max``. One run of the unit tests tells which tests run which line: coverage.py sees their own process, and
``child_lines`` those that they start. Tests that fail without any change are left out. A change is made in a copy of
the clone, and the tests that run its line run there until one fails: those of the module first. If it lives, the
module's tests that take long run. It has died when a test fails, or takes far longer than it may.

Changes are tried in no order, so that the outcomes of a run that was ended are a sample, too. ``--own`` saves the first
run: only the short tests that are named for a module (``TESTS``) are tried.

Not made are changes that no test could notice: of annotations, of what only a type checker reads, of decorators'
arguments, of log lines, of numbers in a name's time to wait (``…_SECONDS``, ``_NAP``, ``timeout=5.0``, ``deadline = now
+ 3 * limit``: no test may depend on them), and of the line that starts a module as a program. Nor is a change that is
no Python, such as ``if not found := f()``: it would die without a test.

Exit code 0: enough of the sample died; 1: too few did; 2: the tests fail without any change, or nothing can be chosen.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.exception_replacer import ExceptionReplacer
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome
from parso.python.tree import Name

from helpers import child_lines

#: What is sampled. The three modules left out need nvcc, torch and an account of Azure.
WHERE = (
    "judge", "session/gate", "cluster", "measure", "nixl/worker", "etcd",
    "checks/bandwidth/gpu_judge", "checks/control_path/worker", "checks/endpoints/worker", "checks/endurance/worker",
    "checks/faults/worker", "checks/kv_cache/link", "checks/kv_cache/worker", "checks/pattern/culprit",
    "checks/pattern/fairness", "checks/pattern/rank_flows", "checks/pattern/worker", "checks/raw_tools/judge",
    "checks/telemetry/worker",
)  # fmt: skip
LEFT_OUT = ("nixl/worker/devices/make_ptx", "nixl/worker/devices/by_torch", "nixl/worker/azure_blob")
#: The unit tests of each module besides ``PACKAGE/test_MODULE.py``. A folder's line is for its modules without one.
TESTS = {
    "cluster": "cluster/test_driver cluster/test_group_values",
    "cluster/command_check": "core/test_strict checks/test_doctor_ranks",
    "cluster/etcd": "cluster/test_group_values etcd_servers/test_rank0",
    "cluster/group": "cluster/test_registration cluster/test_membership core/test_strict cluster/test_group_values",
    "cluster/group_values": "cluster/test_registration cluster/test_group_values",
    "cluster/joining": "cluster/test_registration cluster/test_membership cluster/test_group_values",
    "cluster/logs": "report/test_outputs",
    "cluster/mailbox": "cluster/test_registration cluster/test_mailbox",
    "cluster/membership": "cluster/test_registration cluster/test_membership cluster/test_group_values",
    "cluster/messages": "core/test_strict cluster/test_peer_client cluster/test_mailbox cluster/test_driver",
    "cluster/peer_client": "cluster/test_peer_client cluster/test_driver",
    "cluster/rank_session": "cluster/test_rank_session cluster/test_driver",
    "cluster/peer_server": "cluster/test_leaving cluster/test_rank_session cluster/test_logs cluster/test_driver",
    "cluster/driver": "cluster/test_peer_client cluster/test_rank_session cluster/test_driver cluster/test_leaving",
    "etcd": "etcd/test_client etcd/test_client_members",
    "etcd/errors": "etcd/test_members etcd/test_bounded_http etcd/test_client",
    "etcd/maintenance": "etcd/test_members checks/test_deployment_etcd",
    "etcd/members": "etcd/test_members etcd/test_client etcd/test_client_members",
    "etcd/proxy": "etcd/test_proxy_events etcd/test_http2 etcd/test_proxy etcd/test_protobuf",
    "etcd/proxy/client": "etcd/test_proxy_events etcd/test_proxy",
    "etcd/transaction": "core/test_strict etcd/test_client cluster/test_membership",
    "etcd/watch": "etcd/test_bounded_http etcd/test_client",
    "judge/concurrent": "judge/test_concurrent checks/test_gpus_together",
    "judge/profiles": "checks/test_doctor_image model/test_machine model/test_findings",
    "judge/profile_table": "judge/test_profiles model/test_findings",
    "checks/bandwidth/gpu_judge": "checks/test_gpus_together",
    "checks/endpoints/worker": "nixl/test_endpoint_explanation",
    "nixl/endpoint_reading": "nixl/test_endpoint_explanation",
    "checks/kv_cache/link": "checks/test_kv_link",
    "checks/pattern/culprit": "checks/test_pattern_culprit checks/test_pattern_figures",
    "checks/pattern/fairness": "checks/test_pattern_fairness checks/test_pattern_figures",
    "checks/pattern/rank_flows": "checks/test_rank_flows checks/test_flow_steps",
    "checks/raw_tools/judge": "checks/test_raw_judge checks/test_raw_tools",
    "judge/regression": "judge/test_run_comparison",
    "judge/row": "model/test_carrier_bytes model/test_machine core/test_cpu_contention",
    "measure": "measure/test_launch measure/test_link",
    "measure/link": "nixl/test_row_transfers",
    "measure/launch": "measure/test_link",
    "nixl/worker": "processes/test_worker_process measure/test_link",
    "nixl/worker/__main__": "nixl/test_worker_error processes/test_worker_process",
    "nixl/worker/commands": "nixl/test_commands nixl/test_objects processes/test_worker_process measure/test_link",
    "checks/control_path/worker": "checks/test_control_path_calls checks/test_control_path",
    "nixl/worker/devices": "nixl/test_nvidia nixl/test_vram",
    "checks/faults/worker": "checks/test_fault_traffic checks/test_misuse",
    "checks/faults/worker/traffic": "checks/test_fault_traffic checks/test_transfer_faults",
    "nixl/worker/files": "nixl/test_files nixl/test_posix",
    "checks/pattern/worker/commands": "checks/test_rank_flows checks/test_flows",
    "checks/pattern/worker/flows": "checks/test_flows checks/test_flow_steps checks/test_rank_flows",
    "nixl/worker/forks": "processes/test_worker_parent",
    "checks/kv_cache/worker": "checks/test_kv_cache checks/test_kv_link",
    "checks/kv_cache/worker/commands": "checks/test_kv_cache checks/test_kv_link",
    "checks/kv_cache/worker/requests": "checks/test_kv_requests checks/test_kv_link",
    "nixl/worker/memory": "nixl/test_pattern checks/test_kv_cache nixl/test_commands measure/test_link",
    "checks/faults/worker/misuse": "checks/test_misuse",
    "nixl/worker/nixl_api": "nixl/test_nixl_api model/test_nixl_releases processes/test_worker_process",
    "nixl/worker/object_stores": "nixl/test_s3_server nixl/test_objects nixl/test_store_deadlines nixl/test_obj",
    "nixl/worker/objects": "nixl/test_objects nixl/test_store_deadlines nixl/test_obj",
    "checks/endurance/worker/cycles": "checks/test_resources checks/test_endurance",
    "nixl/worker/peer_scene": "checks/test_misuse checks/test_threads",
    "nixl/worker/s3": "checks/test_object_store nixl/test_s3_server nixl/test_store_deadlines nixl/test_obj",
    "nixl/worker/s3_faults": "nixl/test_obj",
    "checks/telemetry/worker": "checks/test_telemetry_counts",
    "checks/faults/worker/threads": "checks/test_threads",
    "nixl/worker/tools": "nixl/test_guard processes/test_external_program",
    "nixl/worker/transfer": "measure/test_link",
    "nixl/worker/vram": "nixl/test_vram",
    "session/gate": "session/test_gate_results",
}
#: The names of times to wait, whose digits may change. Some are counted in polls.
WAITS = re.compile(r"seconds|nap|timeout|deadline|grace|polls_between|interval$|_every$", re.IGNORECASE)
#: The most seconds that the tests of one change take without it. The quickest run first: most changes die at once.
MOST_SECONDS = 20.0
#: The tests that run for each change, and those that run for each that lived.
QUICK, LONG = "not long and not alone and not whole and not soak", "long and not alone and not whole and not soak"
#: The operators of cosmic-ray: of those that replace an operator by each other one, the nearest.
OPERATORS = (
    "AddNot", "NumberReplacer", "ReplaceAndWithOr", "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ReplaceFalseWithTrue", "ReplaceTrueWithFalse",
    "ZeroIterationForLoop", "ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_USub_UAdd",
    "ReplaceBinaryOperator_Add_Sub", "ReplaceBinaryOperator_Sub_Add", "ReplaceBinaryOperator_Mul_Div",
    "ReplaceBinaryOperator_Div_Mul", "ReplaceBinaryOperator_FloorDiv_Div", "ReplaceBinaryOperator_Mod_FloorDiv",
    "ReplaceBinaryOperator_Pow_Mul", "ReplaceBinaryOperator_BitOr_BitAnd", "ReplaceBinaryOperator_BitAnd_BitOr",
    "ReplaceBinaryOperator_LShift_RShift", "ReplaceBinaryOperator_RShift_LShift",
    "ReplaceComparisonOperator_Lt_LtE", "ReplaceComparisonOperator_LtE_Lt", "ReplaceComparisonOperator_Gt_GtE",
    "ReplaceComparisonOperator_GtE_Gt", "ReplaceComparisonOperator_Eq_NotEq", "ReplaceComparisonOperator_NotEq_Eq",
    "ReplaceComparisonOperator_Is_IsNot", "ReplaceComparisonOperator_IsNot_Is",
)  # fmt: skip
#: A test has noticed a change when it takes that many times as long as without it, and so many seconds. A busy machine
#: makes all tests slower: if one is late, the same tests run without the change, and the limit grows if they are slow.
TIMES, SECONDS = 10, 20
#: The most seconds of the tests of one change whose time without it is not known.
OWN_SECONDS = 300.0
#: The most seconds that the tests of a module may take without a change.
UNCHANGED = 3600.0
ROOT = Path(__file__).resolve().parents[2]


class SwapBuiltin(Operator):  # type: ignore[misc]
    """Replace ``all`` by ``any`` and ``min`` by ``max``, and the reverse."""

    OTHER: ClassVar = {"all": "any", "any": "all", "min": "max", "max": "min"}

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "name" and node.value in self.OTHER and node.get_next_leaf().value == "(":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return Name(self.OTHER[node.value], node.start_pos, prefix=node.prefix)

    @classmethod
    def examples(cls) -> Sequence[Any]:
        return ()


class LeaveOutCall(SwapBuiltin):
    """Leave out a statement that only calls a function."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        call = node.type in ("atom_expr", "power") and node.children[-1].type == "trailer"
        if call and node.parent.type == "simple_stmt" and node.children[-1].children[0].value == "(":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return Name("pass", node.start_pos, prefix=node.get_first_leaf().prefix)


@dataclass(frozen=True)
class Mutant:
    """One change: the operator's ``nth`` occurrence in a module, at a line."""

    module: str
    operator: str
    nth: int
    line: int
    column: int

    def code(self, source: str) -> str:
        found = mutate_code(source, operator(self.operator), self.nth)
        assert found is not None
        return str(found)

    def is_python(self) -> bool:
        try:
            ast.parse(self.code((ROOT / "pytest_nixl" / f"{self.module}.py").read_text()))
        except SyntaxError:
            return False
        return True


class OtherException(ExceptionReplacer):  # type: ignore[misc]
    """Replace an exception that is caught. cosmic-ray breaks the code of a handler of ``module.Error``."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "except_clause" and not any(leaf.value == "." for leaf in leaves(node.children[1])):
            yield from super().mutation_positions(node)


def leaves(node: Any) -> Iterator[Any]:
    """Yield the leaves of a node."""
    leaf = node.get_first_leaf()
    while leaf is not None and leaf.start_pos < node.end_pos:
        yield leaf
        leaf = leaf.get_next_leaf()


OWN: Mapping[str, type[Operator]] = {each.__name__: each for each in (SwapBuiltin, LeaveOutCall, OtherException)}


def operator(name: str) -> Operator:
    return OWN[name]() if name in OWN else get_operator(f"core/{name}")()


def modules(chosen: Sequence[str]) -> list[str]:
    """Return the modules below the chosen paths, as paths below ``pytest_nixl`` without ``.py``."""
    package = ROOT / "pytest_nixl"
    found = sorted(str(path.relative_to(package).with_suffix("")) for path in package.rglob("*.py"))
    below = {name for each in chosen for name in found if name == each or name.startswith(f"{each.rstrip('/')}/")}
    return sorted(below.difference(LEFT_OUT))


@cache  # a file that is written while this runs has not been run without a change
def tests_of(module: str) -> tuple[str, ...]:
    """Return the test files of a module: its own, those of its line, or those of the nearest folder's line."""
    package, _, name = module.rpartition("/")
    unit = ROOT / "tests" / "unit"
    own = f"{package.removesuffix('/worker')}/test_{name}"
    files = TESTS.get(module, "").split()
    files = [own, *files] if (unit / f"{own}.py").exists() and own not in files else files
    while not files and package:
        files, package = TESTS.get(package, "").split(), package.rpartition("/")[0]
    return tuple(f"tests/unit/{file}.py" for file in dict.fromkeys(files))


def waits_of(node: ast.AST) -> list[ast.expr]:
    """Return the numbers in what a node gives as times to wait: constants, default values, keywords and assignments."""
    named: list[tuple[str, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                named += [(ast.unparse(one), value) for one, value in zip(target.elts, node.value.elts, strict=False)]
            else:
                named.append((ast.unparse(target), node.value))
    elif isinstance(node, ast.AnnAssign):
        named.append((ast.unparse(node.target), node.value))
    elif isinstance(node, ast.keyword):
        named.append((node.arg or "", node.value))
    elif isinstance(node, ast.arguments):
        given = [*node.posonlyargs, *node.args]
        named += zip([each.arg for each in given[len(given) - len(node.defaults) :]], node.defaults, strict=True)
        named += zip([each.arg for each in node.kwonlyargs], node.kw_defaults, strict=True)
    return [
        part
        for name, value in named
        if value is not None and WAITS.search(name)
        for part in ast.walk(value)
        if isinstance(part, ast.Constant)
    ]


def unchanging(source: str) -> list[tuple[int, int, int, int]]:
    """Return the spans whose changes no test can notice, as the module's docstring lists them."""
    spans = []
    for node in ast.walk(ast.parse(source)):
        parts = [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            parts.append(node)
        if isinstance(node, ast.If) and "'__main__'" in ast.dump(node.test):
            parts.append(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "'_log'" in ast.dump(node.value.func):
            parts.append(node)
        parts += getattr(node, "decorator_list", [])
        parts += waits_of(node)
        for part in parts:
            if isinstance(part, (ast.expr, ast.stmt)):
                spans.append((part.lineno, part.col_offset, part.end_lineno or 0, part.end_col_offset or 0))
    return spans


def mutants_of(module: str, seed: int) -> list[Mutant]:
    """Return one change for each place and kind of operator of a module."""
    source = (ROOT / "pytest_nixl" / f"{module}.py").read_text()
    spans, nodes = unchanging(source), list(ast_nodes(get_ast(source)))
    places: dict[tuple[str, int, int], list[Mutant]] = defaultdict(list)
    for name in (*OPERATORS, *OWN):
        one = operator(name)
        positions = [(node, position) for node in nodes for position in one.mutation_positions(node)]
        for nth, (node, ((line, column), _)) in enumerate(positions):
            # The asterisk of a signature is no operation.
            lone = node.type == "operator" and node.parent.type in ("parameters", "param")
            same = lone or any((top, left) <= (line, column) < (end, right) for top, left, end, right in spans)
            if not same:
                places[name, line, column].append(Mutant(module, name, nth, line, column))
    return [random.Random(f"{seed} {place} {module}").choice(found) for place, found in sorted(places.items())]


@dataclass(frozen=True)
class Covering:
    """Which tests run which line of which module, in their process or in another, and the seconds of each test."""

    lines: Mapping[str, Mapping[int, set[str]]]
    elsewhere: Mapping[str, Mapping[int, set[str]]]
    seconds: Mapping[str, float]

    @classmethod
    def read(cls, data: Path, children: Path, times: Path) -> Covering:
        """Read the data of coverage.py, with a context for each test, of ``child_lines``, and of a JUnit report.

        Tests that failed are left out.
        """
        from coverage import CoverageData

        read = CoverageData(str(data))
        read.read()
        seconds, failed = {}, set()
        for case in ElementTree.parse(times).iter("testcase"):
            folder, _, inside = f"{case.get('classname')}".rpartition(".test_")
            module, *classes = inside.split(".")
            name = "::".join([f"{folder.replace('.', '/')}/test_{module}.py", *classes, f"{case.get('name')}"])
            seconds[name] = float(case.get("time") or 0)
            if case.find("failure") is not None or case.find("error") is not None:
                failed.add(name)
                print(f"left out, because it fails without any change: {name}", flush=True)
        lines = {
            file.rpartition("/pytest_nixl/")[2].removesuffix(".py"): {
                line: {name.rpartition("|")[0] for name in names if name and "\n" not in name} - failed
                for line, names in read.contexts_by_lineno(file).items()
            }
            for file in read.measured_files()
        }
        elsewhere = {
            module: {line: names - failed for line, names in found.items()}
            for module, found in child_lines.read(children).items()
        }
        return cls(lines, elsewhere, {name: taken for name, taken in seconds.items() if name not in failed})

    def tests(self, mutant: Mutant) -> tuple[list[str], float]:
        """Return the tests that run first with a change, and the seconds that they take: those of the module first.

        A line that runs when its module is imported belongs to every test of the module. A process that several tests
        of a file use counts as the first one's: the file's others come last.
        """
        own = tests_of(mutant.module)
        here, there = (each.get(mutant.module, {}) for each in (self.lines, self.elsewhere))
        line = next((line for line in range(mutant.line, mutant.line - 6, -1) if here.get(line) or there.get(line)), 0)
        found = here.get(line, set()) | there.get(line, set())
        if not found:
            found = {name for lines in (here, there) for names in lines.values() for name in names}
        files = {name.partition("::")[0] for name in there.get(line, ())}
        after = {name for name in self.seconds if name.partition("::")[0] in files} - found
        names = sorted(
            found | after,
            key=lambda name: (name in after, name.partition("::")[0] not in own, self.seconds.get(name, 1.0), name),
        )
        if not names:
            return list(own), sum(taken for name, taken in self.seconds.items() if name.partition("::")[0] in own)
        chosen: list[str] = []
        total = 0.0
        for name in names:
            seconds = self.seconds.get(name, 1.0)
            if not chosen or total + seconds <= MOST_SECONDS:
                chosen.append(name)
                total += seconds
        return chosen, total


class Tests:
    """Runs tests in copies of the clone, one for each job."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._folder = folder
        self._copies: SimpleQueue[Path] = SimpleQueue()
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        for number in range(jobs):
            for name in filter(None, names):
                if (ROOT / name).is_file():
                    (folder / str(number) / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, folder / str(number) / name)
            self._copies.put(folder / str(number))

    def run(
        self,
        tests: Sequence[str],
        marks: str,
        limit: float,
        mutant: Mutant | None = None,
        more: Sequence[str] = ("-x",),
    ) -> tuple[str, float]:
        """Return ``passed``, ``failed``, ``none`` or ``late``, and the seconds that the tests took.

        :param tests: files, or tests of files.
        :param more: further arguments of pytest.
        """
        copy = self._copies.get()
        path = copy / "pytest_nixl" / f"{mutant.module}.py" if mutant is not None else None
        source = path.read_text() if path is not None else ""
        listed = copy / "tests.txt"
        listed.write_text("\n".join(tests))
        try:
            if mutant is not None and path is not None:
                path.write_text(mutant.code(source))
            paths = f"{copy}:{copy / 'tests'}"
            command = f"env -C {copy} PYTHONPATH={paths} {sys.executable} -m pytest -W error -p no:cacheprovider -q"
            start = time.monotonic()
            outcome, output = run_tests(f"{command} {' '.join(more)} -m '{marks}' @{listed}", limit)
            seconds = time.monotonic() - start
        finally:
            if path is not None:
                path.write_text(source)
            self._copies.put(copy)
        if outcome is TestOutcome.SURVIVED:
            return "passed", seconds
        if output == "timeout":
            return "late", seconds
        last = output.strip().splitlines()[-1:] or [""]
        found = re.search("passed|failed|error", last[0])
        if mutant is None and not ("deselected" in last[0] and found is None):
            print(output[-10000:])
        if "deselected" in last[0] and found is None:
            return "none", seconds
        if mutant is not None:
            named = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            print(f"{mutant.module}.py:{mutant.line} {mutant.operator} by {named[1] if named else last[0]}", flush=True)
        return "failed", seconds

    def covering(self, files: Sequence[str], jobs: int) -> Covering | None:
        """Run the unit tests that are not long, and return which tests run which line; None: there is no test."""
        # Not named like the data: pytest-cov erases coverage.* first.
        names = ("coverage", "settings.ini", "times.xml", "children")
        data, settings, times, children = (self._folder / name for name in names)
        settings.write_text(f"[run]\nsource = pytest_nixl\ndata_file = {data}\ncore = ctrace\n")
        more = (f"-n{jobs}", "--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report=",
                f"--junitxml={times}", "-p", "helpers.child_lines")  # fmt: skip
        with child_lines.installed(self._folder / "0", children), pytest.MonkeyPatch.context() as patch:
            patch.setenv(child_lines.FILE, str(children))
            result, seconds = self.run(files, QUICK, UNCHANGED, more=more)
        if result not in ("passed", "failed"):
            print(f"without a change, the result of the unit tests after {seconds:.0f} s is: {result}")
            return None
        print(f"the unit tests took {seconds:.0f} s", flush=True)
        return Covering.read(data, children, times)

    def unchanged(self, file: str, marks: str) -> float | None:
        """Return the seconds that a file's tests take without a change; 0: it has none; None: they fail twice."""
        for _ in range(2):
            result, seconds = self.run([file], marks, UNCHANGED)
            if result in ("passed", "none"):
                return seconds if result == "passed" else 0.0
        return None

    def own(self, mutant: Mutant) -> str:
        """Return what :meth:`run` returns first with a change, of the short tests that are named for its module."""
        files = tests_of(mutant.module)
        return self.run(files, QUICK, OWN_SECONDS, mutant)[0] if files else "none"

    def quick(self, mutant: Mutant, covering: Covering) -> str:
        """Return what :meth:`run` returns first with a change, of the tests that run its line."""
        chosen, seconds = covering.tests(mutant)
        if not chosen:
            return "none"
        limit = SECONDS + TIMES * seconds
        result, _ = self.run(chosen, QUICK, limit, mutant)
        if result == "late":  # because of the change, if they take less without it
            _, now = self.run(chosen, QUICK, UNCHANGED)
            if SECONDS + TIMES * now > limit:
                result, _ = self.run(chosen, QUICK, SECONDS + TIMES * now, mutant)
        return result

    def of_mutant(self, mutant: Mutant, marks: str, seconds: Mapping[str, float | None]) -> str:
        """Return what :meth:`run` returns first with a change; ``seconds`` is of each file without any."""
        files = [file for file in tests_of(mutant.module) if seconds[file]]
        limit = TIMES * sum(seconds[file] or 0.0 for file in files) + SECONDS
        return self.run(files, marks, limit, mutant)[0] if files else "none"


def described(mutant: Mutant) -> str:
    """Return the place of a change, and the line before and after it."""
    source = (ROOT / "pytest_nixl" / f"{mutant.module}.py").read_text()
    before, after = source.splitlines(), mutant.code(source).splitlines()
    number = next(n for n in range(len(before)) if before[n : n + 1] != after[n : n + 1])
    change = f"    - {before[number].strip()}\n    + {after[number].strip()}"
    return f"{mutant.module}.py:{number + 1} {mutant.operator}\n{change}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sample", type=int, default=400, help="the number of changes; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--after", type=int, default=0, help="leave out that many of the sample, to go on with a run")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--least", type=float, default=90.0, help="the percentage that must die")
    parser.add_argument("--tests", default="tests/unit", help="the tests that are tried")
    parser.add_argument("--own", action="store_true", help="try only short tests that are named for the module")
    parser.add_argument("--quick", action="store_true", help="leave out the tests that take long")
    parser.add_argument("modules", nargs="*", default=WHERE, help="paths below pytest_nixl, such as judge/row")
    options = parser.parse_args()
    every = [mutant for module in modules(options.modules) for mutant in mutants_of(module, options.seed)]
    # A smaller sample is the beginning of a larger one, and a change of the code changes little of it.
    every.sort(key=lambda each: random.Random(f"{options.seed} {each.module} {each.operator} {each.nth}").random())
    chosen = list(islice(filter(Mutant.is_python, every), options.after, options.sample or None))
    if not chosen:
        print(f"no change can be made in {' '.join(options.modules)}: give paths below pytest_nixl, such as judge/row")
        return 2
    print(f"{len(chosen)} of {len(every)} changes, seed {options.seed}", flush=True)
    lives = chosen
    late = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        tests = Tests(Path(folder), options.jobs)
        judge = tests.own
        if not options.own:
            covering = tests.covering(options.tests.split(), options.jobs)
            if covering is None:
                print("the unit tests cannot be run")
                return 2
            judge = partial(tests.quick, covering=covering)
        for marks in (QUICK,) if options.quick or options.own else (QUICK, LONG):
            if marks == LONG:
                files = sorted({file for mutant in lives for file in tests_of(mutant.module)})
                seconds = dict(zip(files, pool.map(partial(tests.unchanged, marks=marks), files), strict=True))
                if broken := [file for file in files if seconds[file] is None]:
                    print(f"these tests fail without any change: {' '.join(broken)}")
                    return 2
                judge = partial(tests.of_mutant, marks=marks, seconds=seconds)
            lived: list[Mutant] = []
            answers = {pool.submit(judge, mutant): mutant for mutant in lives}
            for answer in as_completed(answers):
                mutant, result = answers[answer], answer.result()
                late += result == "late"
                lived += [mutant] if result in ("passed", "none") else []
                print(f"{mutant.module}.py:{mutant.line} {mutant.operator} {result}", flush=True)
            lives = sorted(lived, key=lambda each: (each.module, each.line))
        print("\n".join(described(mutant) for mutant in lives))
    died = len(chosen) - len(lives)
    share = 100 * died / len(chosen)
    print(f"{died} of {len(chosen)} changes died ({share:.1f} %), {late} of them by their time")
    return 0 if share >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
