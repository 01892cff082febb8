# SPDX-License-Identifier: Apache-2.0
"""Seeded hostile inputs, by class. Each function makes one try, and returns what was wrong with the outcome.

An input must end in a value or in one refusal: a sentence of a limited length, without control characters and without
the secret that was planted in the input, after a limited processor time.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest
from helpers.cli_run import ROOT
from helpers.records import KEY, record
from helpers.secret_shapes import HARMLESS, PLACES, SHAPES, letters, visible_parts
from run_endings import ENDS, Ending, endings, run_ending, violations

from pytest_nixl import cli
from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.core.redaction import hider, redact
from pytest_nixl.core.strict import error_text
from pytest_nixl.etcd.client import EtcdClient, connect
from pytest_nixl.etcd.endpoints import Endpoint
from pytest_nixl.model.settings import OPTIONS
from pytest_nixl.session.settings import _parse as parse_option

#: Seconds of this thread's processor time that one try may take, and the most characters that it may print.
LONGEST, MOST_OUTPUT = 5.0, 2_000_000
#: The most characters of a refusal: :func:`error_text` cuts it, and says so.
MOST_REFUSAL = 2200
#: A command of a shell that leaves a file if it is executed.
EXECUTED = "hostile-input-was-executed"

#: What is hostile in a text.
NOISE = (
    "", " ", "\n", "\r\n", "\t", "\0", "\x1b[31m", "\x1b]0;title\x07", "\u202e", "\u2028", "\ufeff", "\udc80", "٣", "Å",
    "-1", "0", "00", "1e999", "-0.0", "nan", "inf", "1_0", "0x10", "9" * 30, "1" * 5000, "%s%n{}", "{0.__class__}",
    "${HOME}", f"$(touch {EXECUTED})", f"`touch {EXECUTED}`", f"; touch {EXECUTED};", "'", '"', "\\", "--", "-",
    "../../../etc/passwd", "/dev/zero", "/proc/self/mem", "/proc/kmsg", "file:///etc/passwd", "http://", "://", "@",
    ":", ",", "=", ",,,,", "[", "]", "[" * 3000, "{" * 3000, "(" * 200, "null", "true", "!!python/object:os.system",
    "&a [*a]", "<!DOCTYPE a [<!ENTITY b 'c'>]>", "<a>" * 500, "x" * 100_000, "0.0.0.0", "[::1]", "localhost:99999",
)  # fmt: skip
#: Texts near those that options accept.
NEAR = (
    "64KiB", "4KiB..1MiB", "1MiB,64MiB", "UCX", "UCX,LIBFABRIC", "DRAM:VRAM", "VRAM@0:VRAM@3", "WRITE,READ", "5%", "2s",
    "100ms", "quick", "loopback", "http://127.0.0.1:2379", "http://a:1,http://b:2", "0.0.0.0:23790", "0:1,1:0", "auto",
    "UCX:num_workers=4", "me:password", "alltoall", "registry.example/image:1.2", "report.html,rows.csv", "2", "on,off",
)  # fmt: skip


def noise(choice: random.Random) -> str:
    """Return a hostile piece of text."""
    return choice.choice(NOISE) if choice.random() < 0.8 else "".join(chr(choice.randrange(0x500)) for _ in range(9))


def mutated(choice: random.Random, text: str) -> str:
    """Return a text after a few random changes."""
    for _ in range(choice.randint(1, 3)):
        place = choice.randint(0, len(text))
        end = min(len(text), place + choice.randint(0, 8))
        text = choice.choice(
            (
                text[:place] + noise(choice) + text[place:],
                text[:place] + text[end:],
                text[:place] + noise(choice) + text[end:],
                text + text[place:end] * choice.randint(1, 50),
                text[:place],
            )
        )
    return text


def has_controls(text: str) -> bool:
    """Whether a text could control a terminal, or cannot be written at all."""
    return any(category(sign) in ("Cc", "Cs") or sign in "\u2028\u202e" for sign in text if sign != "\t")


def refusal_faults(sentence: str, secret: str = "") -> Iterator[str]:
    """Yield what is wrong with a refusal."""
    if len(sentence) > MOST_REFUSAL:
        yield f"a refusal of {len(sentence)} characters"
    if has_controls(sentence.replace("\nremedy: ", " ")):
        yield f"a control character in {sentence!r}"
    if secret and secret in sentence:
        yield f"a secret in {sentence!r}"
    if not sentence.strip():
        yield "an empty refusal"


# --- Options ----------------------------------------------------------------------------------------------------------


def option(choice: random.Random, folder: Path) -> str:
    """Give an option a hostile value. A secret is planted in the options whose values are never shown whole."""
    item = choice.choice(OPTIONS)
    secret = letters(choice, 12)
    start = choice.choice((*NEAR, item.default, item.form, f"me:{secret}", f"http://me:{secret}@h:1"))
    text = mutated(choice, start)
    planted = secret if (item.secret or item.hidden) and f":{secret}@" in text else ""
    try:
        parse_option(item, item.parse, text, item.flag)
    except pytest.UsageError as error:  # as pytest_cmdline_main of the plugin writes it
        return "; ".join(refusal_faults(error_text(hider({})(str(error))), planted))
    return ""


#: Command lines that end soon, whatever is in them: a word of NOISE, NEAR or a secret stands for WORD.
COMMANDS = (
    ("explain", "WORD"), ("explain", "--findings", "WORD"), ("endpoint", "WORD"), ("profile", "show", "WORD"),
    ("profile", "judge", "WORD", "--nixlbench=WORD"), ("profile", "learn", "WORD", "--name=WORD", "--output=WORD"),
    ("compare", "WORD", "WORD", "--store=WORD"), ("compare", "WORD", "WORD", "--max-regression=WORD"),
    ("report", "WORD", "WORD"), ("report", "WORD", "OUT/a.html", "--baseline=WORD"), ("history", "WORD"),
    ("history", "OUT", "--row=WORD", "--last=WORD"), ("connector", "WORD", "WORD"), ("telemetry", "WORD"),
    ("etcd", "WORD", "--namespace=WORD"), ("etcd", "http://127.0.0.1:1", "--max-request-bytes=WORD"),
    ("run", "WORD", "--print"), ("run", "quick", "--print", "--backend=WORD", "--profile=WORD"),
    ("run", "quick", "--print", "--backend=UCX", "--", "--nixl-etcd-user=WORD", "WORD"),
    ("run", "quick", "--print", "--backend=UCX", "--suite=WORD"), ("run", "--as-given", "--print", "--", "WORD"),
    ("facts", "--root=WORD"), ("doctor", "--root=WORD"), ("doctor", "--profile=WORD"), ("clean", "--etcd=WORD"),
    ("init", "OUT/new", "--image=WORD", "--root=WORD"), ("WORD",), ("explain", "--unknown=WORD"), ("compare", "--WORD"),
)  # fmt: skip


def command(choice: random.Random, folder: Path) -> str:
    """Give a command hostile words."""
    secret = f"{letters(choice, 12)}Zq"
    around = (f"http://me:{secret}@127.0.0.1:1", f"me:{secret}@registry.example/image:1", f"password={secret}",
              f"--token={secret}", f"http://127.0.0.1:1/?token={secret}&a=b")  # fmt: skip
    (folder / "OUT").mkdir(exist_ok=True)

    def argument() -> str:
        kind = choice.random()
        if kind < 0.3:
            return choice.choice(around)
        return mutated(choice, choice.choice(NEAR)) if kind < 0.7 else noise(choice)

    arguments = [part.replace("OUT", str(folder / "OUT")) for part in choice.choice(COMMANDS)]
    return _command(
        [part.replace("WORD", argument()[:100_000]) if "WORD" in part else part for part in arguments], secret
    )


# --- Files ------------------------------------------------------------------------------------------------------------

_MATRIX = "0 0 1M 1M\n0 0 1M 1M\n0 0 0 5K\n0 0 0 0\n"
_CONNECTOR = json.dumps(
    {"args": ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})]}
)
#: Healthy files by the command that reads them.
SEEDS: dict[tuple[str, ...], Callable[[], str]] = {
    ("compare", "FILE", "FILE"): lambda: json.dumps(record("image:1", {KEY: [5.0, 5.1, 5.2]})),
    ("report", "FILE", "OUT/page.html"): lambda: json.dumps(record("image:1", {KEY: [5.0, 5.1, 5.2]})),
    ("report", "FILE", "OUT/rows.csv"): lambda: json.dumps(record("image:1", {KEY: [5.0, 5.1, 5.2]})),
    ("profile", "show", "FILE"): lambda: (ROOT / "pytest_nixl/profiles/loopback.toml").read_text(),
    ("profile", "learn", "FILE", "--name=x", "--output=OUT/new.toml"): lambda: json.dumps(record("i:1", {KEY: [5.0]})),
    ("profile", "judge", "loopback", "--nixlbench=FILE"): lambda: (
        ROOT / "fixtures/nixlbench/01_normal.rank_a.out"
    ).read_text(),
    ("connector", "FILE", "FILE"): lambda: _CONNECTOR,
    ("explain", "FILE"): lambda: (ROOT / "fixtures/nixlbench/21_target_killed.rank_a.out").read_text(),
    ("history", "FOLDER"): lambda: json.dumps(record("image:1", {KEY: [5.0, 5.1, 5.2]})),
    ("doctor", "--root=FOLDER"): lambda: "{}",
}


def file(choice: random.Random, folder: Path) -> str:
    """Give a command a hostile file: changed text, random bytes, or what is not a file."""
    arguments, seed = choice.choice([*SEEDS.items()])
    secret = f"{letters(choice, 12)}Zq"
    path = folder / "FILE.json"
    path.unlink(missing_ok=True)
    kind = choice.random()
    if kind < 0.04:
        os.mkfifo(path)
    elif kind < 0.08:
        path.symlink_to(choice.choice(("/dev/zero", "/proc/self/pagemap", "/proc/kmsg", "/", path.name, "/nowhere")))
    elif kind < 0.2:
        path.write_bytes(choice.randbytes(choice.randint(0, 2000)))
    else:
        text = seed().replace("image:1", f"http://me:{secret}@h/image:1")
        path.write_bytes(mutated(choice, text).encode("utf-8", "surrogateescape"))
    (folder / "OUT").mkdir(exist_ok=True)
    options = [argument.replace("FILE", str(path)).replace("OUT", str(folder / "OUT")).replace("FOLDER", str(folder))
             for argument in arguments]  # fmt: skip
    return _command(options, secret)


def tree(choice: random.Random, folder: Path, node: Path) -> str:
    """Put a hostile file into the recorded tree of a host, and let a command read it."""
    files = sorted(path for path in node.rglob("*") if path.is_file() and not path.is_symlink())
    private = [path for path in files if path.parent.name in ("pytest-nixl", "id")]
    path = choice.choice(private if private and choice.random() < 0.5 else files)
    healthy = path.read_bytes()
    path.unlink()
    kind = choice.random()
    if kind < 0.2:
        os.mkfifo(path)
    elif kind < 0.3:
        path.symlink_to(choice.choice(("/dev/zero", "/proc/kmsg", path.name, "/nowhere", ".")))
    elif kind < 0.4:
        path.mkdir()
    elif kind < 0.7:
        path.write_bytes(choice.choice((b"{}", b"[]", b"null", b"7", b'"x"', b"[{}]", b"\xff\xfe", b"")))
    else:
        path.write_bytes(mutated(choice, healthy.decode()).encode("utf-8", "surrogateescape"))
    try:
        arguments = choice.choice((["facts"], ["doctor"], ["init", str(folder / "new"), "--image=a/b:1"]))
        return _command([*arguments, f"--root={node}"], "no secret was planted")
    finally:
        shutil.rmtree(folder / "new", ignore_errors=True)
        path.rmdir() if kind >= 0.3 and kind < 0.4 else path.unlink()
        path.write_bytes(healthy)


def _command(arguments: list[str], secret: str) -> str:
    output, errors = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            code = cli.main(arguments)
    except SystemExit as error:  # what argparse refuses
        code = int(error.code or 0)
    printed, refusal = output.getvalue(), errors.getvalue()
    faults = [] if code in (0, 1, 2) else [f"exit code {code}"]
    if code == cli.COULD_NOT_RUN:
        faults += [*refusal_faults(refusal.rstrip("\n"), secret)]
    if len(printed) > MOST_OUTPUT:
        faults.append(f"{len(printed)} characters printed")
    if has_controls(printed.replace("\n", "")):
        faults.append(f"a control character in {printed[:300]!r}")
    if secret in printed + refusal:
        faults.append(f"a secret in {printed + refusal!r:.300}")
    return "; ".join(faults)


# --- etcds ------------------------------------------------------------------------------------------------------------

#: Answers of an etcd, as JSON, that are nearly right.
ANSWERS = (
    {"header": {"revision": "1"}, "kvs": [{"key": "YQ==", "value": "YQ==", "create_revision": "1"}], "count": "1"},
    {"header": {"revision": "1"}, "ID": "7", "TTL": "10"},
    {"header": {}, "version": "3.5.1", "leader": "1", "dbSize": "1"},
    {"error": "etcdserver: mvcc: database space exceeded", "code": 8},
    {"error": "etcdserver: user name is empty", "code": 3, "message": "etcdserver: user name is empty"},
    {"token": "abc"},
)
_STATUS = ("200 OK", "200", "400 Bad", "401 No", "404 None", "500 Error", "503 Busy", "999 x", "100 Continue", "301 Go")


def _answer(choice: random.Random, request: bytes) -> bytes:
    body = json.dumps(choice.choice(ANSWERS))
    if choice.random() < 0.8:
        body = mutated(choice, body)
    data = body.encode("utf-8", "surrogateescape")
    kind = choice.random()
    if kind < 0.1:
        return choice.randbytes(choice.randint(0, 300))
    if kind < 0.2:
        data = request  # with the password
    length = choice.choice((len(data), len(data), len(data), len(data) + 9, max(0, len(data) - 9), -1, "x", 10**20))
    more = choice.choice(("", "", "Content-Encoding: gzip\r\n", "X: " + "y" * 70_000 + "\r\n", "Location: http://h\r\n",
                          "Transfer-Encoding: chunked\r\n", noise(choice)))  # fmt: skip
    head = f"HTTP/1.1 {choice.choice(_STATUS)}\r\nContent-Length: {length}\r\nConnection: close\r\n{more}\r\n"
    return head.encode("utf-8", "surrogateescape") + data


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    choice = random.Random()


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        self.request.settimeout(2)
        try:
            request = self.request.recv(65536)
            self.request.sendall(_answer(self.server.choice, request))
            self.request.shutdown(socket.SHUT_WR)
        except OSError:
            pass


@contextmanager
def hostile_etcd() -> Iterator[_Server]:
    """Serve answers that no etcd gives."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


