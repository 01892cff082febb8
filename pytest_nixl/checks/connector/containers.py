# SPDX-License-Identifier: Apache-2.0
"""Find the engine that a file configures: in a pod spec, a Compose file, an env file, a command or a JSON object."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_nixl.checks.connector.command_line import (
    MOST_SCRIPT,
    Launch,
    ScriptError,
    expand,
    is_resolved,
    launches,
    printed_command,
    script_launches,
    split_commands,
)
from pytest_nixl.checks.connector.env_files import EnvFile, read_for_compose, read_for_docker, read_for_shell
from pytest_nixl.checks.connector.file_text import objects, parse_json, parse_yaml, read_text
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.strict import escape

#: The most names of containers that a message lists.
_LISTED = 8
#: Prefixes of variables that only one engine reads.
_OF_ENGINE = {"VLLM_": "vLLM", "SGLANG_": "SGLang"}
#: The resource of Kubernetes that is an EFA device.
_EFA = "vpc.amazonaws.com/efa"
#: The ends of names of scripts, and of files that are no YAML, whatever they contain.
_SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
_NO_YAML = (*_SCRIPTS, ".env")
#: Programs that start commands on other hosts or in containers: what they start need not share a host.
_ELSEWHERE = re.compile(r"\b(?:ssh|pdsh|clush|srun|mpirun|mpiexec|kubectl|docker|podman|nerdctl)\b")
#: The options that name a file with further options, or give them as JSON: vLLM's and SGLang's, and Dynamo's.
_OPTION_FILES = ("--config", "--engine-config-json")
#: The options whose values are JSON objects with fields of a transfer.
_JSON_OPTIONS = ("--kv-transfer-config", "--speculative-config", "-sc", "--attention-config", "-ac")
#: How :attr:`ConfiguredEngine.unread` begins for options that the file does not contain.
OPTIONS_OF = "options of"
_KV_TRANSFER = ("kv_transfer_config", "kv-transfer-config")


@dataclass(frozen=True)
class PodResources:
    """What an engine's pod gets of its node.

    :param requests: the number of each resource that the container requests, such as ``nvidia.com/gpu``.
    :param replicas: how many pods the object makes of this spec.
    :param sees_devices: whether the container sees devices of the node that it does not request.
    :param several_nodes: whether the object spreads one engine over several pods.
    """

    requests: Mapping[str, int]
    replicas: int = 1
    sees_devices: bool = False
    several_nodes: bool = False

    def count(self, resource: str) -> int:
        """Return how many of a resource the container requests."""
        return self.requests.get(resource, 0)


@dataclass(frozen=True)
class ConfiguredEngine:
    """An engine as one file configures it.

    :param file: the file's path as the user gave it.
    :param names: the names that choose this engine with ``FILE#NAME``; the last one is complete.
    :param image: the image of the container; empty if the file names none.
    :param pod: an identity that two containers of one pod share; None if the file is not a pod spec.
    :param resources: the pod's facts; None if the file cannot say them.
    :param unread: where variables or options come from that the file does not contain, such as ``ConfigMap engine``.
    :param remarks: what readers of the file do differently, as the end of a sentence that begins with the side.
    """

    file: str
    names: tuple[str, ...]
    launch: Launch
    image: str = ""
    pod: tuple[str, int] | None = None
    unread: tuple[str, ...] = ()
    resources: PodResources | None = None
    remarks: tuple[str, ...] = ()

    @property
    def efa(self) -> int | None:
        """The number of EFA devices that the pod requests; None if the file cannot say it."""
        return None if self.resources is None else self.resources.count(_EFA)

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
    engines = list(_engines(path, read_text(path)))
    shown = escape(path)
    if not engines:
        raise ValueError(
            f"{shown} starts no engine that this command reads: expected vLLM or SGLang, also under Dynamo"
        )
    if sign:
        matching = [engine for engine in engines if chosen in engine.names]
        if not matching:
            raise ValueError(f"{shown} has no {escape(chosen)!r} that starts an engine; it has {_named(engines)}")
        engines = matching
    if len(engines) > 1:
        raise ValueError(f"{shown} starts {len(engines)} engines: choose one with FILE#NAME, NAME is {_named(engines)}")
    return read_options_file(_read_env_files(engines[0]))


def _named(engines: Iterable[ConfiguredEngine]) -> str:
    names = list(dict.fromkeys(escape(engine.names[-1]) for engine in engines if engine.names))
    return " or ".join(names[:_LISTED]) + (f" or one of {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def _engines(path: str, text: str) -> Iterator[ConfiguredEngine]:
    """Yield the engines of a file, in the form that its name or else its text shows."""
    if path.endswith(_NO_YAML) or text.startswith("#!"):
        yield from _of_text(path, text)
    elif path.endswith(".json"):
        yield from _of_documents(path, [parse_json(path, text)])
    elif text.lstrip()[:1] in ("{", "["):
        yield from _of_json_or_script(path, text)
    elif path.endswith((".yaml", ".yml")) or re.search(r"(?m)^(?:- )?[A-Za-z][\w-]*:\s", text):
        yield from _of_documents(path, parse_yaml(path, text))
    else:
        yield from _of_text(path, text)


def _of_json_or_script(path: str, text: str) -> Iterator[ConfiguredEngine]:
    """Yield the engines of a text that begins like JSON: so do ``[ -z … ]`` and ``{ …; }`` of a shell."""
    try:
        document = parse_json(path, text)
    except ValueError as error:
        try:
            engines = list(_of_text(path, text))
        except ValueError:
            engines = []
        if not engines:
            raise error from None
        yield from engines
    else:
        yield from _of_documents(path, [document])


def _of_text(path: str, text: str) -> Iterator[ConfiguredEngine]:
    """Yield the engines of an env file or of a shell script."""
    by_shell = path.endswith(_SCRIPTS) or text.startswith("#!")
    try:
        if started := script_launches(text, {}):
            yield from _of_script(path, text, started)
            return
        env_file = read_for_shell(split_commands(text)) if by_shell else read_for_compose(text)
    except ScriptError as error:
        if (env_file := read_for_compose(text)) is None:
            raise ValueError(f"{escape(path)} {error}") from None
    if env_file is None:
        return
    names = ", ".join(map(escape, env_file.blanks))
    remark = (
        f"a blank before or after the = of {names}: a shell runs that as a command, and sets nothing"
        if by_shell
        else f"a blank before or after the = of {names}: it was left out, as Docker Compose and systemd do; docker run "
        "--env-file refuses or keeps it, and a shell runs that as a command"
    )
    yield from _of_variables(path, env_file.variables, (remark,) if names else ())


def _of_script(path: str, text: str, started: list[Launch]) -> Iterator[ConfiguredEngine]:
    """Yield the engines that a script starts, with what tells whether they share a host."""
    places = _ELSEWHERE.search(text) is not None
    for number, launch in enumerate(started, 1):
        names = (str(number),) if len(started) > 1 else ()
        host = None if not names or (places and not launch.place) else (path, launch.place if places else -1)
        launch = replace(launch, has_environment=bool(launch.environment))
        yield ConfiguredEngine(path, names, launch, launch.image, host)


def _of_variables(path: str, environment: Mapping[str, str], remarks: tuple[str, ...]) -> Iterator[ConfiguredEngine]:
    for prefix, engine in _OF_ENGINE.items():
        if any(name.startswith(prefix) for name in environment):
            dynamo = any(name.startswith("DYN_") for name in environment)
            launch = Launch(engine, dynamo, {}, "", environment, has_options=False)
            yield ConfiguredEngine(path, (), launch, remarks=remarks)
            return


def _of_documents(path: str, documents: list[Any]) -> Iterator[ConfiguredEngine]:
    parts = [part for document in documents for part in objects(document, path)]
    data = {
        owner: {str(key): str(value) for key, value in part["data"].items()}
        for part, owner in parts
        if part.get("kind") == "ConfigMap" and isinstance(part.get("data"), dict)
    }
    copies = _copies(part for part, _ in parts)
    engines: list[ConfiguredEngine] = []
    for number, (part, owner) in enumerate(parts):
        containers = part.get("containers")
        for container in containers if isinstance(containers, list) else ():
            if isinstance(container, dict):
                pod = _pod_resources(part, container, *copies.get(id(containers), (1, False)))
                identity = (str(Path(path).resolve()), number)
                engines += _of_container(path, owner, container, data, identity, pod)
        for name, config in part.items():
            if isinstance(config, dict) and isinstance(config.get("engine_kwargs"), dict):
                engines.append(_of_ray(path, name, config))
        services = part.get("services")
        if isinstance(services, dict):
            for name, service in services.items():
                if isinstance(service, dict):
                    engines += _of_service(path, owner, str(name), service, data)
    if len(documents) == 1 and isinstance(documents[0], dict):
        engines += _of_configuration(path, documents[0])
    readable = [engine for engine in engines if engine.launch.engine]
    yield from readable or engines or _of_unknown_kinds(path, parts)


def _copies(parts: Iterable[Mapping[str, Any]]) -> dict[int, tuple[int, bool]]:
    """Return for the containers of each pod template how many pods are made of it, and whether one engine has several.

    :returns: by the identity of the list of containers.
    """
    copies: dict[int, tuple[int, bool]] = {}
    for part in parts:
        replicas = part.get("replicas")
        number = replicas if isinstance(replicas, int) else 1
        group = part.get("leaderWorkerTemplate")
        size = group.get("size") if isinstance(group, dict) else 1
        several = (isinstance(size, int) and size > 1) or bool(part.get("multinode"))
        for owner in (part, group):
            for key in ("template", "podTemplate", "leaderTemplate", "workerTemplate"):
                template = owner.get(key) if isinstance(owner, dict) else None
                spec = template.get("spec") if isinstance(template, dict) else None
                if isinstance(spec, dict) and isinstance(spec.get("containers"), list):
                    copies.setdefault(id(spec["containers"]), (number, several))
    return copies


def _pod_resources(
    pod: Mapping[str, Any], container: Mapping[str, Any], replicas: int, several_nodes: bool
) -> PodResources:
    security = container.get("securityContext")
    privileged = isinstance(security, dict) and security.get("privileged") is True
    volumes = [volume for volume in _items(pod.get("volumes")) if isinstance(volume, dict)]
    mounts_devices = any(
        isinstance(volume.get("hostPath"), dict) and str(volume["hostPath"].get("path")).startswith("/dev/inf")
        for volume in volumes
    )
    resources = container.get("resources")
    claims = bool(pod.get("resourceClaims")) or (isinstance(resources, dict) and bool(resources.get("claims")))
    return PodResources(_requests(container), replicas, privileged or mounts_devices or claims, several_nodes)


def _of_unknown_kinds(path: str, parts: Iterable[tuple[Mapping[str, Any], str]]) -> Iterator[ConfiguredEngine]:
    """Yield the objects of a custom kind, which may start an engine by their own rules."""
    for part, owner in parts:
        group, slash, _ = str(part.get("apiVersion") or "").partition("/")
        if slash and "." in group and not group.endswith(".k8s.io") and isinstance(part.get("spec"), dict):
            launch = Launch(
                "", False, {}, has_options=False, has_environment=False, launcher=escape(str(part.get("kind")))
            )
            yield ConfiguredEngine(path, (owner,) if owner else (), launch)


def _of_container(
    path: str,
    owner: str,
    container: Mapping[str, Any],
    data: Mapping[str, Mapping[str, str]],
    identity: tuple[str, int],
    pod: PodResources,
) -> Iterator[ConfiguredEngine]:
    name, image = str(container.get("name") or ""), str(container.get("image") or "")
    environment, unread = _variables(container, data)
    names = tuple(dict.fromkeys(filter(None, (name, owner, "/".join(filter(None, (owner, name)))))))
    words = [*_words(container.get("command")), *_words(container.get("args"))]
    started = _launches(f"{path}#{names[-1]}" if names else path, words, environment, image)
    for launch, numbered in zip(started, _numbered(names, len(started)), strict=True):
        launch = replace(launch, has_environment=not unread)
        yield ConfiguredEngine(path, numbered, launch, image, identity, unread, pod)


def _numbered(names: tuple[str, ...], count: int) -> list[tuple[str, ...]]:
    """Return the names of each engine of a container: with a number if it starts several."""
    if count < 2:
        return [names] * count
    return [tuple(f"{name}/{number}" for name in names) or (str(number),) for number in range(1, count + 1)]


def _of_service(
    path: str, owner: str, name: str, service: Mapping[str, Any], data: Mapping[str, Mapping[str, str]]
) -> Iterator[ConfiguredEngine]:
    """Yield the engine of a service of Docker Compose or of a Dynamo graph."""
    pod = service.get("extraPodSpec")
    container = pod.get("mainContainer") if isinstance(pod, dict) else None
    resources = None
    if isinstance(pod, dict) and isinstance(container, dict):
        items = [*_items(service.get("envs")), *_items(container.get("env"))]
        environment, unread = _variables({**container, "env": items}, data)
        namespace = service.get("dynamoNamespace")
        if isinstance(namespace, str):
            environment.setdefault("DYN_NAMESPACE", namespace)
        words = [*_words(container.get("command")), *_words(container.get("args"))]
        replicas = service.get("replicas")
        number = replicas if isinstance(replicas, int) else 1
        resources = _pod_resources(pod, container, number, bool(service.get("multinode")))
        resources = replace(resources, requests={**resources.requests, **_requests(service)})
    else:
        container = service
        pairs = service.get("environment")
        if not isinstance(pairs, dict):
            parts = [str(item).partition("=") for item in _items(pairs)]
            pairs = {name: value if sign else None for name, sign, value in parts}
        variables, unread = _compose_env_files(path, service.get("env_file"))
        # A name without a value gets the one that it has where Compose runs.
        given = {str(key): f"$({key})" if value is None else _scalar(value) for key, value in pairs.items()}
        environment = variables | given
        words = [*_words(service.get("entrypoint")), *_words(service.get("command"))]
    image = str(container.get("image") or "")
    names = tuple(dict.fromkeys((name, f"{owner}/{name}" if owner and container is not service else name)))
    started = _launches(f"{path}#{name}", words, environment, image)
    host = (f"{Path(path).resolve()}#{names[-1]}", 0) if len(started) > 1 else None
    for launch, numbered in zip(started, _numbered(names, len(started)), strict=True):
        launch = replace(launch, has_environment=not unread)
        yield ConfiguredEngine(path, numbered, launch, image, host, unread, resources)


def _compose_env_files(path: str, given: Any) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables of a service's env files, and those of them that cannot be read."""
    variables: dict[str, str] = {}
    unread = []
    for entry in given if isinstance(given, list) else [given] if given else []:
        name = _scalar(entry.get("path") if isinstance(entry, dict) else entry)
        is_raw = isinstance(entry, dict) and entry.get("format") == "raw"
        try:
            text = read_text(str(Path(path).parent / name))
            env_file = EnvFile(read_for_docker(text)) if is_raw else read_for_compose(text)
        except (OSError, ValueError):
            env_file = None
        if env_file is None:
            unread.append(f"env_file {escape(name)}")
        else:
            variables |= env_file.variables
    return variables, tuple(unread)


