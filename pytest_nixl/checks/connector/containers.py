# SPDX-License-Identifier: Apache-2.0
"""Find the engine that a file configures: in a pod spec, a Compose file, an env file, a command or a JSON object."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_nixl.checks.connector.command_line import (
    MOST_SCRIPT,
    Launch,
    LongScriptError,
    expand,
    launches,
    script_launches,
    split_commands,
)
from pytest_nixl.checks.connector.file_text import objects, parse_json, parse_yaml, read_text
from pytest_nixl.core.strict import escape

#: The most names of containers that a message lists.
_LISTED = 8
#: Prefixes of variables that only one engine reads.
_OF_ENGINE = {"VLLM_": "vLLM", "SGLANG_": "SGLang"}
#: The resource of Kubernetes that is an EFA device.
_EFA = "vpc.amazonaws.com/efa"
_KV_TRANSFER = ("kv_transfer_config", "kv-transfer-config")


@dataclass(frozen=True)
class ConfiguredEngine:
    """An engine as one file configures it.

    :param file: the file's path as the user gave it.
    :param names: the names that choose this engine with ``FILE#NAME``; the last one is complete.
    :param image: the image of the container; empty if the file names none.
    :param pod: an identity that two containers of one pod share; None if the file is not a pod spec.
    :param efa: the number of EFA devices that the pod requests; None if the file cannot say it.
    :param unread: where variables come from that the file does not contain, such as ``ConfigMap engine``.
    """

    file: str
    names: tuple[str, ...]
    launch: Launch
    image: str = ""
    pod: tuple[str, int] | None = None
    unread: tuple[str, ...] = ()
    efa: int | None = None

    @property
    def label(self) -> str:
        """The file, and the container if it has a name."""
        return escape(f"{self.file}#{self.names[-1]}" if self.names else self.file)


def read_engine(text: str) -> ConfiguredEngine:
    """Read the engine that ``FILE`` or ``FILE#NAME`` names.

    :raises ValueError: with one sentence, if the file cannot be parsed, or has no or several such engines.
    :raises NixlPluginError: if it is YAML, and PyYAML is not installed.
    :raises OSError: if it cannot be read.
    """
    path, sign, chosen = text, "", ""
    if not Path(text).exists() and "#" in text:
        path, sign, chosen = text.rpartition("#")
    found = list(_engines(path, read_text(path)))
    shown = escape(path)
    if not found:
        raise ValueError(
            f"{shown} starts no engine that this command reads: expected vLLM or SGLang, also under Dynamo"
        )
    if sign:
        matching = [engine for engine in found if chosen in engine.names]
        if not matching:
            raise ValueError(f"{shown} has no {escape(chosen)!r} that starts an engine; it has {_named(found)}")
        found = matching
    if len(found) > 1:
        raise ValueError(f"{shown} starts {len(found)} engines: choose one with FILE#NAME, NAME is {_named(found)}")
    engine = found[0]
    if engine.launch.engine not in _OF_ENGINE.values():
        raise ValueError(f"{engine.label} starts {engine.launch.engine}: expected vLLM or SGLang, also under Dynamo")
    return engine


def _named(engines: Iterable[ConfiguredEngine]) -> str:
    names = list(dict.fromkeys(escape(engine.names[-1]) for engine in engines if engine.names))
    return " or ".join(names[:_LISTED]) + (f" or one of {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def _engines(path: str, text: str) -> Iterator[ConfiguredEngine]:
    if path.endswith(".json") or text.lstrip()[:1] in ("{", "["):
        yield from _of_documents(path, [parse_json(path, text)])
    elif path.endswith((".yaml", ".yml")) or re.search(r"(?m)^(?:- )?[A-Za-z][\w-]*:(?:\s|$)", text):
        yield from _of_documents(path, parse_yaml(path, text))
    else:
        yield from _of_text(path, text)


def _of_text(path: str, text: str) -> Iterator[ConfiguredEngine]:
    """Yield the engines of an env file or of a shell script."""
    try:
        if found := script_launches(text, {}):
            for number, launch in enumerate(found, 1):
                names = (str(number),) if len(found) > 1 else ()
                yield ConfiguredEngine(path, names, replace(launch, has_environment=bool(launch.environment)))
            return
        commands = split_commands(text)
    except LongScriptError as error:
        raise ValueError(f"{escape(path)} {error}") from None
    except ValueError:
        commands = [[line] for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    environment: dict[str, str] = {}
    for command in commands:
        name, sign, value = " ".join(command).removeprefix("export ").partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name.strip()):
            return
        environment[name.strip()] = expand(value, environment, shell=True)
    yield from _of_variables(path, environment)


def _of_variables(path: str, environment: Mapping[str, str]) -> Iterator[ConfiguredEngine]:
    for prefix, engine in _OF_ENGINE.items():
        if any(name.startswith(prefix) for name in environment):
            dynamo = any(name.startswith("DYN_") for name in environment)
            yield ConfiguredEngine(path, (), Launch(engine, dynamo, {}, "", environment, has_options=False))
            return


def _of_documents(path: str, documents: list[Any]) -> Iterator[ConfiguredEngine]:
    found = [each for document in documents for each in objects(document, path)]
    data = {
        owner: {str(key): str(value) for key, value in part["data"].items()}
        for part, owner in found
        if part.get("kind") == "ConfigMap" and isinstance(part.get("data"), dict)
    }
    for number, (part, owner) in enumerate(found):
        containers = part.get("containers")
        for container in containers if isinstance(containers, list) else ():
            if isinstance(container, dict):
                yield from _of_container(path, owner, container, data, (str(Path(path).resolve()), number))
        services = part.get("services")
        if isinstance(services, dict):
            for name, service in services.items():
                if isinstance(service, dict):
                    yield from _of_service(path, owner, str(name), service, data)
    if len(documents) == 1 and isinstance(documents[0], dict):
        yield from _of_configuration(path, documents[0])


def _of_container(
    path: str, owner: str, container: Mapping[str, Any], data: Mapping[str, Mapping[str, str]], pod: tuple[str, int]
) -> Iterator[ConfiguredEngine]:
    name, image = str(container.get("name") or ""), str(container.get("image") or "")
    environment, unread = _variables(container, data)
    names = tuple(dict.fromkeys(filter(None, (name, owner, "/".join(filter(None, (owner, name)))))))
    words = [*_words(container.get("command")), *_words(container.get("args"))]
    for launch in _launches(f"{path}#{names[-1]}" if names else path, words, environment, image):
        launch = replace(launch, has_environment=not unread)
        yield ConfiguredEngine(path, names, launch, image, pod, unread, _efa_devices(container))


def _of_service(
    path: str, owner: str, name: str, service: Mapping[str, Any], data: Mapping[str, Mapping[str, str]]
) -> Iterator[ConfiguredEngine]:
    """Yield the engine of a service of Docker Compose or of a Dynamo graph."""
    pod = service.get("extraPodSpec")
    container = pod.get("mainContainer") if isinstance(pod, dict) else None
    if isinstance(container, dict):
        given = [*_items(service.get("envs")), *_items(container.get("env"))]
        environment, unread = _variables({**container, "env": given}, data)
        namespace = service.get("dynamoNamespace")
        if isinstance(namespace, str):
            environment.setdefault("DYN_NAMESPACE", namespace)
        words = [*_words(container.get("command")), *_words(container.get("args"))]
    else:
        container = service
        pairs = service.get("environment")
        pairs = pairs.items() if isinstance(pairs, dict) else (str(item).partition("=")[::2] for item in _items(pairs))
        environment = {str(key): "" if value is None else _scalar(value) for key, value in pairs}
        unread = tuple(f"env_file {each}" for each in _words(service.get("env_file")))
        words = [*_words(service.get("entrypoint")), *_words(service.get("command"))]
    image = str(container.get("image") or "")
    for launch in _launches(f"{path}#{name}", words, environment, image):
        names = tuple(dict.fromkeys((name, f"{owner}/{name}" if owner and container is not service else name)))
        launch = replace(launch, has_environment=not unread)
        efa = max(_efa_devices(container), _efa_devices(service)) if container is not service else None
        yield ConfiguredEngine(path, names, launch, image, None, unread, efa)


def _of_configuration(path: str, document: Mapping[str, Any]) -> Iterator[ConfiguredEngine]:
    """Yield the engine of a ``kv_transfer_config`` object, or of the file of ``vllm serve --config``."""
    import json

    wrapped = next((document[name] for name in _KV_TRANSFER if name in document), None)
    if "kv_connector" in document:
        options = {"--kv-transfer-config": [json.dumps(document, default=str)]}
        yield ConfiguredEngine(path, (), Launch("vLLM", False, options, has_options=False, has_environment=False))
    elif wrapped is not None:
        options = {
            f"--{str(key).replace('_', '-')}": [value if isinstance(value, str) else json.dumps(value, default=str)]
            for key, value in document.items()
            if value is not False and value is not None
        }
        alone = len(document) == 1
        yield ConfiguredEngine(
            path, (), Launch("vLLM", False, options, has_options=not alone, has_environment=False)
        )  # fmt: skip


def _launches(label: str, words: list[str], environment: Mapping[str, str], image: str) -> list[Launch]:
    try:
        return launches(words, environment, image)
    except LongScriptError as error:
        raise ValueError(f"{escape(label)} {error}") from None
    except ValueError:
        raise ValueError(f"{escape(label)} has a command whose quotes are not closed") from None


def _variables(
    container: Mapping[str, Any], data: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables of a container, and the sources of variables that the file does not contain."""
    environment: dict[str, str] = {}
    unread = []
    for source in _items(container.get("envFrom")):
        for kind in ("configMapRef", "secretRef"):
            reference = source.get(kind) if isinstance(source, dict) else None
            if isinstance(reference, dict):
                name = str(reference.get("name"))
                if kind == "configMapRef" and name in data:
                    environment.update(data[name])
                else:
                    unread.append(f"{'ConfigMap' if kind == 'configMapRef' else 'Secret'} {escape(name)}")
    for item in _items(container.get("env")):
        if isinstance(item, dict) and isinstance(item.get("name"), str):
            source = item.get("valueFrom")
            value = _reference(source, data) if isinstance(source, dict) else _scalar(item.get("value", ""))
            environment[item["name"]] = expand(value, environment, shell=False)
    return environment, tuple(unread)