_CALLS: tuple[Callable[[EtcdClient], object], ...] = (
    lambda client: client.get("a"),
    lambda client: client.put("a", b"b"),
    lambda client: client.get_prefix("a"),
    lambda client: client.by_creation("a"),
    lambda client: client.count_prefix("a"),
    lambda client: client.delete("a"),
    lambda client: client.create("a", b"b"),
    lambda client: client.version(),
    lambda client: client.status(),
    lambda client: client.lease_of("a"),
    lambda client: client.time_to_live(7),
    lambda client: client.page("a", limit=2),
)


def etcd(choice: random.Random, folder: Path, server: _Server) -> str:
    """Ask an etcd whose answers are hostile, or read the address of one."""
    secret = letters(choice, 12)
    if choice.random() < 0.3:
        text = mutated(choice, choice.choice(("http://127.0.0.1:2379", "https://a:1,b:2", f"http://me:{secret}@h:1")))
        return _command(["endpoint", text], secret if f":{secret}@" in text else "no secret was planted")
    server.choice = choice
    user, password = choice.choice((("", ""), ("me", secret)))
    endpoint = Endpoint("http", "127.0.0.1", server.server_address[1])
    with connect([endpoint], user=user, password=password, timeout=1.0) as client:
        try:
            choice.choice(_CALLS)(client)
        except NixlPluginError as error:
            text = redact(str(error))
            return "; ".join(refusal_faults(text.replace("\n", " "), secret))  # remedy and detail are lines of it
    return ""


