# SPDX-License-Identifier: Apache-2.0
"""Options, ini values and environment variables, read once into one frozen dataclass.

An option wins over an ini value, and an ini value over an environment variable. Every bad value raises a
:class:`pytest.UsageError` of one sentence that names the value, its source and the accepted form.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from pytest_nixl.core.extensions import ExtensionError
from pytest_nixl.core.extras import pip_install
from pytest_nixl.core.redaction import hider, redact
from pytest_nixl.core.units import KIB, MIB
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.host.system import available_memory, in_bytes
from pytest_nixl.model.agent_options import THREADED, engine_agent
from pytest_nixl.model.kv_cache import format_tp
from pytest_nixl.model.memory import MEMORIES
from pytest_nixl.model.settings import OPTIONS, Option, Settings
from pytest_nixl.nixl.backends import BACKENDS, plugin_of
from pytest_nixl.session.default_profile import default_profile
from pytest_nixl.session.footprint import AUTO, automatic_footprint, ends_here, refuse_footprint
from pytest_nixl.session.parsers import parse_target_memory

#: The block sizes of the level ``quick``, in bytes: one where latency counts, one in the middle, and a large one.
QUICK_BLOCKS = (4 * KIB, MIB, 64 * MIB)


def read_settings(config: pytest.Config, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read every setting.

    :param environ: the environment variables.
    :raises pytest.UsageError: for the first bad value.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for item in OPTIONS:
        values[item.field], sources[item.field] = _read(item, config, environ)
    if sources["profile"] == "default":
        values["profile"], reason = default_profile(values["backend"])
        sources["profile"] = f"default: {reason}" if reason else "default"
    if values["level"] == "quick" and sources["blocks"] == "default":
        values["blocks"], sources["blocks"] = QUICK_BLOCKS, "default: three sizes at --nixl-level=quick"
    _imitate_engine(values, sources)
    if values["footprint"] == AUTO:
        rows = values["blocks"], values["batch"], values["depth"]
        values["footprint"], sources["footprint"] = automatic_footprint(*rows)
    ignored = [*_target_segment(values, sources, environ), *_ignored(sources, environ)]
    settings = Settings(**values, sources=sources, ignored=tuple(ignored))
    _check_together(settings)
    return settings


def readable_settings(config: pytest.Config, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings for the reports of a run that is refused: a value that is refused has its default.

    :param environ: the environment variables.
    """
    values: dict[str, Any] = {}
    for item in OPTIONS:
        try:
            values[item.field], _ = _read(item, config, environ)
        except pytest.UsageError:
            values[item.field] = item.usual
    return Settings(**values)


def _read(item: Option, config: pytest.Config, environ: Mapping[str, str]) -> tuple[Any, str]:
    option, ini = config.getoption(item.ini, None), config.getini(item.ini)
    if option is not None:
        return _parse(item, item.parse, option, item.flag), "option"
    if ini:
        return _parse(item, item.parse, str(ini), f"ini value {item.ini}"), "ini"
    for name in item.environment:
        if environ.get(name):
            text = _with_password(environ) if name == "ETCDCTL_USER" else environ[name]
            parse = item.variable or item.parse
            return _parse(item, parse, text, f"environment variable {name}"), f"environment {name}"
    return item.usual, "default"


def _with_password(environ: Mapping[str, str]) -> str:
    """Return ETCDCTL_USER, with ETCDCTL_PASSWORD added if it contains no password, as etcdctl does."""
    user, password = environ["ETCDCTL_USER"], environ.get("ETCDCTL_PASSWORD")
    return f"{user}:{password}" if password and ":" not in user else user