def _read_env_files(engine: ConfiguredEngine) -> ConfiguredEngine:
    """Add the variables of the env files of ``docker run``, which ``--env`` overrides.

    :raises ValueError: if ``docker run`` refuses one of them.
    """
    launch = engine.launch
    variables: dict[str, str] = {}
    unread = []
    for name in launch.env_files:
        try:
            text = read_text(str(Path(engine.file).parent / name))
        except (OSError, ValueError):
            unread.append(f"env file {escape(name)}")
            continue
        try:
            variables |= read_for_docker(text)
        except ValueError as error:
            raise ValueError(f"{engine.label}: {escape(name)}: {error}") from None
    if not launch.env_files:
        return engine
    environment = {**variables, **launch.environment}
    launch = replace(launch, environment=environment, has_environment=bool(environment) and not unread)
    return replace(engine, launch=launch, unread=(*engine.unread, *unread))


def read_options_file(engine: ConfiguredEngine) -> ConfiguredEngine:
    """Add the options of a file that the command names. If it cannot be read, no option is known to be unset.

    An option of the command wins over the file's.
    """
    engine = _without_unknown_options(engine)
    launch = engine.launch
    named = next((launch.options[name][-1] for name in _OPTION_FILES if launch.options.get(name)), "")
    if not named:
        return engine
    try:
        text = named if named.lstrip()[:1] == "{" else read_text(str(Path(engine.file).parent / named))
        [document] = parse_yaml(engine.file, text)
        options = options_of(document)
    except (OSError, ValueError, NixlPluginError, AttributeError):
        unread = (*engine.unread, f"{OPTIONS_OF} {escape(named)}")
        return replace(engine, launch=replace(launch, has_options=False), unread=unread)
    return replace(engine, launch=replace(launch, options={**options, **launch.options}))