# --- Secrets ----------------------------------------------------------------------------------------------------------


def secret(choice: random.Random, folder: Path) -> str:
    """Write a text with a secret, or a harmless one, to a place of a record."""
    write = choice.choice(PLACES)
    if choice.random() < 0.2:
        text = choice.choice(HARMLESS)
        return "" if redact(text) == text else f"changed: {text!r}"
    around, make = choice.choice(SHAPES)
    planted = make(choice)
    text = around.format(planted)
    before, after = (choice.choice(("", "", "2 errors: ", "at 0x7f00: ", "[rank 3] ", "retry, ")) for _ in range(2))
    text = f"{before}{text}\n{after}the end" if around[0] not in "{[('" or not before else f"{text}\n{after}"
    shown = visible_parts(planted, write(text))
    return f"{shown} of {text!r}" if shown else ""


# --- Signals and ends of a run ----------------------------------------------------------------------------------------

_SIGNALS = [ending for ending in endings() if ending.end.startswith("SIG")]
_NOT_BY_SIGNAL = [ending for ending in endings() if not ending.end.startswith("SIG")]
assert {ending.end for ending in _SIGNALS} <= ENDS.keys()


def _ended(ending: Ending, folder: Path) -> str:
    return "; ".join(f"{ending}: {fault}" for fault in violations(ending, run_ending(ending, folder)))


