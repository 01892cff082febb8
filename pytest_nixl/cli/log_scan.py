# SPDX-License-Identifier: Apache-2.0
"""Recognise known messages in a log by who says them and what they say.

An entry of ``error-texts.toml`` has forms, such as ``network device … is not available``. The parts between the gaps
must follow each other on one line. A form whose words are not all in a block of the log is not searched. A search for
the longest part of the others finds candidate lines at the speed of ``bytes.find``; only there are the other parts, the
speaker's sign and the lines before compared. No comparison looks further than a fixed number of bytes, so that a line
may have any length.

A line that was quoted may be cut at its end or its beginning, or wrapped. A form that stands only partly at the end or
the beginning of a line counts if the neighbouring line continues it, or if what is left of it is specific: three fifths
of its letters, a word that programs outside this field do not use (and more words without the speaker's sign), half of
the reason behind its last colon, the word that reports the failure, and no entry but its own could be cut to it. An
entry that the lost part could rule out does not count.

An error of a known program that has no entry is explained by its class: the part of the program that reports it (its
source file) and the reason (the text of an errno or of a status). A class counts only on lines that no entry matches,
unless its reason alone is the cause, such as too many open files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import Any, BinaryIO

#: What stands for the variable parts of a form.
GAP = "…"
#: What a message says of a failure. They are printed in this order.
WEIGHTS = ("cause", "likely", "symptom", "harmless")

#: The most bytes between two parts of a form, and on each side of a candidate, that are compared.
_GAP_BYTES, _LINE_BYTES = 600, 4000
#: The bytes on each side of a candidate in which its speaker's sign is looked for.
_SIGN_BYTES = 1000
#: The bytes before the sign of an error in which its source file stands.
_POSITION_BYTES = 100
#: The most candidates of one form on one line that are compared.
_LINE_CANDIDATES = 20
#: The lines before a message, and their bytes, in which the call that failed is looked for.
_LINES_BEFORE, _BYTES_BEFORE = 8, 4000
#: The least bytes of a part that show, behind a gap of several words, that a line is cut inside this part.
_BEGUN_BYTES = 3
_BLOCK_BYTES = 2 << 20
_PARTS_REMEMBERED = 10_000
#: What a quotation leaves at the end or the beginning of a line that it cuts.
_CUT_MARKS = b" \t\r.>\"'`|*\\"
#: The most bytes of a text in which lines are cut or wrapped. The lines of a longer log are whole.
_QUOTATION_BYTES = 500_000
#: The share of a form's letters that a cut line has at least.
_CUT_SHARE = 0.6
#: The share of a form's letters with which a cut line can be this form's, so that others are ruled out.
_RULING_SHARE = 0.4
#: The beginnings of words that programs outside this field do not use, or seldom.
_FIELD_WORD = re.compile(
    rb"nixl|uc[mpstx]\b|ucx|ibv|mlx5|efa|rdma|roce|gid\b|[qc]p\b|qp|cq\b|dc[itp]\b|srq|[mpr]key|memh|lib[a-z]|fi\b|rails?\b|"
    rb"hca|verbs|infiniband|peermem|dmabuf|gdr|gds|cu\b|cu[a-z]*(?:get|file|mem)|cuda|nv[a-z]|gpu|vram|dram|hmem|nccl|kv|"
    rb"prefill|handshake|bootstrap|mamba|mla\b|hma\b|[dpt]p\b|pcp\b|disagg|vllm|sgl|llm|lmcache|dynamo|nats\b|etcd|zmq|xfer|"
    rb"backend|transport|notif|telemetry|deseriali|tensor|iface|keepalive|sysv|shm|memlock|uring|s?xid\b|tcpstore|hicache|wqe"
)
#: What a message that reports a failure says.
_FAILURE = re.compile(
    rb"error|fail|\bno[tn]?\b|n[o']t\b|unable|invalid|mismatch|time[dr]? ?out|missing|refused|lost|died|dead|exceed|"
    rb"\bun[a-z]|illegal|expired|wrong|abort|must|incompatible|different|require"
)
#: How a terminal, a journal or JSON writes a colour.
_COLOUR = re.compile(rb"(?:\x1b|\^\[|#033|\\+(?:u001b|x1b|033|e))?\[[0-9;]*m|\x1b\[[0-9;?]*[a-ln-z]")
#: Escapes of JSON, Markdown and HTML, and typographic characters: their codes, or what they stand for.
_ESCAPE = re.compile(
    rb"\\+u00([0-7][0-9a-f])|\\+([\"'/_*\[\]<>#|`nrt])|&(lt|gt|amp|quot|nbsp|apos|#x?\d+);|\xe2\x80([\x98-\x9d])|\xc2\xa0"
)
_ESCAPED = {
    b"n": b" ",
    b"r": b" ",
    b"t": b" ",
    b"nbsp": b" ",
    b"lt": b"<",
    b"gt": b">",
    b"amp": b"&",
    b"quot": b'"',
    b"#34": b'"',
    b"apos": b"'",
    b"#39": b"'",
    b"#x27": b"'",
    b"\x98": b"'",
    b"\x99": b"'",
    b"\x9c": b'"',
    b"\x9d": b'"',
}
#: Turns all bytes but those of words into spaces.
_TO_WORDS = bytes(code if bytes([code]).isalnum() else 0x20 for code in range(256))


@dataclass(frozen=True)
class Speaker:
    """A program or library that writes messages.

    :param sign: how one of its lines is recognised, in lower case.
    :param native: its own logger writes the whole line, so that another speaker's message cannot be on it.
    :param quiet: how its logger marks a line that reports no problem, such as one for debugging.
    :param error: how its logger begins a line that reports an error. The first group is the source file. A line that
        was copied without it is known by the function that failed.
    :param error_parts: one of these is on each such line.
    :param calls: the libraries whose functions it calls, by the names of these functions.
    """

    name: str
    sign: re.Pattern[bytes]
    native: bool = False
    quiet: re.Pattern[bytes] | None = None
    error: re.Pattern[bytes] | None = None
    error_parts: tuple[bytes, ...] = ()
    calls: tuple[tuple[bytes, re.Pattern[bytes]], ...] = ()

    @classmethod
    def read(cls, name: str, fields: Mapping[str, Any]) -> Speaker:
        """Return the speaker that a table describes."""
        return cls(
            name=name,
            sign=re.compile(fields["sign"].lower().encode()),
            native=fields.get("native", False),
            quiet=_pattern(fields.get("quiet")),
            error=_pattern(fields.get("error")),
            error_parts=_folded(fields.get("error_parts", ())),
            calls=tuple(
                (library.encode(), re.compile(function.lower().encode()))
                for library, function in fields.get("calls", {}).items()
            ),
        )


@dataclass(frozen=True)
class Form:
    """One form of a message: parts that follow each other on a line.

    :param text: the form as the entry has it.
    :param word_ends: whether the first part begins a word, and the last part ends one. A gap there says no.
    """

    text: str
    parts: tuple[bytes, ...]
    word_ends: tuple[bool, bool]

    @classmethod
    def read(cls, text: str) -> Form:
        """Return the form that a text with gaps describes. Case does not count."""
        parts = tuple(part.strip().encode() for part in text.lower().split(GAP) if part.strip())
        return cls(text, parts, (not text.startswith(GAP), not text.endswith(GAP)))

    @cached_property
    def literal(self) -> bytes:
        """Return the part that is searched."""
        return max(self.parts, key=len)

    @cached_property
    def size(self) -> int:
        """Return the number of its bytes, without gaps."""
        return sum(map(len, self.parts))

    @cached_property
    def required_words(self) -> frozenset[bytes]:
        """Return the words that each line of this form has. At a gap a part may begin or end inside a word."""
        required: set[bytes] = set()
        for number, part in enumerate(self.parts):
            begins = self.word_ends[0] and number == 0
            ends = self.word_ends[1] and number == len(self.parts) - 1
            spelt = (b"" if begins else b"x") + part.translate(_TO_WORDS) + (b"" if ends else b"x")
            required.update(spelt.split()[(0 if begins else 1) : (None if ends else -1)])
        return frozenset(required)

    def is_on(self, line: bytes) -> bool:
        """Return whether the parts follow each other on a line."""
        start = -1
        while (start := line.find(self.parts[0], start + 1)) >= 0:
            end = start + len(self.parts[0])
            for part in self.parts[1:]:
                place = line.find(part, end, end + _GAP_BYTES + len(part))
                if place < 0:
                    break
                end = place + len(part)
            else:
                cuts_first = self.word_ends[0] and start > 0 and _is_word(line[start - 1 : start + 1])
                if not cuts_first and not (self.word_ends[1] and _is_word(line[end - 1 : end + 1])):
                    return True
        return False


@dataclass(frozen=True)
class Cut:
    """A form whose end, or whose beginning, a line has lost.

    :param core: the words of the form that the line has at least: it is searched.
    :param backwards: the beginning is lost. The line and the parts are then compared from right to left.
    """

    message: Message
    form: Form
    core: Form
    backwards: bool

    @classmethod
    def of(cls, message: Message, form: Form) -> Iterator[Cut]:
        """Yield both cuts of a form of two words or more."""
        words = form.text.split()
        for backwards in (False, True) if len(words) > 1 else ():
            kept: list[str] = []
            for word in reversed(words) if backwards else words:
                kept.insert(0 if backwards else len(kept), word)
                core = Form.read(" ".join(kept))
                if core.parts and core.size >= form.size / 3:
                    yield cls(message, form, core, backwards)
                    break

    @cached_property
    def parts(self) -> tuple[bytes, ...]:
        """Return the parts in the order in which they are compared."""
        return tuple(part[::-1] for part in reversed(self.form.parts)) if self.backwards else self.form.parts

    def matched_bytes(self, line: bytes) -> int:
        """Return how many bytes of the form stand at the cut of a line; 0: the line is not cut inside the form.

        :param line: in the order of ``parts``, up to the cut.
        """
        place = kept = 0
        for number, part in enumerate(self.parts):
            start = line.find(part, place, place + _GAP_BYTES + len(part)) if kept else line.rfind(part)
            if start >= 0:
                if (
                    number == 0
                    and start
                    and self.form.word_ends[self.backwards]
                    and _is_word(line[start - 1 : start + 1])
                ):
                    return 0
                place, kept = start + len(part), kept + len(part)
                continue
            rest = line[place:]
            begin = rest.rfind(part[:_BEGUN_BYTES])
            if begin < 0 or not part.startswith(rest[begin:]):
                if number == 0 or b" " in rest.strip():
                    return 0
                begin = next((size for size in range(len(rest)) if part.startswith(rest[size:])), len(rest))
            return kept + len(rest) - begin if begin <= _GAP_BYTES else 0
        return kept if place == len(line) else 0

    def remnant(self, kept: int) -> tuple[bytes, ...]:
        """Return the first bytes of the parts, in the order of the form."""
        parts = []
        for part in self.parts:
            parts.append(part[:kept].strip())
            kept -= len(part)
            if kept <= 0:
                break
        return tuple(part[::-1] for part in reversed(parts)) if self.backwards else tuple(filter(None, parts))

    def is_telling(self, remnant: tuple[bytes, ...], signed: bool, quoted: bool) -> bool:
        """Return whether what is left of the form is specific enough.

        :param signed: the speaker's sign is on the line.
        :param quoted: nothing else is before it on a line that somebody quotes.
        """
        subject, colon, reason = b"\n".join(self.form.parts).rpartition(b": ")
        lost_side = subject if self.backwards else reason
        lost = self.form.size - sum(map(len, remnant))
        left = b" ".join(remnant)
        fields, words = count_field_words(remnant), len(left.translate(_TO_WORDS).split())
        return (
            b" " in left
            and lost <= (1 - _CUT_SHARE) * self.form.size
            and (fields > 0 or (not count_field_words(self.form.parts) and (signed or (quoted and not self.backwards))))
            and 3 * fields + words >= (4 if signed or (quoted and fields) else 5 if quoted else 8)
            and (_FAILURE.search(left) is not None or _FAILURE.search(b" ".join(self.form.parts)) is None)
            and not (colon and lost_side and lost > len(lost_side) / 2)
        )


def count_field_words(parts: tuple[bytes, ...]) -> int:
    """Return how many words the parts of a form have that programs outside this field do not use."""
    return sum(map(bool, map(_FIELD_WORD.match, b" ".join(parts).translate(_TO_WORDS).split())))


def _is_word(two: bytes) -> bool:
    """Return whether the border between two bytes lies inside a word."""
    return len(two) == 2 and two.isalnum()


@dataclass(frozen=True, eq=False)
class Message:
    """One entry.

    :param has: one of these must be on the line; empty: no condition.
    :param without: none of these may be on the line.
    :param after: one of these must be on the line or on a line shortly before it; empty: no condition.
    :param signed: the form is too short to be known without its speaker's sign.
    :param source: of a class: the source files whose errors it explains. It has no forms.
    :param decides: of a class: its reason is the cause, whatever failed for it: it counts before an entry.
    """

    title: str
    by: str
    weight: str
    forms: tuple[Form, ...]
    has: tuple[bytes, ...]
    without: tuple[bytes, ...]
    after: tuple[bytes, ...]
    signed: bool
    fields: Mapping[str, Any]
    source: re.Pattern[bytes] | None = None
    decides: bool = False

    @property
    def is_class(self) -> bool:
        """Return whether it stands for every error of a program's part that has no entry."""
        return self.source is not None

    def explains(self, sources: Iterable[bytes]) -> bool:
        """Return whether a class explains the errors of one of these source files or libraries."""
        return self.source is not None and any(map(self.source.fullmatch, sources))

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """Return what a line may leave of its forms."""
        return tuple(cut for form in self.forms for cut in Cut.of(self, form))

    def may_be_ruled_out_by(self, cuts: Iterable[Cut]) -> bool:
        """Return whether a line that is cut inside one of these forms may have lost what rules this entry out."""
        return any(
            part in b"\n".join((*cut.form.parts, *cut.message.has))
            for cut in cuts
            if cut.message is not self
            for part in self.without
        )

    @property
    def rank(self) -> tuple[int, bool]:
        """Return the place of the entry among those that match one line, the most precise first.

        Of entries with one rank the one with the longest form counts.
        """
        return WEIGHTS.index(self.weight), not self.after


