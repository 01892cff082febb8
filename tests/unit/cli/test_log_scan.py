# SPDX-License-Identifier: Apache-2.0
"""A known message is recognised in a log by who says it and what it says; its twins are not."""

from __future__ import annotations

import html
import io
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from time import process_time

import pytest
from field.score import read_lines, scores

from pytest_nixl.cli import log_scan
from pytest_nixl.cli.log_scan import GAP, LogScan, Message, read_messages
from pytest_nixl.core.texts import parse_texts, text_file

UCX = "[1763600001.101] [pod-a:211  :0]     ucp_context.c:1268 UCX  WARN  "
DEVICES = "network device … not available, please use one or more of"
TRANSPORTS = "transport … not available, please use one or more of"
AT_REGISTER = "NIXL_ERR_BACKEND at register_memory"
RDMA = "[1763600001.1] [pod-a:211:0]        ib_new.c:59   UCX  ERROR "
RAISED = "nixl._bindings.nixlBackendError: NIXL_ERR_BACKEND"


#: How the first line of each speaker begins.
SPEAKERS = {
    "NIXL": "E1127 10:00:00.123456  77 nixl_agent.cpp:9] ",
    "NIXL's Python": "2026-11-27 10:00:00 NIXL ERROR _api.py:70 ",
    "UCX": "[1763600001.101] [pod-a:211  :0]   ucp_context.c:12   UCX  ERROR ",
    "libfabric": "libfabric:72089:1763600001::efa:core:efa_domain_open():889<warn> ",
    "libibverbs": "libibverbs: ",
    "vLLM": "(EngineCore pid=9) ERROR 11-20 10:00:01 [nixl_connector.py:99] ",
    "SGLang": "[2025-11-20 10:00:01 TP0] ",
    "Dynamo": "2026-11-28T10:00:00Z ERROR dynamo_llm::kv: ",
    "TensorRT-LLM": "[TensorRT-LLM][ERROR] ",
    "Ray": "(raylet) ray: ",
    "etcd": '{"level":"warn","caller":"etcdserver/a.go:1","msg":"',
    "CUDA": "nvidia: ",
    "NCCL": "pod:1:1 [0] NCCL WARN ",
    "PyTorch": "[rank0]: RuntimeError: ",
    "Kubernetes": "kubelet: ",
    "LMCache": "[2026-11-20 10:00:01,765] LMCache ERROR: ",
    "Python": "Error: ",
    "kernel": "[ 12.345678] ",
    "loader": "ImportError: ",
}


#: The entries, and who says them.
TEXTS = read_messages(parse_texts(text_file("error-texts")))


def scan(log: str | bytes) -> LogScan:
    result = LogScan(*TEXTS)
    result.read(io.BytesIO(log.encode() if isinstance(log, str) else log))
    return result


def titles(log: str) -> list[str]:
    return [match.message.title for match in scan(log).seen()]


def test_an_unused_variable_is_harmless_unless_ucx_knows_a_similar_name() -> None:
    unused = f"{UCX}unused environment variable: UCX_NET_DEVICE"
    (harmless,) = scan(unused).seen()
    (typing_error,) = scan(f"{unused} (maybe: UCX_NET_DEVICES?)").seen()
    assert (harmless.message.weight, typing_error.message.weight) == ("harmless", "likely")