def _parse(item: Option, parse: Callable[[str], Any], text: str, source: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        fault, expected, form = str(error).partition(": expected ")
        message = f"{hider({}, text)(fault)}{expected}{form}"
        if not expected and not isinstance(error, ExtensionError):
            message = f"{message}: expected {item.form}"
        sentence = "\\n".join(message.splitlines())  # a parser may quote a value with line breaks
        raise pytest.UsageError(f"{source}: {sentence}") from None


def _imitate_engine(values: dict[str, Any], sources: dict[str, str]) -> None:
    """Set what ``--nixl-agent`` sets and no option, ini value or variable gives."""
    engine = engine_agent(values["agent"], values["backend"])
    if values["agent"] == "default":
        return
    imitated = {
        "progress_thread": ("on",) if engine.progress_thread else None,
        "threads": engine.threads,
        "sync_mode": engine.sync_mode if engine.sync_mode != "auto" else None,
    }
    for name, value in imitated.items():
        if value is not None and sources[name] == "default":
            values[name], sources[name] = value, f"--nixl-agent={values['agent']}"


def _target_segment(values: dict[str, Any], sources: dict[str, str], environ: Mapping[str, str]) -> Iterator[str]:
    """Take the target's memory type from NIXL_TARGET_SEG_TYPE, unless ``--nixl-memory`` is given.

    Yield a sentence if the variable is ignored.
    """
    name = "NIXL_TARGET_SEG_TYPE"
    text = environ.get(name)
    if not text:
        return
    if sources["memory"] != "default":
        yield f"{name}={text} is set and ignored: --nixl-memory is given ({sources['memory']})"
    elif text.upper() not in MEMORIES:
        yield f"{name}={text} is set and ignored: it is neither DRAM nor VRAM"
    else:
        values["memory"], sources["memory"] = parse_target_memory(text), f"environment {name}"


def _ignored(sources: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[str]:
    for item in OPTIONS:
        used = sources[item.field].removeprefix("environment ")
        for name in item.environment:
            if environ.get(name) and name != used:
                value = "***" if item.secret else redact(environ[name])
                reason = f"{item.flag} comes from {sources[item.field]}"
                yield f"{name}={value} is set and ignored: {reason}"
    namespace = environ.get("NIXL_ETCD_NAMESPACE")
    if namespace:
        yield f"NIXL_ETCD_NAMESPACE={namespace} is set and ignored: each test has its own key prefix in etcd"
    worker = environ.get("NIXL_WORKER_TYPE")
    if worker and worker.lower() != "nixl":
        yield f"NIXL_WORKER_TYPE={worker} is set and ignored: transfers are always made by NIXL"


def _check_together(settings: Settings) -> None:
    if settings.etcd_server == "external" and not settings.etcd:
        raise pytest.UsageError(
            "--nixl-etcd-server=external needs an endpoint: give --nixl-etcd URL or set NIXL_ETCD_ENDPOINTS"
        )
    if settings.etcd_server in ("container", "embedded") and settings.sources["etcd"] == "option":
        raise pytest.UsageError(
            f"--nixl-etcd names an existing etcd, but --nixl-etcd-server={settings.etcd_server} starts a new one: "
            "give only one of the two"
        )
    for name in settings.backend:
        if not BACKENDS[name].STORAGE and all(pair.stored for pair in settings.memory):
            raise pytest.UsageError(
                f"--nixl-backend={name} moves bytes between two agents, but every target in --nixl-memory="
                f"{','.join(map(str, settings.memory))} is storage: expected a target of DRAM or VRAM, or "
                "--nixl-backend=POSIX"
            )
    _check_agents(settings)
    _check_ranks(settings)
    refuse_footprint(settings)
    _check_memory(settings)
    _check_kv_plan(settings)
    _check_comparison(settings)
    if bool(settings.etcd_cert) != bool(settings.etcd_key):
        present, missing = ("cert", "key") if settings.etcd_cert else ("key", "cert")
        source = settings.sources[f"etcd_{present}"]
        raise pytest.UsageError(
            f"--nixl-etcd-{present}={getattr(settings, f'etcd_{present}')} ({source}) cannot be used alone: "
            f"expected --nixl-etcd-{missing} FILE or ETCDCTL_{missing.upper()} as well"
        )


def _check_agents(settings: Settings) -> None:
    chosen = ",".join(settings.backend)
    for parameter in settings.backend_params:
        if parameter.backend not in settings.backend:
            raise pytest.UsageError(
                f"--nixl-backend-params={parameter} is for a backend that is not requested by --nixl-backend={chosen}: "
                f"expected parameters of {chosen} only, or {parameter.backend} in --nixl-backend as well"
            )
    if settings.threads is not None and not any(plugin_of(name) in THREADED for name in settings.backend):
        raise pytest.UsageError(
            f"--nixl-threads={settings.threads} has no effect on --nixl-backend={chosen}: "
            f"expected a backend with worker threads, {' or '.join(THREADED)}"
        )


def _check_ranks(settings: Settings) -> None:
    if settings.rank is not None and settings.ranks is None:
        raise pytest.UsageError(
            f"--nixl-rank={settings.rank} is given without the number of ranks: expected --nixl-ranks N as well"
        )
    if settings.rank is not None and settings.ranks is not None and settings.rank >= settings.ranks:
        raise pytest.UsageError(
            f"--nixl-rank={settings.rank} is not below --nixl-ranks={settings.ranks}: "
            f"expected a rank from 0 to {settings.ranks - 1}"
        )


#: Bytes for each block in flight: the descriptors of both ends, and the message that creates them.
_DESCRIPTOR = 1024


def _check_memory(settings: Settings) -> None:
    """Refuse rows whose buffers do not fit into this host's memory: the kernel would kill a worker or another process.

    :raises pytest.UsageError: with the bytes needed and the bytes available.
    """
    set_here = [
        name for name in ("blocks", "batch", "depth") if not settings.sources.get(name, "").startswith("default")
    ]
    if not set_here:
        return
    block, batch, depth = max(settings.blocks), max(settings.batch), max(settings.depth)
    required = ends_here(settings) * block * batch * depth + batch * depth * _DESCRIPTOR
    available = available_memory(FactsRoot())
    if available is not None and required > available.size:
        flags = ", ".join(f"--nixl-{name}" for name in set_here)
        raise pytest.UsageError(
            f"the largest row ({block} bytes a block, batch {batch}, depth {depth}) needs {in_bytes(required)} of host "
            f"memory on this host, but {available} are available: expected smaller values of {flags}"
        )


def _check_kv_plan(settings: Settings) -> None:
    try:
        settings.kv_plan  # noqa: B018 - to be computed once before anything starts
    except ValueError as error:
        raise pytest.UsageError(f"--nixl-kv-tp={format_tp(settings.kv_tp)}: {error}") from None


def _check_comparison(settings: Settings) -> None:
    if settings.baseline and settings.compare_image is not None:
        raise pytest.UsageError(
            "--nixl-baseline compares with a recorded run and --nixl-compare-image with a run made now: give only "
            "one of the two"
        )
    image = settings.baseline and not os.path.exists(settings.baseline) and not settings.first_baseline
    if image and not settings.store:
        raise pytest.UsageError(
            f"--nixl-baseline={settings.baseline} is not an existing path, and an image is looked up in the store: "
            "expected --nixl-store DIR as well, or the path of a record (FILE.json), which the first run makes"
        )
    if settings.compares and importlib.util.find_spec("scipy") is None:
        flag = "--nixl-baseline" if settings.baseline else "--nixl-compare-image"
        raise pytest.UsageError(f"{flag} needs SciPy, which is not installed: {pip_install('compare')}")


def setting_lines(settings: Settings) -> Iterator[str]:
    """Yield one line for each setting with its value and where that came from."""
    for item in OPTIONS:
        value = item.show(getattr(settings, item.field))
        yield f"{item.flag}={value} ({settings.sources[item.field]})"
    yield from settings.ignored


def changed_settings(settings: Settings) -> Iterator[str]:
    """Yield each setting that is not its usual default, with where it came from if that is not the command line."""
    for item in OPTIONS:
        source = settings.sources[item.field]
        if source != "default":
            value = item.show(getattr(settings, item.field))
            yield f"{item.flag}={value}" if source == "option" else f"{item.flag}={value} ({source})"
