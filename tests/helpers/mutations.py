# SPDX-License-Identifier: Apache-2.0
"""Changes of one place of a module: what people get wrong (``MEANING``), and another operator (``OPERATORS``).

A function of these tables gets each node of the module's tree and yields its changes as ``(start, end, text)``: the
offsets of the replaced bytes, and what replaces them. Not made are changes that no test could notice: of annotations,
of what only a type checker reads, of decorators, of log lines, of ``__all__``, of the line that starts a module as a
program, and of the numbers in a name's time to wait (``…_SECONDS``, ``timeout=5.0``), because no test may depend on it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

Edit = tuple[int, int, str]
#: The names of times to wait, whose numbers may change. Some are counted in polls.
WAITS = re.compile(r"seconds|nap|timeout|deadline|grace|polls_between|interval$|_every$", re.IGNORECASE)
#: Words that name one of two sides, ends or units, in either direction.
SIDES = (
    "initiator target", "prefill decode", "local remote", "source destination", "left right", "before after",
    "first last", "first second", "old new", "start end", "begin end", "low high", "lower upper", "minimum maximum",
    "least most", "floor ceiling", "baseline current", "sent received", "send receive", "read write", "rx tx",
    "reader writer", "client server", "expected measured", "GB GiB", "GB GIB", "MB MIB", "KB KIB", "KIB MIB",
    "MIB GIB", "us ms", "ms s", "host name", "rank ranks", "bytes blocks", "batch depth", "passed failed",
)  # fmt: skip
#: Calls by name, and those that do the opposite, or less.
OPPOSITES = {
    "max": "min", "all": "any", "median": "max", "startswith": "endswith", "partition": "rpartition",
    "split": "rsplit", "removeprefix": "removesuffix", "lstrip": "rstrip", "find": "rfind", "floor": "ceil",
    "union": "intersection", "intersection": "difference",
}  # fmt: skip
#: Functions and methods that return what they get with something taken out, replaced or put in order.
FILTERS = re.compile(
    r"hide|redact|escape|print|clean|strip|shown|sort|set$|unique|fold|quote|short|lower|upper|normal|resolve|filter"
    r"|without|abs$|round$|fromkeys|replace|remove|reversed|expand"
)
#: Keywords that mostly say what is so without them: of what is as long, in UTF-8, and argparse's name of an option.
DEFAULTS = ("strict", "encoding", "dest")
CLOCK = re.compile(r"\b(monotonic|perf_counter|time|now|clock|process_time)(_ns)?\(")
#: Of the source of a regular expression: an alternative, an anchor, and a group that is not repeated.
PARTS = (r"\|[^|()\[\]'\"]+(?=[|)'\"])", r"\\b|\^(?!\])|(?<!\.\*)\$(?=['\"])", r"\((?:\?:)?[^()]*\)(?![?*+{])")
#: Iterables that may have no end.
ENDLESS = re.compile(r"count|repeat|iter\(|poll|wait|stdin|watch|stream|events|lines\(")
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"), ast.Pow: ("**", "*"), ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|"),
    ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
}  # fmt: skip


class Source:
    """A module's text with the place and the parent of each node."""

    def __init__(self, text: str) -> None:
        self.bytes = text.encode()
        self.tree = ast.parse(text)
        self._lines = [0, *accumulate(len(line) for line in self.bytes.splitlines(keepends=True))]
        self.parents: dict[ast.AST, ast.AST] = {}
        self.names: set[str] = set()
        for node in ast.walk(self.tree):
            self.parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))
            self.names.add(getattr(node, "id", getattr(node, "attr", getattr(node, "arg", None))) or "")

    def span(self, node: ast.AST) -> tuple[int, int]:
        start, end = (getattr(node, name) for name in ("lineno", "end_lineno"))
        return self._lines[start - 1] + node.col_offset, self._lines[end - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def line(self, offset: int) -> int:
        return self.bytes.count(b"\n", 0, offset) + 1

    def replace(self, node: ast.AST, text: str) -> Edit:
        return (*self.span(node), text)

    def swap(self, first: ast.AST, second: ast.AST) -> Edit:
        """Exchange two nodes; what is between them stays."""
        (start, middle), (other, end) = self.span(first), self.span(second)
        return start, end, f"{self.text(second)}{self.bytes[middle:other].decode()}{self.text(first)}"

    def drop(self, nodes: Sequence[ast.AST], at: int) -> Edit:
        """Leave out one of several nodes with what separates it from the next, or from the one before."""
        start, end = self.span(nodes[at])
        if at + 1 < len(nodes):
            return start, self.span(nodes[at + 1])[0], ""
        return self.span(nodes[at - 1])[1], end, ""


def _alike(first: ast.AST, second: ast.AST) -> bool:
    """Whether two expressions look like values of one type, and are not the same."""
    plain = (ast.Name, ast.Attribute, ast.Subscript)
    if isinstance(first, ast.Constant) and isinstance(second, ast.Constant):
        return type(first.value) is type(second.value) and first.value != second.value
    both = isinstance(first, plain) and isinstance(second, plain)
    return (both or type(first) is type(second) is ast.Call) and ast.dump(first) != ast.dump(second)


def _elements(node: ast.AST, source: Source) -> Sequence[ast.expr]:
    """Return the elements of a sequence that is not taken apart at once, nor a type's arguments."""
    parent = source.parents.get(node)
    if not isinstance(node, (ast.Tuple, ast.List, ast.Set)) or not isinstance(
        getattr(node, "ctx", ast.Load()), ast.Load
    ):
        return ()
    apart = isinstance(parent, ast.Assign) and any(isinstance(target, ast.Tuple) for target in parent.targets)
    return () if apart or isinstance(parent, ast.Subscript) else node.elts


def _has_order(node: ast.AST, source: Source) -> bool:
    """Whether the order of a sequence means something: not of a set, nor of what is only looked up."""
    parent = source.parents.get(node)
    searched = isinstance(parent, ast.Compare) and isinstance(parent.ops[-1], (ast.In, ast.NotIn))
    called = source.text(parent.func).rpartition(".")[2] if isinstance(parent, ast.Call) else ""
    by_name = called in ("set", "frozenset", "isinstance", "startswith", "endswith")
    return not (searched or by_name or isinstance(node, ast.Set) or isinstance(parent, ast.ExceptHandler))


def swap_arguments(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Swap two arguments, fields or elements that look like values of one type."""
    groups: list[Sequence[ast.expr]] = [_elements(node, source) if _has_order(node, source) else ()]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") not in ("max", "min", "suppress"):
        groups += [node.args, [keyword.value for keyword in node.keywords]]
    for first, second in (pair for group in groups for pair in pairwise(group)):
        if _alike(first, second):
            yield source.swap(first, second)


def drop_element(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Leave out an element of a sequence, an entry of a dictionary, a keyword, or one side of a union."""
    elements: Sequence[ast.AST] = _elements(node, source)
    if isinstance(node, ast.Call) and len(node.keywords) + len(node.args) > 1:
        arguments = [*node.args, *node.keywords]
        yield from (source.drop(arguments, arguments.index(word)) for word in node.keywords if word.arg not in DEFAULTS)
    if len(elements) > 2 or (len(elements) == 2 and not isinstance(node, ast.Tuple)):
        yield from (source.drop(elements, at) for at in range(len(elements)))
    elif len(elements) == 2:
        yield from (source.replace(node, f"({source.text(element)},)") for element in elements)
    if isinstance(node, ast.Dict) and all(node.keys):
        for key, value in zip(node.keys, node.values, strict=True):
            assert key is not None
            start, end = source.span(key)[0], source.span(value)[1]
            comma = source.bytes[end:].lstrip()[:1] == b","
            yield start, source.bytes.index(b",", end) + 1 if comma else end, ""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.BitOr)):
        yield from (source.replace(node, f"({source.text(side)})") for side in (node.left, node.right))