@pytest.mark.parametrize(
    ("line", "twin"),
    [
        # A class of an engine or of NIXL that lacks what another part calls: their releases do not fit.
        ("TypeError: NixlKVSender.send() takes 2 positional arguments but 3 were given",
         "TypeError: Sender.send() takes 2 positional arguments but 3 were given"),
        ("AttributeError: 'CommonKVManager' object has no attribute 'kv_args'",
         "ERROR [nixl_connector.py:70] AttributeError: 'dict' object has no attribute 'kv_args'"),
        ("default-scheduler  0/8 nodes are available: 8 Insufficient rdma/hca_a.",
         "default-scheduler  0/8 nodes are available: 8 Insufficient cpu."),
        ("[a:1:1:7] Caught signal 11 (Segmentation fault: invalid permissions for mapped object at address 0x7f)",
         "a page with invalid permissions for mapped object at address 0x7f"),
        ("nvidia-nvswitch0: SXid (PCI:0000:c5:00.0): 12028, Non-fatal", "nvidia-nvswitch0: Probing PCI 0000:c5:00.0"),
        # A short text needs its speaker's sign.
        ("etcdserver: request is too large", "error: request is too large: 130000 tokens"),
        (f"{UCX}different pid namespaces", "two processes in different pid namespaces"),
        # A line that its logger calls information or debugging reports no problem, whatever it says.
        (f"{RDMA}ibv_open_device(mlx5_0) failed: Permission denied",
         f"{RDMA.replace('ERROR', 'DEBUG')}ibv_open_device(mlx5_0) failed: Permission denied"),
        ("E1127 10:00:00.1  77 a.cpp:9] Conversion to bool failed",
         "I1127 10:00:00.1  77 a.cpp:9] Conversion to bool failed"),
        # A library that logs as UCX does is not UCX.
        ("[1.1] [pod-a:211 :0]  cache.c:231  UCX  ERROR failed to open ipc mem handle. addr:0x7",
         "[1.1] [pod-a:211 :0]  cache.c:231  UCC  ERROR failed to open ipc mem handle. addr:0x7"),
        # A line that another native logger wrote is not this speaker's.
        ("Transport retry count exceeded on mlx5_0:1/IB (synd 0x15 vend 0x81)",
         "[ 12.345678] Transport retry count exceeded on mlx5_0:1/IB (synd 0x15 vend 0x81)"),
        # What a line must have, and must not have.
        (f"{UCX}unused environment variable: UCX_FOO", "unused environment variable: FOO"),
        ("E1120 10:00:01.000001 4242 libfabric_rail.cpp:1362] fi_mr_reg failed on rail 2: Cannot allocate memory",
         "I1120 10:00:01.000001 4242 libfabric_rail.cpp:1362] fi_mr_reg worked on rail 2: Cannot allocate memory"),
    ],
)  # fmt: skip
def test_a_twin_of_a_message_stays_silent(line: str, twin: str) -> None:
    assert len(titles(line)) == 1
    assert titles(twin) == []


def test_a_message_is_counted_and_its_first_line_numbered_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_scan, "_BLOCK_BYTES", 100)
    result = scan("nothing\n" * 40 + f"{RAISED}\nnothing\n" * 30)
    [match] = result.seen()
    assert (match.line, match.count, result.line_count) == (41, 30, 100)


def test_the_call_is_also_read_from_the_block_before(monkeypatch: pytest.MonkeyPatch) -> None:
    call = '  File "nixl/_api.py", line 266, in register_memory\n'
    monkeypatch.setattr(log_scan, "_BLOCK_BYTES", len(call))
    assert titles(call + RAISED) == [AT_REGISTER]