def _without_unknown_options(engine: ConfiguredEngine) -> ConfiguredEngine:
    """Drop JSON options whose value the file does not contain, and say so, as of words that may be any option."""
    launch = engine.launch
    unknown = [name for name in _JSON_OPTIONS if launch.options.get(name) and not is_resolved(launch.options[name][-1])]
    values = ((name, launch.options[name][-1]) for name in unknown)
    words = [*launch.unknown, *(printed_command(value) if value.startswith("$") else name for name, value in values)]
    if not words:
        return engine
    options = {name: values for name, values in launch.options.items() if name not in unknown}
    unread = tuple(f"{OPTIONS_OF} {escape(word)}" for word in words)
    return replace(engine, launch=replace(launch, options=options, has_options=False), unread=(*engine.unread, *unread))


def options_of(document: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the options that the keys of a file stand for."""
    return {
        f"--{str(key).replace('_', '-')}": [value if isinstance(value, str) else json.dumps(value, default=str)]
        for key, value in document.items()
        if value is not False and value is not None
    }


def _of_configuration(path: str, document: Mapping[str, Any]) -> Iterator[ConfiguredEngine]:
    """Yield the engine of a ``kv_transfer_config`` object, or of the file of ``vllm serve --config``."""
    if "kv_connector" in document:
        options = {"--kv-transfer-config": [json.dumps(document, default=str)]}
        yield ConfiguredEngine(path, (), Launch("vLLM", False, options, has_options=False, has_environment=False))
    elif any(name in document for name in _KV_TRANSFER):
        launch = Launch("vLLM", False, options_of(document), has_options=len(document) > 1, has_environment=False)
        yield ConfiguredEngine(path, (), launch)


def _of_ray(path: str, name: str, config: Mapping[str, Any]) -> ConfiguredEngine:
    """Return the engine of an ``LLMConfig`` of Ray Serve, which runs vLLM."""
    model, runtime = config.get("model_loading_config"), config.get("runtime_env")
    variables = runtime.get("env_vars") if isinstance(runtime, dict) else None
    environment = {str(key): _scalar(value) for key, value in variables.items()} if isinstance(variables, dict) else {}
    source = (model.get("model_source") or model.get("model_id")) if isinstance(model, dict) else ""
    launch = Launch(
        "vLLM",
        False,
        options_of(config["engine_kwargs"]),
        _scalar(source),
        environment,
        has_environment=bool(environment),
        launcher="Ray Serve",
    )
    return ConfiguredEngine(path, (name,), launch)


def _launches(label: str, words: list[str], environment: Mapping[str, str], image: str) -> list[Launch]:
    try:
        return launches(words, environment, image)
    except ScriptError as error:
        raise ValueError(f"{escape(label)} {error}") from None


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


def _requests(owner: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of each resource that a container, or a service of a Dynamo graph, requests."""
    requests: dict[str, int] = {}
    resources = owner.get("resources")
    for kind in resources.values() if isinstance(resources, dict) else ():
        for part in (kind, kind.get("custom")) if isinstance(kind, dict) else ():
            for name, value in part.items() if isinstance(part, dict) else ():
                text = _scalar(value)
                if text.isascii() and text.isdigit() and len(text) < 5:
                    resource = "nvidia.com/gpu" if name == "gpu" else str(name)
                    requests[resource] = max(int(text), requests.get(resource, 0))
    return requests


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
