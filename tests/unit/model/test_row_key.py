# SPDX-License-Identifier: Apache-2.0
"""The text of a row key: what is written can be read again, and what is not a key is refused in one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nixl.checks.nixlbench.command import label
from pytest_nixl.model.memory import OPS, TARGETS, DevicePair, MemoryPair
from pytest_nixl.model.row_key import RowKey, RowKeyError, UnknownKey, read_key

KEY = RowKey("UCX", "WRITE", MemoryPair("DRAM", "DRAM"), 65536)

RANKS = st.integers(0, 999_999)
DEVICES = st.builds(DevicePair, st.integers(0, 9999), st.integers(0, 9999))
NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,60}", fullmatch=True)
VALUES = st.from_regex(r"[^/,=\s\x00-\x1f\x7f]{1,200}", fullmatch=True)
VARIANTS = st.dictionaries(NAMES, VALUES, max_size=4).map(lambda found: tuple(sorted(found.items())))
OWN_KEYS = st.builds(
    RowKey,
    backend=st.sampled_from(("UCX", "LIBFABRIC", "POSIX", "GDS_MT")),
    op=st.sampled_from(OPS),
    memory=st.builds(MemoryPair, st.sampled_from(("DRAM", "VRAM")), st.sampled_from(TARGETS)),
    block=st.integers(1, 1 << 40),
    batch=st.integers(1, 1 << 20),
    depth=st.integers(1, 1 << 20),
    pair=st.tuples(RANKS, RANKS),
    devices=st.none() | DEVICES,
    variant=st.just(()) | VARIANTS,
)
FLAGS = st.sampled_from(
    ("--mode=MG", "--num_initiator_dev=8", "--device_list=mlx5_0:1,mlx5_1", "--filepath=/tmp/a", "--enable_pt")
)
PROGRAMS = st.lists(FLAGS, unique=True).map(label)
KEYS = OWN_KEYS | st.builds(RowKey.measured_by, OWN_KEYS, PROGRAMS)


@given(KEYS)
def test_every_key_that_is_written_can_be_read(key: RowKey) -> None:
    parsed = RowKey.parse(str(key))
    assert str(parsed) == str(key)
    for part in (
        "backend", "op", "memory", "block", "batch", "depth", "pair", "program", "plain_backend", "short", "variant",
    ):  # fmt: skip
        assert getattr(parsed, part) == getattr(key, part)


@given(st.text() | st.builds(lambda key, cut, more: f"{str(key)[:cut]}{more}", KEYS, st.integers(0, 99), st.text()))
def test_any_text_is_a_key_with_this_text_or_is_refused(text: str) -> None:
    parsed = read_key(text)
    assert str(parsed) == text
    if isinstance(parsed, UnknownKey):
        with pytest.raises(RowKeyError, match="is not a row key: expected BACKEND/OP/"):
            RowKey.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *(f"{KEY}{end}" for end in ("\n", "/", "/a=", "/=1", "/a=1,", "/b=1,a=2", "/a=1,a=2", "/a=1/b=2")),
        *(str(KEY).replace("64KiB", size) for size in ("0KiB", "1024B", "٦KiB")),
        str(KEY).replace("UCX", "U\tX"),
        str(KEY).replace("DRAM:DRAM", "DRAM@0:DRAM"),
        str(KEY).replace("0-1", "0-" + "1" * 10_000),
    ],
)
def test_a_text_that_is_not_a_key_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(RowKeyError) as refused:
        RowKey.parse(text)
    assert isinstance(refused.value, ValueError)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


ROW = "UCX/READ/DRAM:DRAM/4KiB/batch1/depth1/0-1"


@pytest.mark.parametrize(
    ("key", "pages"),
    [
        ("UCX/READ/DRAM:VRAM/4KiB/batch1/depth1/0-1", "huge"),
        ("UCX/READ/VRAM:DRAM/4KiB/batch1/depth1/0-1/notify=each,pages=base", "base"),
        ("UCX/READ/VRAM:VRAM/4KiB/batch1/depth1/0-1/notify=each", ""),
        ("nixlbench[use_hugepages=1]:UCX/READ/VRAM:VRAM/4KiB/batch1/depth1/0-1", ""),
        *((f"nixlbench[{flag}]:{ROW}", "huge") for flag in ("use_hugepages", "use_hugepages=true")),
        *((f"nixlbench[use_hugepages{off}]:{ROW}", "base") for off in ("=0", "=False", "=no", "_of=1")),
        (f"nixlbench[not_use_hugepages]:{ROW}", "base"),
    ],
)
def test_a_row_has_the_pages_of_its_buffers_in_host_memory(key: str, pages: str) -> None:
    row = RowKey.parse(key)
    assert row.pages == pages
    assert row.agent_variant == ()
    assert row.as_nixlbench.variant == (("notify", "each"), *([("pages", "base")] if pages == "base" else []))


def test_a_gpu_number_counts_only_at_an_end_with_gpu_memory() -> None:
    first, other = (
        RowKey("UCX", "WRITE", MemoryPair("DRAM", "VRAM"), 65536, devices=DevicePair(number, 3)) for number in (0, 1)
    )
    assert (first, hash(first)) == (other, hash(other))
    assert RowKey.parse("UCX/READ/VRAM@0:VRAM@12/1000B/batch2/depth4/7-7").devices == DevicePair(0, 12)


@pytest.mark.parametrize(
    ("text", "properties", "short", "words"),
    [
        ("UCX/WRITE/DRAM:DRAM/64KiB/batch1/depth1/0-1",
         ("", "UCX", "last", "huge", 0, "", "", (), "notify=each"),
         "UCX WRITE DRAM:DRAM 64KiB", "UCX WRITE DRAM:DRAM of 64KiB"),
        ("nixlbench:UCX[a:b]:POSIX/READ/VRAM@1:FILE/1000B/batch2/depth3/4-4",
         ("nixlbench:UCX[a:b]", "POSIX", "last", "", 0, "", "", (), ""),
         "nixlbench:UCX[a:b]:POSIX READ VRAM@1:FILE 1000B batch2 depth3 ranks 4-4",
         "nixlbench:UCX[a:b]:POSIX READ VRAM:FILE of 1000B (batch 2, depth 3, ranks 4-4, GPUs 1:0)"),
        ("UCX/READ/DRAM:OBJ/1MiB/batch1/depth8/1-0/a=b=2,footprint=1GiB,kv=merged,notify=each,pages=base,pattern=ring",
         ("", "UCX", "each", "base", 1 << 30, "merged", "ring",
          (("a", "b=2"), ("kv", "merged"), ("pattern", "ring")),
          "a=b=2,footprint=1GiB,kv=merged,pages=base,pattern=ring"),
         "UCX READ DRAM:OBJ 1MiB depth8 ranks 1-0 a=b=2,footprint=1GiB,kv=merged,notify=each,pages=base,pattern=ring",
         "UCX READ DRAM:OBJ of 1MiB (depth 8, ranks 1-0, a b=2, footprint 1GiB, kv merged, notify each, pages base, "
         "pattern ring)"),
    ],
)  # fmt: skip
def test_a_key_has_its_parts_and_names_that_leave_defaults_out(
    text: str, properties: tuple[object, ...], short: str, words: str
) -> None:
    key = RowKey.parse(text)
    assert (
        key.program, key.plain_backend, key.notify, key.pages, key.footprint, key.kv, key.pattern, key.agent_variant,
        key.as_nixlbench.variant_text,
    ) == properties  # fmt: skip
    assert (key.short, key.words, key.walks) == (short, words, key.footprint > 0)
    assert str(key.in_place) == text.replace("footprint=1GiB,", "")
    assert str(key.measured_by("fi/rma")) == f"fi_rma:{text}"
    assert read_key("a key/of a/later version").short == "a key/of a/later version"