def signals(choice: random.Random, folder: Path) -> str:
    """Send a signal to a run from one of its hooks."""
    return _ended(choice.choice(_SIGNALS), folder)


def end(choice: random.Random, folder: Path) -> str:
    """End or falsify a run."""
    return _ended(choice.choice(_NOT_BY_SIGNAL), folder)


@contextmanager
def without_names() -> Iterator[None]:
    """Look no name up: hostile ones would go to the DNS server of this machine. A double."""
    lookup = socket.getaddrinfo

    def answer(host: Any, *more: Any, **named: Any) -> Any:
        if str(host) in ("127.0.0.1", "localhost"):
            return lookup(host, *more, **named)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", answer)
        yield


# --- Tries ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostileClass:
    """A class of inputs.

    :param tries: how many are made in CI; a soak makes ten times as many.
    :param apart: whether each try needs an empty folder.
    """

    make: Callable[..., str]
    tries: int
    apart: bool = False


CLASSES = {
    "options": HostileClass(option, 550),
    "commands": HostileClass(command, 250),
    "files": HostileClass(file, 350),
    "trees": HostileClass(tree, 20),
    "etcds": HostileClass(etcd, 220),
    "secrets": HostileClass(secret, 600),
    "signals": HostileClass(signals, 4, apart=True),
    "ends": HostileClass(end, 6, apart=True),
}


def make_tries(name: str, count: int, folder: Path, **more: object) -> list[str]:
    """Make tries of one class, and return the violations, each with the seed that repeats it."""
    kind, faults = CLASSES[name], []
    for number in range(count):
        place = folder
        if kind.apart:
            place = folder / str(number)
            place.mkdir()
        seed = f"{name}-{number}"
        started = time.thread_time()
        try:
            with without_names():
                fault = kind.make(random.Random(seed), place, **more)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if (seconds := time.thread_time() - started) > LONGEST:
            fault = f"{fault}; {seconds:.1f} s"
        if fault:
            faults.append(f"{seed}: {fault:.600}")
    if (folder / EXECUTED).exists() or Path(EXECUTED).exists():
        faults.append(f"{name}: an input was executed")
    return faults
