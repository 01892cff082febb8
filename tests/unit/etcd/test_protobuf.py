# SPDX-License-Identifier: Apache-2.0
"""Our reader of protobuf beside the package protobuf: the same bytes, the same fields."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_nixl.etcd.proxy import Access, Request
from pytest_nixl.etcd.proxy.request import (
    EVERYTHING,
    fields,
    gateway_accesses,
    gateway_confirms,
    grpc_accesses,
    grpc_confirms,
)

_GROUP_START, _GROUP_END = 3, 4
#: The messages of etcd 3.5's rpc.proto, as far as we read them: each field's number, and its type (``*``: repeated).
MESSAGES = {
    "RangeRequest": {"key": (1, "bytes"), "range_end": (2, "bytes"), "limit": (3, "int64")},
    "PutRequest": {"key": (1, "bytes"), "value": (2, "bytes"), "lease": (3, "int64")},
    "DeleteRangeRequest": {"key": (1, "bytes"), "range_end": (2, "bytes"), "prev_kv": (3, "bool")},
    "Compare": {"result": (1, "int64"), "target": (2, "int64"), "key": (3, "bytes"), "version": (4, "int64"),
                "range_end": (64, "bytes")},
    "RequestOp": {"request_range": (1, "RangeRequest"), "request_put": (2, "PutRequest"),
                  "request_delete_range": (3, "DeleteRangeRequest"), "request_txn": (4, "TxnRequest")},
    "TxnRequest": {"compare": (1, "*Compare"), "success": (2, "*RequestOp"), "failure": (3, "*RequestOp")},
    "WatchCreateRequest": {"key": (1, "bytes"), "range_end": (2, "bytes"), "start_revision": (3, "int64")},
    "WatchRequest": {"create_request": (1, "WatchCreateRequest")},
    "ResponseHeader": {"cluster_id": (1, "uint64"), "member_id": (2, "uint64"), "revision": (3, "int64")},
    "LockRequest": {"name": (1, "bytes"), "lease": (2, "int64")},
    "UnlockRequest": {"key": (1, "bytes")},
    "LeaseGrantResponse": {"header": (1, "ResponseHeader"), "ID": (2, "int64"), "TTL": (3, "int64")},
}  # fmt: skip


def _classes() -> dict[str, Any]:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="etcd.proto", package="etcdserverpb", syntax="proto3")
    for name, members in MESSAGES.items():
        message = file.message_type.add(name=name)
        for member, (number, kind) in members.items():
            field = message.field.add(name=member, number=number, label=kinds.LABEL_OPTIONAL)
            if kind.startswith("*"):
                field.label = kinds.LABEL_REPEATED
            if kind.lstrip("*") in MESSAGES:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".etcdserverpb.{kind.lstrip('*')}"
            else:
                field.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptors = ((name, pool.FindMessageTypeByName(f"etcdserverpb.{name}")) for name in MESSAGES)
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in descriptors}


CLASSES = _classes()
KEYS = st.binary(max_size=200)
NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)


def span(start: bytes, end: bytes, write: bool) -> Access:
    """Return what etcd's documentation says of ``key`` and ``range_end``."""
    if end == b"\0":
        return Access(start, EVERYTHING.end, write)
    return Access(start, end or start + b"\0", write)


def accesses(method: str, message: Any) -> tuple[Access, ...]:
    """Return the keys of a message, which are the same by gRPC and in both spellings of the gateway's JSON."""
    accessed = grpc_accesses(method, message.SerializeToString())
    for snake in (False, True):
        text = json_format.MessageToJson(message, preserving_proto_field_name=snake, indent=None)
        assert gateway_accesses(method, text.encode()) == accessed
    return accessed


def refused(message: Any) -> bool:
    """Whether a message has a group, or a field 0, which releases of protobuf read differently."""
    fields = UnknownFieldSet(message)
    return any(field.wire_type in (_GROUP_START, _GROUP_END) or not field.field_number for field in fields)


def ours(data: bytes) -> list[tuple[int, Any]] | None:
    """Return the fields that we read; None: refused."""
    try:
        return list(fields(data))
    except (IndexError, ValueError):
        return None


def theirs(data: bytes) -> list[tuple[int, Any]] | None:
    """Return the fields that protobuf reads; None: it refuses the bytes, or we are right to."""
    message = Empty()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return None
    if refused(message):
        return None
    sizes = {1: 8, 5: 4}
    return [
        (
            field.field_number,
            field.data.to_bytes(sizes[field.wire_type], "little") if field.wire_type in sizes else field.data,
        )
        for field in UnknownFieldSet(message)
    ]


@given(data=st.binary(max_size=60))
@example(data=b"\x08" + b"\xff" * 9 + b"\x01")
@example(data=b"\x08" + b"\xff" * 9 + b"\x7f")
@example(data=b"\x08" + b"\xff" * 10 + b"\x01")
@example(data=b"\x08" + b"\x80" * 100_000)
@example(data=b"\x00\x01")
@example(data=b"\x0a\x05abc")
def test_any_bytes_are_read_or_refused_as_by_protobuf(data: bytes) -> None:
    assert ours(data) == theirs(data)


