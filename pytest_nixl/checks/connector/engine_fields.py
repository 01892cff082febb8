# SPDX-License-Identifier: Apache-2.0
"""The fields of one engine's configuration, and its release as far as its files say it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pytest_nixl.checks.connector.command_line import Launch, is_resolved
from pytest_nixl.checks.connector.containers import ConfiguredEngine
from pytest_nixl.model.engine_backends import ALLOC_CONF, GENERAL_VARIABLE
from pytest_nixl.model.nixl_releases import numbers

#: The most characters of a value.
_MOST_CHARACTERS = 1 << 12


@dataclass(frozen=True)
class EngineField:
    """A field of an engine's configuration.

    :param name: the field as users write it: an option, a variable or a key.
    :param options: the options that set it, spelled with dashes.
    :param variables: the variables that set it if no option does.
    :param default: the value if nothing sets it; empty if the engine chooses one.
    :param switch: whether the option takes no value.
    """

    name: str
    options: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    default: str = ""
    switch: bool = False


@dataclass(frozen=True)
class FieldValue:
    """The value of a field in one file.

    :param text: the value; the default if it is not set.
    :param is_set: whether the file sets it.
    :param is_readable: whether the file is one that would contain the field: an env file contains no options.
    """

    text: str
    is_set: bool = True
    is_readable: bool = True

    @property
    def is_known(self) -> bool:
        """Whether the value is known: the file is readable, and names no value of somewhere else."""
        return self.is_readable and is_resolved(self.text)


@dataclass(frozen=True)
class EngineSide:
    """The prefill or the decode side: its engine, and the values of its fields by name."""

    source: ConfiguredEngine
    values: Mapping[str, FieldValue]

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return self.source.launch.engine

    @property
    def dynamo(self) -> bool:
        """Whether Dynamo runs the engine."""
        return self.source.launch.dynamo


def read_fields(launch: Launch, fields: Iterable[EngineField]) -> dict[str, FieldValue]:
    """Return the value of each field. An option wins over a variable, and the last option over earlier ones.

    :raises ValueError: if a value is too long.
    """
    return {field.name: bounded(field.name, _value(launch, field)) for field in fields}


def bounded(name: str, value: FieldValue) -> FieldValue:
    """Return the value. :raises ValueError: if it is too long."""
    if len(value.text) > _MOST_CHARACTERS:
        raise ValueError(f"{name} has a value of {len(value.text)} characters: expected at most {_MOST_CHARACTERS}")
    return value


def _value(launch: Launch, field: EngineField) -> FieldValue:
    given = [(name, values[-1]) for name, values in launch.options.items() if name in field.options and values]
    if given:
        return FieldValue("true" if field.switch else given[-1][1])
    negated = {f"--no-{option[2:]}" for option in field.options}
    if field.switch and negated & set(launch.options):
        return FieldValue("false")
    for variable in field.variables:
        if launch.environment.get(variable):
            return FieldValue(launch.environment[variable])
    lacking = (field.options and not launch.has_options) or (field.variables and not launch.has_environment)
    return FieldValue(field.default, is_set=False, is_readable=not lacking)


def json_option(source: ConfiguredEngine, option: str) -> dict[str, object]:
    """Return an option that is a JSON object, with what its dotted forms (``--option.key VALUE``) add.

    :raises ValueError: with one sentence, if the value is not a JSON object.
    """
    launch = source.launch
    found: dict[str, object] = {}
    for text in launch.options.get(option, ())[-1:]:
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            quoted = text[:1] == "'" and text[-1:] == "'"
            if mark := next((mark for mark in text if mark in "\u201c\u201d\u2018\u2019"), ""):
                reason = f"typographic quotation mark {mark} (U+{ord(mark):04X})"
                raise ValueError(f"{source.label}: the value of {option} is not a JSON object: it has the {reason}")
            reason = (
                ": it is in quotes that no shell removes, so delete them"
                if quoted
                else ": write \" around names and texts, and not '"
                if re.match(r"\{\s*'", text)
                else ": expected {…} in quotes"
            )
            raise ValueError(f"{source.label}: the value of {option} is not a JSON object{reason}")
        found = read
    for name, values in launch.options.items():
        head, dot, tail = name.partition(".")
        if head == option and dot and values:
            _add(found, tail.removesuffix("+").split("."), list(values) if tail.endswith("+") else values[-1])
    return found


def _add(found: dict[str, object], keys: list[str], value: object) -> None:
    for key in keys[:-1]:
        below = found.setdefault(key, {})
        if not isinstance(below, dict):
            return
        found = below
    found[keys[-1]] = value


#: Fields that every engine has, because NIXL, UCX or the container reads them.
COMMON_FIELDS = (
    EngineField("UCX_TLS", variables=("UCX_TLS",)),
    EngineField("UCX_NET_DEVICES", variables=("UCX_NET_DEVICES",)),
    EngineField("NIXL_ETCD_ENDPOINTS", variables=("NIXL_ETCD_ENDPOINTS",)),
    EngineField("NIXL_TCPSTORE_ENDPOINT", variables=("NIXL_TCPSTORE_ENDPOINT",)),
    EngineField(GENERAL_VARIABLE, variables=(GENERAL_VARIABLE,)),
    EngineField(ALLOC_CONF[0], variables=ALLOC_CONF),
    # src/core/nixl_etcd_metadata_backend.cpp: default_namespace
    EngineField("NIXL_ETCD_NAMESPACE", variables=("NIXL_ETCD_NAMESPACE",), default="/nixl/agents/"),
)


#: Packages whose release a command may name (``pip install nixl==1.5.1``).
_INSTALLED = re.compile(r"\b(nixl(?:-cu1[23])?|vllm|sglang|ai-dynamo)(?:\[[\w,-]*\])?==([\w.+!-]+)")
#: The package whose release is the tag of an image, by the image's name.
_PACKAGE_OF_IMAGE = MappingProxyType(
    {
        "vllm-openai": "vllm",
        "vllm": "vllm",
        "sglang": "sglang",
        "vllm-runtime": "ai-dynamo",
        "sglang-runtime": "ai-dynamo",
        "tensorrtllm-runtime": "ai-dynamo",
    }
)
_PACKAGE_NAMES: Mapping[str, str] = MappingProxyType({"vllm": "vLLM", "sglang": "SGLang", "ai-dynamo": "Dynamo"})


@dataclass(frozen=True)
class ReleaseRange:
    """The releases for which a rule holds, as read from the sources of these releases.

    :param since: the first of them; empty for all earlier ones.
    :param before: the first release after them; empty for all later ones.
    """

    package: str
    since: str = ""
    before: str = ""

    def __str__(self) -> str:
        name = _PACKAGE_NAMES[self.package]
        since = f" from {self.since}" if self.since else ""
        return f"{name}{since}{f' before {self.before}' if self.before else ''}"

    def excludes(self, side: EngineSide) -> bool:
        """Return whether a side has a known release for which the rule does not hold."""
        release = release_of(side, self.package)
        if not release:
            return False
        below = bool(self.since) and numbers(release) < numbers(self.since)
        return below or (bool(self.before) and numbers(release) >= numbers(self.before))


def named_releases(side: EngineSide) -> dict[str, str]:
    """Return the releases that a side's command installs or its variables name, by package."""
    launch = side.source.launch
    releases: dict[str, str] = dict(_INSTALLED.findall(launch.script))
    for package in ("nixl", "vllm", "sglang"):
        if version := launch.environment.get(f"{package.upper()}_VERSION"):
            releases.setdefault(package, version)
    return releases


def release_of(side: EngineSide, package: str) -> str:
    """Return the release of a package on one side; empty if the file does not say it."""
    name, _, tag = side.source.image.rpartition("/")[2].partition(":")
    from_image = tag.partition("@")[0].removeprefix("v") if _PACKAGE_OF_IMAGE.get(name) == package else ""
    release = named_releases(side).get(package, "") or from_image
    return release if re.match(r"\d+\.\d+", release) else ""


def older_than(side: EngineSide, package: str, release: str) -> bool:
    """Return whether a side is known to have an older release of a package."""
    return ReleaseRange(package, since=release).excludes(side)