@dataclass
class MessageMatch:
    """A message, the first line of a log that has it, and the number of these lines.

    :param text: the form that the first of them has; of a class its title.
    """

    message: Message
    text: str
    line: int
    count: int = 0


def read_messages(document: Mapping[str, Any]) -> tuple[tuple[Message, ...], dict[str, Speaker]]:
    """Return the entries of ``error-texts.toml``, and who says them. :raises ValueError: an entry is malformed."""
    speakers = {name: Speaker.read(name, fields) for name, fields in document["speaker"].items()}
    messages = []
    for error in (*document["error"], *document.get("class", ())):
        if error["by"] not in speakers or error.get("weight", WEIGHTS[0]) not in WEIGHTS:
            raise ValueError(f"error-texts.toml: {error['text']!r} has an unknown speaker or weight")
        is_class = "source" in error
        if is_class and speakers[error["by"]].error is None:
            raise ValueError(f"error-texts.toml: {error['text']!r} is a class, and its speaker has no sign of an error")
        forms = () if is_class else tuple(Form.read(text) for text in (error["text"], *error.get("also", ())))
        messages.append(
            Message(
                title=error["text"],
                by=error["by"],
                weight=error.get("weight", WEIGHTS[0]),
                forms=forms,
                has=_folded(error.get("has", ())),
                without=_folded(error.get("without", ())),
                after=_folded(error.get("after", ())),
                signed=error.get("signed", False),
                fields=error,
                source=_pattern(error.get("source")),
                decides=error.get("decides", False),
            )
        )
    return tuple(messages), speakers


