# SPDX-License-Identifier: Apache-2.0
"""Check the rules of ``pytest-nixl connector`` against an engine's own source.

``python tests/field/engine_source.py vLLM DIR`` (or SGLang, Dynamo) reads the Python files below DIR, prints which
options, variables, keys of ``kv_connector_extra_config`` and factors of the compatibility hash they read for a
transfer, and names each rule whose field none of them reads. It exits with 1 if there is such a rule. A rule that does
not hold for this release (``--release 0.33.0``) is left out.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pytest_nixl.checks.connector.engine_fields import EngineField
from pytest_nixl.checks.connector.engines import DYNAMO_FIELDS, SGLANG_FIELDS, VLLM_FIELDS
from pytest_nixl.checks.connector.rules import RULES, ConnectorRule
from pytest_nixl.checks.connector.settings_read import EXTRA_KEYS, RETIRED, TRANSFER_KEYS, VARIABLES
from pytest_nixl.model.nixl_releases import numbers

FIELDS: dict[str, tuple[EngineField, ...]] = {"vLLM": VLLM_FIELDS, "SGLang": SGLANG_FIELDS, "Dynamo": DYNAMO_FIELDS}
#: The names by which an engine reads fields that are part of an option's value or of another one's.
_INSIDE = {
    "backends": ("backends",), "kv_lease_duration": ("kv_lease_duration",), "kv_connector": ("kv_connector",),
    "kv_role": ("kv_role",), "engine_id": ("engine_id",), "kv_buffer_device": ("kv_buffer_device",),
    "enforce_handshake_compat": ("enforce_handshake_compat",), "speculative method": ("--spec-method", "method"),
    "enable_cross_layers_blocks": ("enable_cross_layers_blocks",), "speculative model": ("--spec-model", "model"),
    "speculative revision": ("revision",), "--attention-backend": ("--attention-backend",),
    "--connector": ("--connector",), "worker role": ("--disaggregation-mode", "--is-prefill-worker"),
}  # fmt: skip
_VARIABLE = re.compile(r"(?:VLLM|SGLANG|DYN|UCX|NIXL)_[A-Z0-9_]{3,}")
_TRANSFER = re.compile(r"disagg|kv[-_]|nixl|connector|bootstrap|side[-_]channel|lease", re.IGNORECASE)


@dataclass
class EngineSource:
    """What the Python files of an engine read.

    :param names: each option, spelled with dashes, each variable, and each name of a field or key.
    """

    options: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    extra_keys: set[str] = field(default_factory=set)
    hash_factors: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

    def reads(self, name: str) -> bool:
        """Return whether an option, a variable or a key is read."""
        dashed = name.replace("_", "-") if name.startswith("-") else name
        return dashed in self.options or name in self.variables or name in self.names


def read_source(folder: Path) -> EngineSource:
    """Return what the Python files below a folder read."""
    source = EngineSource()
    for path in sorted(folder.rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            _read_node(node, source)
    return source


def _read_node(node: ast.AST, source: EngineSource) -> None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
        source.variables.update(_VARIABLE.findall(node.value))
        if re.fullmatch(r"--?[A-Za-z][\w-]*", node.value):
            source.options.add(node.value.replace("_", "-"))
        source.names.add(node.value)
    elif isinstance(node, ast.Attribute) and _VARIABLE.fullmatch(node.attr):
        source.variables.add(node.attr)
    elif isinstance(node, ast.AnnAssign | ast.Assign):
        for target in [node.target] if isinstance(node, ast.AnnAssign) else node.targets:
            if isinstance(target, ast.Name):
                source.names.add(target.id)
                if _VARIABLE.fullmatch(target.id):
                    source.variables.add(target.id)
                if isinstance(node, ast.AnnAssign) and re.fullmatch(r"[a-z][a-z0-9_]*", target.id):
                    source.options.add(f"--{target.id.replace('_', '-')}")
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get_from_extra_config" and node.args:
        source.extra_keys.update(_texts(node.args[:1]))
    elif isinstance(node, ast.FunctionDef) and "compatibility" in node.name:
        for part in ast.walk(node):
            if isinstance(part, ast.Dict):
                source.hash_factors.update(_texts(key for key in part.keys if key is not None))


def _texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def unread_rules(engine: str, source: EngineSource, release: str = "") -> list[ConnectorRule]:
    """Return the rules of an engine whose field it does not read.

    :param release: the release of the source; rules that do not hold for it are left out.
    """
    fields = {part.name: part for part in FIELDS[engine]}
    return [
        rule
        for rule in RULES
        if rule.engine == engine
        and not rule.source.startswith("docs/")
        and ".rs" not in rule.source
        and not (release and rule.releases is not None and _excludes(rule, release))
        and (names := _names(rule.field, fields))
        and not any(map(source.reads, names))
    ]


def _excludes(rule: ConnectorRule, release: str) -> bool:
    holds = rule.releases
    assert holds is not None
    early = bool(holds.since) and numbers(release) < numbers(holds.since)
    return early or (bool(holds.before) and numbers(release) >= numbers(holds.before))


def _names(name: str, fields: dict[str, EngineField]) -> tuple[str, ...]:
    engine_field = fields.get(name)
    return _INSIDE.get(name, ()) if engine_field is None else (*engine_field.options, *engine_field.variables)


def unread_settings(engine: str, source: EngineSource) -> list[str]:
    """Return the variables and keys that the lists of settings name and the engine does not read, no retired ones."""
    retired = {setting.name for setting in RETIRED}
    names = [name for name in VARIABLES.get(engine, ()) if name not in retired]
    if engine == "vLLM":
        names += [*TRANSFER_KEYS, *(key for key in EXTRA_KEYS if source.extra_keys and key in source.extra_keys)]
    return [name for name in names if not source.reads(name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("engine", choices=sorted(FIELDS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--release", default="", help="the release of the source, such as 0.33.0")
    arguments = parser.parse_args()
    source = read_source(arguments.folder)
    for title, names in (
        ("options of a transfer", {name for name in source.options if _TRANSFER.search(name)}),
        ("variables of a transfer", {name for name in source.variables if _TRANSFER.search(name)}),
        ("keys of kv_connector_extra_config", source.extra_keys),
        ("factors of the compatibility hash", source.hash_factors),
    ):
        print(f"{title} ({len(names)}): {', '.join(sorted(names))}")
    rules = unread_rules(arguments.engine, source, arguments.release)
    for rule in rules:
        print(f"NOT READ: {rule.field} ({rule.releases or 'all releases'}), whose source is said to be {rule.source}")
    settings = unread_settings(arguments.engine, source)
    if settings:
        print(f"read by other releases only, or by none: {', '.join(settings)} (settings_read.py)")
    print(f"{len(rules)} rules name what this source does not read")
    return int(bool(rules))


if __name__ == "__main__":
    sys.exit(main())