def _reference(source: Mapping[str, Any], data: Mapping[str, Mapping[str, str]]) -> str:
    """Return the value that ``valueFrom`` names, or a text such as ``$(status.podIP)`` if the file has none."""
    for kind, reference in source.items():
        if isinstance(reference, dict):
            if kind == "fieldRef":
                return f"$({reference.get('fieldPath')})"
            name, key = str(reference.get("name")), str(reference.get("key"))
            if kind == "configMapKeyRef" and key in data.get(name, {}):
                return data[name][key]
            return f"$({str(kind).removesuffix('KeyRef')} {name}, {key})"
    return "$(valueFrom)"


def _efa_devices(container: Mapping[str, Any]) -> int:
    """Return the number of EFA devices among the resources of a container, or of a service of a Dynamo graph."""
    counts = [0]
    resources = container.get("resources")
    for kind in resources.values() if isinstance(resources, dict) else ():
        for part in (kind, kind.get("custom")) if isinstance(kind, dict) else ():
            text = _scalar(part.get(_EFA, "")) if isinstance(part, dict) else ""
            counts.append(int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0)
    return max(counts)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        try:
            return shlex.split(value) if len(value) <= MOST_SCRIPT else [value]
        except ValueError:
            return [value]
    return [_scalar(item) for item in value] if isinstance(value, list) else []


def _scalar(value: Any) -> str:
    """Return a scalar as the text that a program is given."""
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
