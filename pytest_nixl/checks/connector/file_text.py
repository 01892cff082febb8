# SPDX-License-Identifier: Apache-2.0
"""Read a configuration file that nobody has checked: bounded in size, in nesting and in what its aliases expand to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.extras import pip_install
from pytest_nixl.core.lazy_module import lazy_module, load
from pytest_nixl.core.strict import escape
from pytest_nixl.core.untrusted_file import read_regular

if TYPE_CHECKING:
    import yaml
else:  # only the extra connector installs it
    yaml = lazy_module("yaml")

#: The most bytes of a configuration file, and the most characters of one in YAML, because PyYAML is slow.
MOST_BYTES, MOST_YAML = 1 << 20, 1 << 18
#: In one file: the most aliases, entries of a merge, and values.
MOST_ALIASES, MOST_MERGED, MOST_VALUES = 100, 10_000, 100_000


def read_text(path: str) -> str:
    """Read a file.

    :raises ValueError: if it is not a regular file, is larger than :data:`MOST_BYTES`, or is not text.
    :raises OSError: if it cannot be read.
    """
    data = read_regular(Path(path), MOST_BYTES, "a configuration file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(f"{escape(path)} is a binary file: expected YAML, JSON, KEY=VALUE lines or a command line")
    return text


def parse_json(path: str, text: str) -> Any:
    """Parse JSON. :raises ValueError: with one sentence, if the text is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{escape(path)} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except (ValueError, RecursionError):
        raise ValueError(f"{escape(path)} is not JSON that can be read: a number or its nesting is too long") from None


def parse_yaml(path: str, text: str) -> list[Any]:
    """Parse the documents of a YAML file.

    :raises NixlPluginError: if PyYAML is not installed.
    :raises ValueError: with one sentence, if the text is not YAML, has tags, or too many aliases.
    """
    try:
        load(yaml)
    except ImportError:
        raise NixlPluginError(
            f"{escape(path)} is YAML, which needs PyYAML, and that is not installed",
            f"{pip_install('connector')}, or give the file as JSON (kubectl get -o json)",
        ) from None

    if len(text) > MOST_YAML:
        raise ValueError(
            f"{escape(path)} is YAML with more than {MOST_YAML >> 10} KiB: give it as JSON (kubectl get -o json)"
        )

    class Bounded(yaml.SafeLoader):
        """A safe loader that refuses many aliases, and merge keys that grow."""

        aliases = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Count the aliases."""
            if self.check_event(yaml.events.AliasEvent):
                self.aliases += 1
                if self.aliases > MOST_ALIASES:
                    raise ValueError(f"it has more than {MOST_ALIASES} aliases")
            return super().compose_node(parent, index)

        def flatten_mapping(self, node: Any) -> None:
            """Bound what merge keys add."""
            own = len(node.value)
            super().flatten_mapping(node)
            if len(node.value) - own > MOST_MERGED:
                raise ValueError(f"its merge keys add more than {MOST_MERGED} entries")

    try:
        return [document for document in yaml.load_all(text, Loader=Bounded) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ValueError(f"{escape(path)} is not YAML: {escape(error.problem or 'it is malformed')}{where}") from None
    except yaml.YAMLError:
        raise ValueError(f"{escape(path)} is not YAML: it has a character that YAML does not allow") from None
    except RecursionError:
        raise ValueError(f"{escape(path)} is YAML that cannot be read: it is nested too deep") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{escape(path)} is YAML that cannot be read: {escape(str(error))}") from None


def objects(document: Any, path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each object of a document, outermost first, with the name of the nearest object around it that has one.

    :raises ValueError: if the document expands to more than :data:`MOST_VALUES` values.
    """
    visited = 0
    stack: list[tuple[Any, str]] = [(document, "")]
    while stack:
        value, owner = stack.pop()
        visited += 1
        if visited > MOST_VALUES:
            raise ValueError(f"{escape(path)} has more than {MOST_VALUES} values: expected a configuration file")
        if isinstance(value, dict):
            metadata = value.get("metadata")
            name = metadata.get("name") if isinstance(metadata, dict) else value.get("name")
            owner = name if isinstance(name, str) and name else owner
            yield {str(key): part for key, part in value.items()}, owner
            stack += [(part, owner) for part in reversed(list(value.values()))]
        elif isinstance(value, list):
            stack += [(part, owner) for part in reversed(value)]
