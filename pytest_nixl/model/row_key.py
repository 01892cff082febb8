# SPDX-License-Identifier: Apache-2.0
"""The key of a row: what was requested, and nothing that was observed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from pytest_nixl.core import units
from pytest_nixl.core.plain import written_as_text
from pytest_nixl.model.memory import DevicePair, MemoryPair

#: The name of the footprint in a variant.
FOOTPRINT = "footprint"
#: The name in a variant of which transfers of a window carry a notification: the last one, or each.
NOTIFY, LAST, EACH = "notify", "last", "each"
#: The name in a variant of the pages of buffers in host memory: 2 MiB if the kernel has them, or those of ``malloc``.
PAGES, HUGE, BASE = "pages", "huge", "base"
#: The names in the variant of a row of a traffic pattern: the pattern, and how its flows were measured.
PATTERN, LOAD = "pattern", "load"
KEY_FORM = "BACKEND/OP/INITIATOR:TARGET/BLOCK/batchN/depthN/RANK-RANK[/NAME=VALUE,NAME=VALUE]"

#: What differs from the default in how a row was measured: names with values, in the order of the names.
Variant = tuple[tuple[str, str], ...]

_BACKEND = r"(?:[^/\s\x00-\x1f\x7f]| ){1,2000}"
_END = r"([A-Z]{1,20})(?:@([0-9]{1,4}))?"
_PATTERN = re.compile(
    rf"({_BACKEND})/([A-Z]{{1,20}})/{_END}:{_END}/([0-9]{{1,15}}(?:B|KiB|MiB|GiB))"
    r"/batch([0-9]{1,15})/depth([0-9]{1,15})/([0-9]{1,9})-([0-9]{1,9})(?:/(.{1,4000}))?",
    re.ASCII,
)
_SETTING = re.compile(r"([A-Za-z][A-Za-z0-9_.-]{0,60})=([^/,\s\x00-\x1f\x7f]{1,200})")

#: nixlbench's flag for huge pages in the name of a program, if it is on.
_HUGE_FLAG = re.compile(r"\buse_hugepages\b(?!=(?:0|f|n))", re.IGNORECASE)

#: The most characters of a text that is not a row key which an error message quotes.
_QUOTED = 200


class RowKeyError(ValueError):
    """A text is not a row key. The message is one sentence."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text[:_QUOTED]!r} is not a row key: expected {KEY_FORM}")


@dataclass(frozen=True, eq=False)
class RowKey:
    """The identity of a row: only what was requested, never what was observed.

    Two keys are equal if their texts are: the number of a GPU counts only at an end with GPU memory.

    :param backend: NIXL's name of the backend; the name of an external program that measured the row precedes it, as
        in ``nixlbench:UCX``.
    :param block: block size in bytes.
    :param batch: blocks in one transfer.
    :param depth: transfers in flight.
    :param pair: the ranks of initiator and target.
    :param devices: the GPUs that were requested by number; None: none were, or the row has no GPU memory.
    :param variant: what differs from the default in how the row is measured, such as ``(("progress-thread", "on"),)``:
        each name once, in order. Rows with different variants are never compared. Empty: nothing differs.
    """

    backend: str
    op: str
    memory: MemoryPair
    block: int
    batch: int = 1
    depth: int = 1
    pair: tuple[int, int] = (0, 1)
    devices: DevicePair | None = None
    variant: Variant = ()

    @classmethod
    def parse(cls, text: str) -> RowKey:
        """Read a key from its text, which may come from a file that someone else wrote.

        The text of the returned key is ``text`` again. An end of the row without a GPU number gets GPU 0.

        :raises RowKeyError: if the text is not what :class:`RowKey` prints.
        """
        return _parse(text)

    @property
    def program(self) -> str:
        """The external program that measured the row; empty: pytest-nixl itself."""
        return self.backend.rpartition(":")[0]

    @property
    def plain_backend(self) -> str:
        """The backend without the name of the program that measured the row."""
        return self.backend.rpartition(":")[2]

    def measured_by(self, program: str) -> RowKey:
        """Return the key of the same row measured by an external program; no other row has this key."""
        return replace(self, backend=f"{program.replace('/', '_')}:{self.backend}")

    @property
    def kv(self) -> str:
        """The way in which requests for KV blocks are made; empty: the row is of whole blocks, not of such requests."""
        return dict(self.variant).get("kv", "")

    @property
    def pattern(self) -> str:
        """The traffic pattern of the row with its ranks: ``incast:4``; empty: the row is not of a flow of a pattern."""
        return dict(self.variant).get(PATTERN, "")

    @property
    def footprint(self) -> int:
        """The bytes of the buffers that the row's transfers walk; 0: every transfer has the same bytes.

        :raises ValueError: the key is of a file, and the footprint in it is not a size.
        """
        return units.parse_size(dict(self.variant)[FOOTPRINT]) if self.walks else 0

    @property
    def walks(self) -> bool:
        """Whether the row's transfers walk a buffer that is larger than the row."""
        return FOOTPRINT in dict(self.variant)

    @property
    def notify(self) -> str:
        """Which transfers of a window carry a notification: ``each``, or ``last``."""
        return dict(self.variant).get(NOTIFY, LAST)

    @property
    def pages(self) -> str:
        """The pages of the row's buffers in host memory: ``huge`` or ``base``; empty: there are no such buffers.

        Those of nixlbench are ``base`` unless its flag ``use_hugepages``, which is in the name of the program, is on.
        """
        if "DRAM" not in (self.memory.initiator, self.memory.target):
            return ""
        if self.program:
            return HUGE if _HUGE_FLAG.search(self.program) else BASE
        return dict(self.variant).get(PAGES, HUGE)

    def under(self, notify: str, pages: str) -> RowKey:
        """Return the key of the same row with these notifications and these pages."""
        return replace(self, variant=row_variant(self.agent_variant, self.footprint, notify, pages))

    @property
    def as_nixlbench(self) -> RowKey:
        """The key of our row that is measured as nixlbench measures this one: a notification each, and its pages."""
        return self.under(LAST if self.memory.stored else EACH, self.pages)

    @property
    def agent_variant(self) -> Variant:
        """What differs from the default in how the agents of the row are created."""
        return tuple(setting for setting in self.variant if setting[0] not in (FOOTPRINT, NOTIFY, PAGES))

    @property
    def in_place(self) -> RowKey:
        """The key of the same row if every transfer has the same bytes."""
        return replace(self, variant=tuple(setting for setting in self.variant if setting[0] != FOOTPRINT))

    @property
    def variant_text(self) -> str:
        """The variant as text: ``progress-thread=on,threads=4``; empty if nothing differs from the default."""
        return ",".join(f"{name}={value}" for name, value in self.variant)

    @property
    def memory_text(self) -> str:
        """The memory types with the requested GPU numbers: ``DRAM:VRAM@3``."""
        return self.devices.of(self.memory) if self.devices else str(self.memory)

    @property
    def ranks_text(self) -> str:
        """The ranks of initiator and target: ``0-1``."""
        return f"{self.pair[0]}-{self.pair[1]}"

    @property
    def default_ranks(self) -> bool:
        """Whether the ranks are those of a run of one rank, which short names leave out."""
        return self.pair in ((0, 1), (0, 0))

    @property
    def short(self) -> str:
        """A short name: ``UCX WRITE DRAM:DRAM 64KiB``. Default batch, depth, ranks and variant are left out."""
        counts = [f"batch{self.batch}"] if self.batch != 1 else []
        counts += [f"depth{self.depth}"] if self.depth != 1 else []
        counts += [] if self.default_ranks else [f"ranks {self.ranks_text}"]
        counts += [self.variant_text] if self.variant else []
        return " ".join((self.backend, self.op, self.memory_text, units.format_size(self.block), *counts))

    @property
    def words(self) -> str:
        """The name of the row in a sentence: ``UCX WRITE DRAM:DRAM of 64KiB``. Default values are left out."""
        text = f"{self.backend} {self.op} {self.memory} of {units.format_size(self.block)}"
        more = [f"{name} {value}" for name, value in (("batch", self.batch), ("depth", self.depth)) if value != 1]
        more += [] if self.default_ranks else [f"ranks {self.ranks_text}"]
        more += [f"GPUs {self.devices}"] if self.devices else []
        more += [f"{name} {value}" for name, value in self.variant]
        return f"{text} ({', '.join(more)})" if more else text

    @cached_property
    def _text(self) -> str:
        size = units.format_size(self.block)
        counts = f"batch{self.batch}/depth{self.depth}"
        variant = f"/{self.variant_text}" if self.variant else ""
        return f"{self.backend}/{self.op}/{self.memory_text}/{size}/{counts}/{self.ranks_text}{variant}"

    def __str__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, RowKey) and self._text == other._text)

    def __hash__(self) -> int:
        return hash(self._text)