@given(
    parts=st.lists(
        st.one_of(
            st.tuples(st.just(0), NUMBERS), st.tuples(st.just(2), st.binary(max_size=300)),
        ),
        max_size=6,
    )
)  # fmt: skip
def test_a_message_of_many_fields_is_read_as_by_protobuf(parts: list[tuple[int, Any]]) -> None:
    data = b""
    for kind, value in parts:
        if kind == 0:
            data += CLASSES["RangeRequest"](limit=value).SerializeToString()
        else:
            data += CLASSES["Compare"](range_end=value).SerializeToString()
    assert ours(data) == theirs(data)


@given(key=KEYS, end=KEYS | st.just(b"\0"), number=NUMBERS)
def test_the_keys_of_single_requests_are_those_that_protobuf_wrote(key: bytes, end: bytes, number: int) -> None:
    ranged = CLASSES["RangeRequest"](key=key, range_end=end, limit=number)
    assert accesses("Range", ranged) == (span(key, end, False),)
    deleted = CLASSES["DeleteRangeRequest"](key=key, range_end=end, prev_kv=True)
    assert accesses("DeleteRange", deleted) == (span(key, end, True),)
    put = CLASSES["PutRequest"](key=key, value=end, lease=number)
    assert accesses("Put", put) == (span(key, b"", True),)
    watch = CLASSES["WatchRequest"](create_request=CLASSES["WatchCreateRequest"](key=key, range_end=end))
    assert accesses("Watch", watch) == (span(key, end, False),)


@given(compares=st.lists(st.tuples(KEYS, KEYS), max_size=3), puts=st.lists(KEYS, max_size=3), inner=KEYS)
def test_the_keys_of_a_transaction_are_those_that_protobuf_wrote(
    compares: list[tuple[bytes, bytes]], puts: list[bytes], inner: bytes
) -> None:
    operation = CLASSES["RequestOp"]
    nested = CLASSES["TxnRequest"](success=[operation(request_range=CLASSES["RangeRequest"](key=inner))])
    message = CLASSES["TxnRequest"](
        compare=[CLASSES["Compare"](result=0, target=3, key=key, version=7, range_end=end) for key, end in compares],
        success=[operation(request_put=CLASSES["PutRequest"](key=key, value=b"v")) for key in puts],
        failure=[operation(request_delete_range=CLASSES["DeleteRangeRequest"](key=key)) for key in puts]
        + [operation(request_txn=nested)],
    )
    expected = [span(key, end, False) for key, end in compares]
    expected += [span(key, b"", True) for key in puts] * 2
    expected.append(span(inner, b"", False))
    assert accesses("Txn", message) == tuple(expected)


@pytest.mark.parametrize("name", [b"", b"a/\xff", b"\0"])
def test_a_lock_has_a_key_for_each_that_waits_and_a_lease_any_key(name: bytes) -> None:
    assert accesses("Lock", CLASSES["LockRequest"](name=name, lease=7)) == (Access(name, name + b"0", True),)
    assert accesses("Unlock", CLASSES["UnlockRequest"](key=name)) == (span(name, b"", True),)
    assert accesses("LeaseRevoke", Empty()) == (EVERYTHING,)
    assert accesses("Status", Empty()) == ()


@given(id=st.integers(1, (1 << 63) - 1), revision=NUMBERS)
def test_the_id_of_a_lease_is_the_one_that_protobuf_wrote(id: int, revision: int) -> None:
    header = CLASSES["ResponseHeader"](cluster_id=1, revision=revision)
    answer = CLASSES["LeaseGrantResponse"](header=header, ID=id, TTL=10).SerializeToString()
    assert Request("client", 1, "LeaseGrant", answer=answer).granted() == id


def test_a_watch_of_the_gateway_has_a_request_on_each_line_and_others_are_one_text() -> None:
    create = '{"create_request": {"key": "%s"}}'
    lines = (create % "YQ==" + "\n\n" + create % "Yg==").encode()
    assert gateway_accesses("Watch", lines) == (span(b"a", b"", False), span(b"b", b"", False))
    assert gateway_accesses("Put", b'{\n"key":\n"YQ=="\n}') == (span(b"a", b"", True),)
    assert gateway_accesses("Put", b"{") == gateway_accesses("Put", b"[1]") == ()


@pytest.mark.parametrize(
    ("message", "line", "confirms"),
    [
        (b"\x0a\x00\x18\x01", b'{"result": {"header": {}, "created": true}}', True),
        (b"\x18\x00", b'{"result": {"created": false}}', False),
        (b"\x18\x02", b'{"result": {"created": "true"}}', False),
        (b"\x20\x01", b'{"result": {"canceled": true}}', False),
        (b"", b'{"created": true}', False),
        (b"\x18", b'[{"created": true}]', False),
        (b"\x1b\x18\x01", b'{"result": {"created": true', False),
    ],
)
def test_only_an_answer_that_says_so_confirms_a_watch(message: bytes, line: bytes, confirms: bool) -> None:
    assert (grpc_confirms(message), gateway_confirms(line)) == (confirms, confirms)