def take_another(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Take the first, the last or the least instead of the most; the later value instead of the first."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        other = {**{value: key for key, value in OPPOSITES.items()}, **OPPOSITES}.get(name)
        whole = name in ("split", "rsplit") and len(node.args) + len(node.keywords) < 2  # the same from either end
        if other is not None and not whole:
            end = source.span(node.func)[1]
            yield end - len(name), end, other
        if name == "setdefault" and len(node.args) == 2 and isinstance(source.parents[node], ast.Expr):
            assert isinstance(node.func, ast.Attribute)
            owner, (key, value) = source.text(node.func.value), map(source.text, node.args)
            yield source.replace(node, f"{owner}[{key}] = {value}")
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and source.text(node.slice) in ("0", "-1"):
        yield source.replace(node.slice, {"0": "-1", "-1": "0"}[source.text(node.slice)])
    if isinstance(node, ast.keyword) and node.arg == "reverse":
        yield source.replace(node.value, f"not {source.text(node.value)}")


def other_side(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Use the other side, end or unit: a name of the same module that differs by one word."""
    name = getattr(node, "id", getattr(node, "attr", None))
    if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load) or not name:
        return
    parts = name.split("_")
    for first, second in (pair for arguments in SIDES for pair in (arguments.split(), arguments.split()[::-1])):
        for at, part in enumerate(parts):
            renamed = "_".join([*parts[:at], second, *parts[at + 1 :]])
            if part == first and renamed in source.names:
                end = source.span(node)[1]
                yield end - len(name), end, renamed


def other_unit(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Count in another unit."""
    units = {"1e9": "2**30", "1024": "1000", "1e3": "1e6", "1e6": "1e3", "1000": "1024", "8": "1", "10": "20"}
    if isinstance(node, ast.Constant) and (other := units.get(source.text(node))):
        yield source.replace(node, other)


def drop_clause(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Leave out a clause of a condition, or decide it."""
    if isinstance(node, ast.BoolOp):
        remainder = [[value for value in node.values if value is not clause] for clause in node.values]
        operator = " and " if isinstance(node.op, ast.And) else " or "
        yield from (source.replace(node, f"({operator.join(map(source.text, values))})") for values in remainder)
    if isinstance(node, ast.comprehension):
        yield from (source.replace(clause, "True") for clause in node.ifs)
    if isinstance(node, ast.IfExp):
        yield from (source.replace(node, f"({source.text(side)})") for side in (node.body, node.orelse))
    if isinstance(node, ast.If):
        yield from (source.replace(node.test, decided) for decided in ("True", "False"))
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        yield source.replace(node, source.bytes[source.span(node)[0] : source.span(node.comparators[0])[1]].decode())


def skip_one(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Leave out the first or the last of what is iterated; call a function on nothing."""
    if isinstance(node, (ast.For, ast.comprehension)) and not ENDLESS.search(source.text(node.iter)):
        text = source.text(node.iter)
        yield from (source.replace(node.iter, f"list({text}){part}") for part in ("[1:]", "[:-1]"))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield source.replace(node, "pass")


def _measures(statement: ast.AST, source: Source) -> bool:
    """Whether a statement begins or ends what a clock measures: a deadline is met earlier or later unnoticed."""
    for node in ast.walk(statement):
        begins = isinstance(node, ast.Assign) and CLOCK.fullmatch(
            source.text(node.value).rstrip(")").rpartition(".")[2]
        )
        ends = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and CLOCK.search(source.text(node.left))
        if begins or ends:
            return True
    return False


def _takes_no_time(statement: ast.stmt) -> bool:
    """Whether a statement may stand on either side of a clock: a definition, a text, a constant, or what leaves."""
    value = getattr(statement, "value", None)
    plain = isinstance(value, ast.Constant) or (isinstance(value, (ast.List, ast.Tuple)) and not value.elts)
    return plain or isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Return, ast.Raise))


def reorder_clock(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Read a clock before the statement that it followed, or after that which it preceded."""
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        for first, second in pairwise(body if isinstance(body, list) else ()):
            both = [statement for statement in (first, second) if _measures(statement, source)]
            if both and not any(_takes_no_time(statement) for statement in (first, second)):
                yield source.swap(first, second)


def weaken_pattern(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Leave out an alternative, an anchor or a group of a regular expression."""
    parent = source.parents.get(node)
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or not isinstance(parent, ast.Call):
        return
    if not source.text(parent.func).startswith("re.") or node is not parent.args[0]:
        return
    text, start = source.text(node), source.span(node)[0]
    for place in (place for part in PARTS for place in re.finditer(part, text)):
        changed = text[: place.start()] + (f"{place[0]}?" if place[0][0] == "(" else "") + text[place.end() :]
        try:
            re.compile(ast.literal_eval(changed))
        except (re.error, SyntaxError, ValueError):
            continue
        yield start, start + len(text.encode()), changed


def return_input(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Return the input of a filter."""
    if not isinstance(node, ast.Call):
        return
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name == "bool":
        return  # what it is returned for takes any value for true or false
    if isinstance(node.func, ast.Attribute) and FILTERS.search(name) and name not in ("fromkeys", "set"):
        yield source.replace(node, source.text(node.func.value))
    elif (FILTERS.search(name) or isinstance(source.parents[node], ast.Return)) and len(node.args) == 1:
        yield source.replace(node, f"({source.text(node.args[0])})")


def change_operator(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Use the nearest other operator."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not isinstance(node.left, ast.JoinedStr):
        operator, other = ARITHMETIC[type(node.op)]
        start, end = source.span(node.left)[1], source.span(node.right)[0]
        yield start, end, source.bytes[start:end].decode().replace(operator, other, 1)
    if isinstance(node, ast.Compare) and not CLOCK.search(source.text(node)):  # nobody meets the very moment
        for remaining, operation, right in zip(
            [node.left, *node.comparators], node.ops, node.comparators, strict=False
        ):
            start, end = source.span(remaining)[1], source.span(right)[0]
            if b"(" not in source.bytes[start:end] + source.bytes[end:end]:
                yield start, end, f" {COMPARISONS[type(operation)]} "
    if isinstance(node, ast.BoolOp):
        start, end = source.span(node.values[0])[1], source.span(node.values[1])[0]
        operator, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield start, end, source.bytes[start:end].decode().replace(operator, other, 1)


def change_value(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Add one to a number, turn a truth value, or negate a condition."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield source.replace(node, str(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield from (source.replace(node, str(node.value + step)) for step in (1, -1))
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield source.replace(node.test, f"not ({source.text(node.test)})")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield source.replace(node, f"({source.text(node.operand)})")


def change_flow(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Do not iterate, do not catch, or leave a loop in another way."""
    if isinstance(node, ast.For):
        yield source.replace(node.iter, "[]")
    if isinstance(node, ast.ExceptHandler) and node.type is not None:
        yield source.replace(node.type, "()")
    if isinstance(node, (ast.Break, ast.Continue)):
        yield source.replace(node, "continue" if isinstance(node, ast.Break) else "break")


Operator = Callable[[ast.AST, Source], Iterator[Edit]]
MEANING: Mapping[str, Operator] = {function.__name__: function for function in (
    swap_arguments, drop_element, take_another, other_side, other_unit, drop_clause, skip_one, reorder_clock,
    weaken_pattern, return_input,
)}  # fmt: skip
OPERATORS: Mapping[str, Operator] = {
    function.__name__: function for function in (change_operator, change_value, change_flow)
}


@lru_cache(maxsize=8)
def _dump(source: str) -> str:
    return ast.dump(ast.parse(source))


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of a module.

    :ivar module: its path in the clone, without ``.py``.
    """

    module: str
    line: int
    operator: str
    edit: Edit

    def code(self, source: str) -> str:
        start, end, text = self.edit
        data = source.encode()
        return (data[:start] + text.encode() + data[end:]).decode()

    def is_python(self, source: str) -> bool:
        """Whether the changed code is Python, and not the same."""
        try:
            return ast.dump(ast.parse(self.code(source))) != _dump(source)
        except (SyntaxError, ValueError):
            return False


def _waits(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the numbers in what a node gives as times to wait: constants, defaults, keywords and assignments."""
    named: list[tuple[str, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        pairs = zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]  # type: ignore[attr-defined]
        named += [(ast.unparse(part), value) for part, value in pairs]
    elif isinstance(node, ast.AnnAssign):
        named.append((ast.unparse(node.target), node.value))
    elif isinstance(node, ast.keyword):
        named.append((node.arg or "", node.value))
    elif isinstance(node, ast.arguments):
        arguments = [*node.posonlyargs, *node.args]
        named += zip(
            [part.arg for part in arguments[len(arguments) - len(node.defaults) :]], node.defaults, strict=True
        )
        named += zip([part.arg for part in node.kwonlyargs], node.kw_defaults, strict=True)
    for name, value in named:
        if value is not None and WAITS.search(name):
            yield from (part for part in ast.walk(value) if isinstance(part, ast.Constant))


def _silent(node: ast.AST) -> bool:
    """Whether no test could notice a change of a node."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test) or "'__main__'" in ast.dump(node.test)
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in ("__all__", "__slots__")
    if isinstance(node, ast.Expr):
        called = isinstance(node.value, ast.Call) and "_log" in ast.dump(node.value.func)
        return called or isinstance(node.value, ast.Constant)
    return isinstance(node, (ast.Import, ast.ImportFrom)) or (
        isinstance(node, ast.JoinedStr) and sys.version_info < (3, 12)
    )


def mutants_of(module: str, text: str, operators: Mapping[str, Operator]) -> list[Mutant]:
    """Return the changes of a module that its tests could notice."""
    source = Source(text)
    left_out: set[ast.AST] = set()
    for node in ast.walk(source.tree):
        parts = [getattr(node, name, None) for name in ("annotation", "returns")]
        parts += [*getattr(node, "decorator_list", []), *_waits(node), *([node] if _silent(node) else [])]
        parts += [node.value] if isinstance(node, ast.keyword) and node.arg in DEFAULTS else []
        left_out.update(inner for part in parts if part is not None for inner in ast.walk(part))
    changes = {
        (name, edit)
        for node in ast.walk(source.tree)
        if node not in left_out
        for name, operator in operators.items()
        for edit in operator(node, source)
    }
    return sorted(Mutant(module, source.line(edit[0]), name, edit) for name, edit in changes)