@dataclass(frozen=True)
class UnknownKey:
    """The text of a row in a record that this version cannot read as a key. A report shows it as it is."""

    text: str

    @property
    def short(self) -> str:
        """The text: nothing of it can be left out."""
        return self.text

    def __str__(self) -> str:
        return self.text


def row_variant(agent: Variant, footprint: int, notify: str, pages: str) -> Variant:
    """Return the variant of rows.

    :param agent: what differs from the default in how their agents are created.
    :param footprint: the bytes of the buffers that their transfers walk; 0: they do not.
    :param notify: which transfers carry a notification: :data:`EACH` or :data:`LAST`.
    :param pages: the pages of their buffers in host memory: :data:`HUGE` or :data:`BASE`; empty: there are none.
    """
    walked = [(FOOTPRINT, units.format_size(footprint))] if footprint else []
    notified = [] if notify == LAST else [(NOTIFY, notify)]
    return tuple(sorted((*agent, *walked, *notified, *([(PAGES, pages)] if pages == BASE else []))))


def read_key(text: str) -> RowKey | UnknownKey:
    """Return the key of a row by its text. A text that a later version wrote must not keep a report from its end."""
    try:
        return RowKey.parse(text)
    except RowKeyError:
        return UnknownKey(text)


written_as_text(read_key, RowKey, UnknownKey)


@lru_cache(maxsize=1 << 16)  # each run of a history has the same rows
def _parse(text: str) -> RowKey:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise RowKeyError(text)
    backend, op, source, source_gpu, target, target_gpu, block, batch, depth, initiator, other, variant = match.groups()
    numbered = source_gpu is not None or target_gpu is not None
    try:
        key = RowKey(
            backend,
            op,
            MemoryPair(source, target),
            units.parse_size(block),
            int(batch),
            int(depth),
            (int(initiator), int(other)),
            DevicePair(int(source_gpu or 0), int(target_gpu or 0)) if numbered else None,
            _variant(variant) if variant else (),
        )
    except ValueError:  # no bytes at all, or no variant
        raise RowKeyError(text) from None
    if str(key) != text:  # such as 1024B, which is written 1KiB, or 01
        raise RowKeyError(text)
    return key


def _variant(text: str) -> Variant:
    """Read the text of a variant.

    :raises ValueError: a part is not NAME=VALUE, or the names are not in order, each once.
    """
    matches = [_SETTING.fullmatch(part) for part in text.split(",")]
    settings = tuple((match[1], match[2]) for match in matches if match is not None)
    if len(settings) != len(matches) or [name for name, _ in settings] != sorted({name for name, _ in settings}):
        raise ValueError(text)
    return settings