INFO = "INFO 11-20 10:00:01 [loggers.py:12] Engine 000: Avg prompt throughput: 812.1 tokens/s, Running: 12 reqs\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "title"),
    [
        (f"{'x' * 200} {RAISED} ", "NIXL_ERR_BACKEND"),
        ("network devices not available, please use one or more ", None),
        ("not available, please use one or more of, ", None),
        ("error: request is too large; ", None),
        (INFO * 19 + RAISED + "\n", "NIXL_ERR_BACKEND"),
        (f"{RDMA}ibv_new_call(1) failed: Bad address\n", "UCX: an RDMA call failed: Bad address"),
    ],
)
def test_no_log_takes_much_longer_than_an_ordinary_one(text: str, title: str | None) -> None:
    def seconds(text: str, titles: list[str], length: int = 1_600_000) -> float:
        result = LogScan(*TEXTS)
        log = io.BytesIO((text * (length // len(text))).encode())
        started = process_time()
        result.read(log)
        taken = process_time() - started
        assert [match.message.title for match in result.seen()] == titles
        return taken

    expected = [title] if title else []
    longest = max(seconds(text, expected, length) for length in (200_000, 1_600_000))
    assert longest < 30 * max(seconds(INFO, []), 0.02)


@pytest.mark.parametrize(
    ("line", "title"),
    [
        # One device is not a transport, and two transports are not devices.
        (f"{UCX}network devices 'a:1','b:1' are not available, please use one or more of: 'c'", DEVICES),
        (f"{UCX}transports 'cuda_copy','cuda_ipc' are not available, please use one or more of: tcp", TRANSPORTS),
        (f"{UCX}model 'rc' is not available, please use one or more of: tcp", None),
        # An error without an entry.
        (f"{RDMA}ibv_new_call(1) failed: Cannot allocate memory", "UCX: an RDMA call failed: Cannot allocate memory"),
        (f"{RDMA}ibv_new_call(1) failed: Weird reason", "UCX: an RDMA call failed"),
        # The function that failed tells the library, whatever the file is called.
        ("new_file.c:12   UCX  ERROR cuNewCall(1) failed: initialization error", "UCX: CUDA: the driver refuses"),
        ("new_file.c:12   UCX  ERROR new_call(1) failed: initialization error", "UCX: an error without an entry"),
        ("E1127 10:00:00.1  77 libfabric_rail.cpp:9] fi_new failed: Connection timed out",
         "NIXL: LIBFABRIC: the other side is not reached"),
        ("[TensorRT-LLM][ERROR] Assertion failed: a == b (/src/tensorrt_llm/executor/nixl_utils/transferAgent.cpp:5)",
         "TensorRT-LLM: the transfer of the cache failed at an assertion"),
        ("ray.exceptions.NodeDiedError: the node", "Ray: a worker is gone"),
        ("2026-11-28T10:00:00Z ERROR dynamo_runtime::transports::nats: weird",
         "Dynamo: NATS: an error without an entry"),
        ("2026-11-28T10:00:00Z  INFO dynamo_runtime::transports::nats: weird", None),
        # A reason before the position in the source is of another program.
        ("Connection timed out: E1127 10:00:00.1  77 libfabric_rail.cpp:9] fi_new failed",
         "NIXL: LIBFABRIC: an error without an entry"),
        # Lines that report no error, and those of other programs.
        ("W1127 10:00:00.1  77 libfabric_rail.cpp:9] fi_new failed: Connection timed out", None),
        ("E1127 10:00:00.1  77 server.cpp:9] accept failed: Connection timed out", None),
        ("UCX  ERROR handling: Cannot allocate memory", None),
    ],
)  # fmt: skip
def test_a_line_is_explained_by_its_entry_or_else_by_its_part_and_reason(line: str, title: str | None) -> None:
    assert titles(line) == ([] if title is None else [title])


def test_every_entry_has_its_own_title_and_says_what_to_do() -> None:
    messages, _ = TEXTS
    assert len({message.title for message in messages}) == len(messages)
    assert [
        message.title for message in messages if message.weight != "harmless" and not message.fields.get("do")
    ] == []


@pytest.mark.parametrize("prefix", ["[1.1] [pod-a:211 :0]  cache.c:231  UCC  ERROR ", "E1127 10:00:00.1  77 a.cpp:9] "])
def test_no_entry_explains_the_line_of_another_speaker(prefix: str) -> None:
    messages, speakers = TEXTS
    lines = {
        (message.title, form.text): f"{prefix}{form.text.replace(GAP, 'x')} {b' '.join(message.has).decode()}".lower()
        for message in messages
        for form in message.forms
    }
    foreign = {
        key: line for key, line in lines.items()
        if not any(speakers[message.by].sign.search(line.encode()) for message in messages if message.title == key[0])
    }  # fmt: skip
    assert len(foreign) > 200
    whole = LogScan(messages, speakers)  # to make one takes much longer than to read a line
    whole.feed("\n\n".join([*foreign.values(), ""]).encode())
    titles = {seen.message.title for seen in whole.seen()}
    explained = set()
    for key, line in foreign.items():
        if key[0] in titles:  # of this line, or of another
            line_scan = LogScan(messages, speakers)
            line_scan.feed(line.encode())
            if key[0] in {seen.message.title for seen in line_scan.seen()}:
                explained.add(key)
    assert explained == set()


@pytest.mark.parametrize("field_set", ["lines", "held_out", "public", "set_aside"])
def test_nothing_false_is_said_of_a_line_from_the_field(field_set: str) -> None:
    results = list(scores(field_set))
    assert [line["log"] for line, score in results if score == "false"] == []
    causes = [score for line, score in results if line["answer"] == "cause"]
    assert causes.count("right") >= 0.7 * len(causes)
    assert len(read_lines(field_set)) >= (60 if field_set == "set_aside" else 75)


def sample_lines() -> Iterator[tuple[str, str]]:
    """Yield a line of each entry, as its speaker says it, with the lines before it."""
    messages, _ = TEXTS
    for message in messages:
        has, after = message.fields.get("has", [""]), message.fields.get("after", [])
        for form in message.forms[:1]:
            speaker = SPEAKERS[message.by]
            if message.weight == "harmless":
                speaker = speaker.replace("ERROR", "WARN")
            line = speaker + form.text.replace(GAP, has[0] if "plugin" in message.title else "x1")
            if not any(part.lower() in line.lower() for part in has):
                line += f" {has[0]}"
            yield f'  File "a.py", line 1, {after[0]}\n' if after else "", line


def entry_finder(*, quoted: bool = False) -> Callable[[str], Message | None]:
    """Return a function that names the first finding in a text."""
    log = LogScan(*TEXTS, quoted=quoted)

    def find(text: str) -> Message | None:
        log._seen.clear()
        log._before, log._bytes_read = b"", 0
        log.read(io.BytesIO(text.encode()))
        return next((seen.message for seen in log.seen()), None)

    return find


def outcome(message: Message | None, entry: Message, whole: str) -> str:
    """Return whether what is said of a part of a line is right, silent, generic (true of the whole line) or false."""
    if message is None:
        return "silent"
    if message.title == entry.title:
        return "right"
    if message.is_class:
        return "generic"
    _, speakers = TEXTS
    alone = LogScan([message], speakers)
    alone.read(io.BytesIO(whole.encode()))
    return "generic" if alone.seen() else "false"


@pytest.mark.long
@pytest.mark.parametrize(("quoted", "least"), [(False, 0.4), (True, 0.5)])
def test_a_line_that_is_cut_names_its_own_entry_or_nothing(quoted: bool, least: float) -> None:
    find = entry_finder(quoted=quoted)
    outcomes: Counter[str] = Counter()
    false = []
    for before, line in sample_lines():
        entry = find(f"{before}{line}: so it ended")
        assert entry is not None
        words = line.split(" ")
        for kept in {round(share * len(words)) for share in (0.6, 0.7, 0.8, 0.9)} - {0, len(words)}:
            for part in (words[:kept], words[-kept:]):
                cut = " ".join(part)
                result = outcome(find(before + cut), entry, f"{before}{line}: so it ended")
                outcomes[result] += 1
                if result == "false":
                    false.append((cut, entry.title))
    assert false == []
    assert outcomes["right"] >= least * outcomes.total(), outcomes


def wrapped(width: int) -> Callable[[str], str]:
    return lambda text: "\n".join(
        line[at : at + width] for line in text.splitlines() for at in range(0, len(line), width)
    )


def prefixed(prefix: str) -> Callable[[str], str]:
    return lambda text: textwrap.indent(text, prefix)


#: What people copy, and how much of it is named at least: all, unless a terminal has cut the words.
WRAPPINGS: dict[str, tuple[Callable[[str], str], float]] = {
    "ANSI": (lambda text: "\x1b[31m" + text.replace(" failed", " \x1b[1;4mfailed\x1b[0m") + "\x1b[0m", 1),
    "ANSI as text": (lambda text: f"^[[36m{text.replace(' ', ' ^[[0;36m', 3)}^[[0m", 1),
    "JSON": (lambda text: json.dumps({"log": f"{text}\n", "stream": "stderr"}), 1),
    "JSON in JSON": (lambda text: json.dumps(json.dumps({"log": f"{text}\n"})), 1),
    "kubectl": (prefixed("[pod/decode-0/engine] "), 1),
    "kubectl with time": (prefixed("2026-11-27T10:00:00.123456789Z "), 1),
    "containerd": (prefixed("2026-11-27T10:00:00.123456789Z stderr F "), 1),
    "journald": (prefixed("Nov 27 10:00:00 node1 vllm[4242]: "), 1),
    "docker compose": (prefixed("\x1b[36mprefill-1  | \x1b[0m"), 1),
    "typographic quotes": (lambda text: "“" + text.replace("'", "’") + "”", 1),
    "Markdown quotation": (prefixed("> "), 1),
    "Markdown block": (lambda text: f"```\n{text}\n```", 1),
    "Markdown escapes": (lambda text: "**" + text.replace("_", "\\_") + "**", 1),
    "HTML": (html.escape, 1),
    "CRLF": (lambda text: text.replace("\n", "\r\n") + "\r\n", 1),
    "traceback": (lambda text: f'Traceback (most recent call last):\n  File "a.py", line 3, in run\n{text}\n', 1),
    "repr": (repr, 1),
    "60 columns": (wrapped(60), 0.7),
    "80 columns": (wrapped(80), 0.8),
    "80 columns between words": (
        lambda text: "\n".join("\n  ".join(textwrap.wrap(line, 80)) for line in text.splitlines()),
        0.85,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_line_is_known_in_what_it_was_copied_from(wrapping: str) -> None:
    find = entry_finder()
    wrap, least = WRAPPINGS[wrapping]
    outcomes: Counter[str] = Counter()
    for before, line in sample_lines():
        whole = f"{before}{line}: so it ended"
        entry = find(whole)
        assert entry is not None
        outcomes[outcome(find(wrap(whole)), entry, whole)] += 1
    assert outcomes["false"] == 0
    assert outcomes["right"] >= least * outcomes.total(), outcomes