def _pattern(text: str | None) -> re.Pattern[bytes] | None:
    if text is None:
        return None
    if re.search(r"\\[A-Z]", text):
        raise ValueError(
            f"error-texts.toml: {text!r} is compared in lower case, which turns its \\S, \\W or \\D around"
        )
    return re.compile(text.lower().encode())


def _folded(parts: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(part.lower().encode() for part in parts)


class LogScan:
    """The findings of one log, which is fed in blocks that end with a line.

    :param quoted: the text is what somebody quotes of a log. A message that begins a line then needs no sign of its
        speaker, if it has a word of this field.
    """

    def __init__(self, messages: Iterable[Message], speakers: Mapping[str, Speaker], *, quoted: bool = False) -> None:
        self.line_count = 0
        self._bytes_read = 0
        self._quoted = quoted
        self._speakers = speakers
        self._seen: dict[str, MessageMatch] = {}
        self._before = b""
        self._speakers_seen: dict[bytes, frozenset[str]] = {}
        self._forms: dict[tuple[bytes, frozenset[bytes]], list[tuple[Message, Form]]] = {}
        self._classes: list[Message] = []
        self._suitable_classes: dict[tuple[str, bytes, bytes], tuple[list[Message], list[Message]]] = {}
        self._cuts: dict[tuple[bytes, frozenset[bytes]], list[Cut]] = {}
        self._unique: dict[tuple[Message, tuple[bytes, ...], bool], bool] = {}
        for message in messages:
            if message.is_class:
                self._classes.append(message)
            for form in message.forms:
                self._forms.setdefault((form.literal, form.required_words), []).append((message, form))
            for cut in message.cuts:
                self._cuts.setdefault((cut.core.literal, cut.core.required_words), []).append(cut)

    def read(self, stream: BinaryIO) -> None:
        """Scan a whole stream."""
        block = stream.read(_BLOCK_BYTES)
        while block:
            # The last line is scanned with those before it, which it may continue.
            following = stream.read(_BLOCK_BYTES)
            end = block.rfind(b"\n") + 1 or len(block) if following else len(block)
            self.feed(block[:end])
            self.line_count += not following and not block.endswith(b"\n")
            block = block[end:] + following

    def feed(self, block: bytes) -> None:
        """Scan some lines. The last one of a log needs no line break."""
        text = self._before + plain_text(block.lower())
        start = len(self._before)
        best: dict[int, dict[Message, tuple[int, str]]] = {}
        line_words = frozenset(text.translate(_TO_WORDS).split())
        for (literal, needed), forms in self._forms.items():
            if not needed <= line_words:
                continue
            for line, position in _candidates(text, literal, start):
                for message, form in forms:
                    length = form.size
                    longest, _ = best.get(line, {}).get(message, (0, ""))
                    if longest < length and self._matches(text, position, message, form):
                        best.setdefault(line, {})[message] = length, form.text
        self._bytes_read += len(block)
        if self._bytes_read <= _QUOTATION_BYTES:
            self._find_cuts(text, start, line_words, best)
        for speaker in self._speakers.values():
            for part in speaker.error_parts:
                for line, position in _candidates(text, part, start):
                    error_class = self._class_of(text, line, position, speaker)
                    if error_class is not None and (not best.get(line) or error_class.decides):
                        best[line] = {error_class: (0, error_class.title)}
        offset, number = start, self.line_count + 1
        for line, messages in sorted((line, messages) for line, messages in best.items() if messages):
            number += text.count(b"\n", offset, line)
            offset = line
            message = min(messages, key=lambda message: (message.rank, -messages[message][0]))
            self._seen.setdefault(message.title, MessageMatch(message, messages[message][1], number)).count += 1
        self.line_count += block.count(b"\n")
        self._before = text[-_BYTES_BEFORE:]

    def seen(self) -> list[MessageMatch]:
        """Return each message once: causes first, entries before classes, then by line."""
        return sorted(
            self._seen.values(),
            key=lambda match: (WEIGHTS.index(match.message.weight), match.message.is_class, match.line),
        )

    def _class_of(self, text: bytes, line: int, position: int, speaker: Speaker) -> Message | None:
        """Return the class of an error that a speaker reports on a line: the first with its reason, else the first.

        :param position: of the sign of an error.
        """
        end = text.find(b"\n", position, position + _LINE_BYTES)
        near = text[max(line, position - _POSITION_BYTES) : end if end >= 0 else position + _LINE_BYTES]
        if speaker.error is None or (begins := speaker.error.search(near)) is None:
            return None
        reason = near[begins.end() :].lstrip()
        called = next((library for library, function in speaker.calls if function.match(reason)), b"")
        key = speaker.name, begins.group(1) or b"", called
        if key not in self._suitable_classes:
            suitable = [
                message for message in self._classes if message.by == speaker.name and message.explains(key[1:])
            ]
            self._suitable_classes[key] = (
                [message for message in suitable if message.has],
                [message for message in suitable if not message.has],
            )
        with_reason, general = self._suitable_classes[key]
        for message in with_reason:
            if any(part in reason for part in message.has):
                return message
        return general[0] if general else None

    def _speakers_of(self, near: bytes) -> frozenset[str]:
        """Return whose signs a part of a line has. The last parts are remembered: many forms are compared with each."""
        speakers = self._speakers_seen.get(near)
        if speakers is None:
            speakers = frozenset(name for name, speaker in self._speakers.items() if speaker.sign.search(near))
            if len(self._speakers_seen) >= _PARTS_REMEMBERED:
                self._speakers_seen.clear()
            self._speakers_seen[near] = speakers
        return speakers

    def _matches(self, text: bytes, position: int, message: Message, form: Form) -> bool:
        start, end = _line_around(text, position)
        line = text[start:end]
        near = text[max(start, position - _SIGN_BYTES) : min(end, position + _SIGN_BYTES)]
        signed = (
            self._begins(form, line)
            and count_field_words(form.parts) > 0
            and self._is_unique(message, form.parts, of_speaker=True)
        )
        return form.is_on(line) and self._holds(message, line, near, signed, text, start)

    def _begins(self, form: Form, line: bytes) -> bool:
        """Return whether a quoted line begins with a form, or with the beginning of one."""
        line = line.lstrip(_CUT_MARKS)
        return self._quoted and line.startswith(form.parts[0][: len(line)])

    def _holds(self, message: Message, line: bytes, near: bytes, signed: bool, text: bytes, start: int) -> bool:
        """Return whether a line with a form of an entry fulfils the entry's conditions.

        :param near: the part of the line in which the speaker's sign may be.
        :param signed: the speaker is known.
        :param start: where in the text the lines before end.
        """
        if message.has and not any(part in line for part in message.has):
            return False
        if any(part in line for part in message.without):
            return False
        said_by = self._speakers_of(near)
        native = any(self._speakers[name].native for name in said_by)
        if message.by not in said_by and (native or (message.signed and not signed)):
            return False
        quiet = (self._speakers[name].quiet for name in said_by)
        if message.weight != "harmless" and any(mark is not None and mark.search(near) for mark in quiet):
            return False
        if not message.after:
            return True
        before = text[max(0, start - _BYTES_BEFORE) : start].splitlines()[-_LINES_BEFORE:]
        return any(part in context for context in (*before, line) for part in message.after)

    def _find_cuts(
        self, text: bytes, start: int, line_words: frozenset[bytes], best: dict[int, dict[Message, tuple[int, str]]]
    ) -> None:
        """Add the entries of which cut lines have enough, and remove those that the lost part could rule out."""
        lost: dict[int, list[Cut]] = {}
        for (literal, needed), cuts in self._cuts.items():
            if not needed <= line_words:
                continue
            for line, position in _candidates(text, literal, start):
                end = text.find(b"\n", position, line + _LINE_BYTES)
                end = end if end >= 0 else len(text)
                if end - line > _LINE_BYTES:
                    continue
                whole = text[line:end]
                forwards, backwards = whole.rstrip(_CUT_MARKS), whole[::-1].rstrip(_CUT_MARKS)
                for cut in cuts:
                    size = cut.matched_bytes(backwards if cut.backwards else forwards)
                    if 0 < size < cut.form.size:
                        known = self._size_if_known(text, line, end, cut, size)
                        if known > best.get(line, {}).get(cut.message, (0, ""))[0]:
                            best.setdefault(line, {})[cut.message] = known, cut.form.text
                        if size >= _RULING_SHARE * cut.form.size:
                            lost.setdefault(line, []).append(cut)
        for line, cuts in lost.items():
            for message in [message for message in best.get(line, ()) if message.may_be_ruled_out_by(cuts)]:
                del best[line][message]

    def _size_if_known(self, text: bytes, start: int, end: int, cut: Cut, size: int) -> int:
        """Return how much of a form a cut line has; 0: not enough to know it.

        Of a form that the next lines, or the line before, continue, the line has all.
        """
        line = text[start:end]
        joined = [line]
        if size not in accumulate(map(len, cut.parts)):
            before = text[max(0, start - _LINE_BYTES) : max(0, start - 1)].rpartition(b"\n")[2]
            first, second, *_ = (*text[end + 1 : end + 1 + _LINE_BYTES].split(b"\n", 2), b"")
            neighbours = [before] if cut.backwards else [first, second]
            if not any(map(cut.form.is_on, neighbours)):  # else that is a message of its own
                joined = [before, line] if cut.backwards else [line, *neighbours]
        for count, space in product(range(2, len(joined) + 1), (b"", b" ")):
            whole = space.join([joined[0].rstrip(), *(part.strip(_CUT_MARKS) for part in joined[1:count])])
            if cut.form.is_on(whole) and self._holds(cut.message, whole, whole, False, text, start):
                return cut.form.size
        signed = cut.message.by in self._speakers_of(line)
        quoted = self._quoted if cut.backwards else self._begins(cut.form, line)
        remnant = cut.remnant(size)
        known = cut.is_telling(remnant, signed, quoted) and self._holds(cut.message, line, line, quoted, text, start)
        return size if known and self._is_unique(cut.message, remnant) else 0

    def _is_unique(self, message: Message, remnant: tuple[bytes, ...], *, of_speaker: bool = False) -> bool:
        """Return whether no other entry, or no other speaker, has a form of which a cut line could leave the same."""
        key = message, remnant, of_speaker
        if key not in self._unique:
            left = Form("", remnant, (False, False))
            self._unique[key] = not any(
                (other.by != message.by if of_speaker else other is not message) and left.is_on(b"\n".join(form.parts))
                for forms in self._forms.values()
                for other, form in forms
            )
        return self._unique[key]


def plain_text(text: bytes) -> bytes:
    """Return lines in lower case without colours, and without the escapes of JSON, Markdown and HTML."""
    if any(mark in text for mark in (b"\x1b", b"[0m", b"^[[")):
        text = _COLOUR.sub(b"", text)
    if any(mark in text for mark in (b"\\", b"&", b"\xe2\x80", b"\xc2\xa0")):
        text = _ESCAPE.sub(_unescaped, text)
    return text


def _unescaped(escape: re.Match[bytes]) -> bytes:
    code, *names = escape.groups()
    name = next(filter(None, names), b"nbsp")
    return bytes([int(code, 16)]) if code else _ESCAPED.get(name, name)


def _line_around(text: bytes, position: int) -> tuple[int, int]:
    """Return where the line of a position begins and ends, or the part of it that is compared."""
    nearest = max(0, position - _LINE_BYTES)
    end = text.find(b"\n", position, position + _LINE_BYTES)
    return text.rfind(b"\n", nearest, position) + 1 or nearest, end if end >= 0 else min(
        len(text), position + _LINE_BYTES
    )


def _candidates(text: bytes, literal: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Yield where a literal stands: the start of its line, and its position. Of one line the first few are enough."""
    line, searched, count = 0, 0, 0
    position = text.find(literal, start)
    while position >= 0:
        newline = text.rfind(b"\n", searched, position)
        line, count = (newline + 1, 1) if newline >= 0 else (line, count + 1)
        searched = position
        if count <= _LINE_CANDIDATES:
            yield line, position
            position = text.find(literal, position + len(literal))
        else:
            end = text.find(b"\n", position)
            position = text.find(literal, end) if end >= 0 else -1
