# SPDX-License-Identifier: Apache-2.0
"""How a line of a log is recognised: by entries made for it, whose words and conditions are few."""

from __future__ import annotations

import io
from typing import Any

import pytest

from pytest_nixl.cli.log_scan import Form, LogScan, Message, plain_text, read_messages

#: What a cut line can leave of the third is also left of the fourth.
RDMA, QUEUE = "cannot open the rdma device … for a {} {}".format, ("queue pair", "today")
PAIR, WORK = RDMA(*QUEUE), RDMA("queue of", "work")
DOCUMENT: dict[str, Any] = {
    "speaker": {
        "UCX": {"sign": r"\bUCX\b", "native": True, "quiet": "UCX +DEBUG", "error": r"(?:(\w+\.c):\d+ +)?UCX +ERROR ",
                "error_parts": ["UCX  ERROR", "UCX ERROR"], "calls": {"verbs": "ibv_", "cuda": "cu[A-Z]"}},
        "engine": {"sign": "engine:"},
        "Python": {"sign": "Error:"},
    },
    "error": [
        {"text": "link … is down", "by": "UCX", "also": ["no link"]},
        {"text": "too short", "by": "engine", "signed": True},
        {"text": "either … word", "by": "engine", "has": ["Good", "fine"], "without": ["Bad", "worse"]},
        {"text": "it broke", "by": "Python", "weight": "symptom"},
        {"text": "it broke while loading", "by": "Python", "also": ["it broke"], "after": ["in load(", "in Save("],
         "weight": "symptom"},
        {"text": "it broke in two", "by": "Python", "weight": "likely"},
        {"text": "nothing to see", "by": "UCX", "weight": "harmless"},
        {"text": PAIR, "by": "UCX", "without": ["in a dream"]},
        {"text": WORK, "by": "UCX"},
        {"text": "the memh of … was not registered by this process", "by": "engine", "has": ["page", "process"]},
        {"text": "the pkey … is not there", "by": "engine", "without": ["never", "any more"]},
        {"text": "rdma gone", "by": "engine", "signed": True},
        {"text": "the pkey … is not there any more today", "by": "Python"},
        {"text": "something went all wrong on a day of rain", "by": "Python"},
        {"text": "the memh of … was deregistered", "by": "Python"},
        {"text": "the memh of … was not registered in a dream", "by": "Python"},
    ],
    "class": [
        {"text": "a call of verbs", "by": "UCX", "source": "verbs"},
        {"text": "a call of verbs: no memory", "by": "UCX", "source": "verbs", "has": ["No memory"]},
        {"text": "too many files", "by": "UCX", "source": ".*", "has": ["too many"], "decides": True},
        {"text": "an error of ib.c", "by": "UCX", "source": r"ib\.c"},
    ],
}  # fmt: skip


def scan(log: str, *, quoted: bool = False) -> LogScan:
    result = LogScan(*read_messages(DOCUMENT), quoted=quoted)
    result.read(io.BytesIO(log.encode()))
    return result


def seen(log: str, *, quoted: bool = False) -> list[str]:
    """Return the title of each message with its first line, and the number of its lines if there are several."""
    return [
        f"{match.message.title}: {match.line}{f' x{match.count}' if match.count > 1 else ''}"
        for match in scan(log, quoted=quoted).seen()
    ]


DOWN, SHORT, WORD, BROKE = "link … is down", "too short", "either … word", "it broke"
LOADING, VERBS, OF_IB = "it broke while loading", "a call of verbs", "an error of ib.c"


@pytest.mark.parametrize(
    ("log", "titles"),
    [
        # Parts follow each other on one line, end with words and are not far apart; case does not count.
        ("UCX link a is down", [DOWN]), ("no link", [DOWN]), ("UCX NO LINK", [DOWN]), ("xlink a is down", []),
        ("link a is downy", []), ("is down link a", []), ("link a\nis down", []), ("no linker, no link", [DOWN]),
        ("link a is up, link b is down", [DOWN]), ("link a is downed, link is down", [DOWN]),
        (f"link {598 * 'x'} is down", [DOWN]), (f"link {599 * 'x'} is down", []), (f"{5000 * 'x'} no link", [DOWN]),
        # A native logger writes its own messages only, and one in debugging reports no problem.
        ("engine: link a is down", [DOWN]), ("Error: UCX link a is down", [DOWN]), ("UCX DEBUG link a is down", []),
        ("UCX DEBUG nothing to see", ["nothing to see"]), ("UCX too short", []), ("UCX engine: too short", [SHORT]),
        # The sign is near the message.
        ("engine: too short", [SHORT]), ("too short", []), (f"engine: {991 * '-'} too short", [SHORT]),
        (f"engine: {992 * '-'} too short", []), (f"too short {983 * '-'}engine:", [SHORT]),
        (f"too short {984 * '-'}engine:", []),
        # What a line must have, and must not have.
        ("engine: either a good word", [WORD]), ("either a word, all fine", [WORD]), ("either a word", []),
        ("either bad word, fine", []), ("either worse word, good", []),
        # A call before it, up to eight lines and 4,000 bytes, or on the same line.
        (f"in load(\n{BROKE}", [LOADING]), ("in save(\n" + 7 * "a\n" + BROKE, [LOADING]), (BROKE, [BROKE]),
        ("in save(\n" + 8 * "a\n" + BROKE, [BROKE]), (f"{BROKE} in save(", [LOADING]), (f"{BROKE}\nin save(", [BROKE]),
        (f"in save({3991 * 'b'}\n{BROKE}", [LOADING]), (f"in save({3992 * 'b'}\n{BROKE}", [BROKE]),
        # Of several messages on a line the most precise one counts.
        ("it broke in two", ["it broke in two"]), (f"{BROKE}, no link", [DOWN]),
        # An error without an entry: the file or the called library tells the class, and a reason behind it.
        ("ib.c:7 UCX  ERROR odd", [OF_IB]), ("ib.c:7 UCX ERROR odd", [OF_IB]), ("mm.c:7 UCX  ERROR odd", []),
        ("UCX  ERROR ibv_x() odd", [VERBS]), ("UCX  ERROR ibv_x(): no memory", [f"{VERBS}: no memory"]),
        ("no memory: UCX  ERROR ibv_x()", [VERBS]), ("UCX  ERROR no ibv_x()", []), ("UCX  ERROR cuX() odd", []),
        ("UCX  ERROR cuX(): too many", ["too many files"]), ("UCX  ERROR ibv_x()\nno memory\nx", [VERBS]),
        ("ib.c:7 UCX ERROR link a is down", [DOWN]), ("ib.c:7 UCX ERROR link a is down: too many", ["too many files"]),
        (f"ib.c:7{94 * ' '}UCX  ERROR odd", [OF_IB]), (f"ib.c:7{95 * ' '}UCX  ERROR odd", []),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_line_is_recognised_by_its_words_and_conditions(log: str, titles: list[str]) -> None:
    assert [title.rpartition(":")[0] for title in seen(log)] == titles


@pytest.mark.parametrize("end", ["", "\n", "\nmore\n"], ids=["no-line-break", "line-break", "another-line"])
def test_messages_are_counted_by_lines_and_causes_come_first(end: str) -> None:
    log = f"it broke\nnothing to see\nit broke in two\nib.c:7 UCX  ERROR odd\n\nno link no link\nUCX link is down{end}"
    result = scan(log)
    assert [(match.message.title, match.text, match.line, match.count) for match in result.seen()] == [
        (DOWN, "no link", 6, 2), (OF_IB, OF_IB, 4, 1), ("it broke in two", "it broke in two", 3, 1),
        (BROKE, BROKE, 1, 1), ("nothing to see", "nothing to see", 2, 1),
    ]  # fmt: skip
    assert result.line_count == (8 if "more" in end else 7)
    assert (scan(end).line_count, scan("a").line_count) == (end.count("\n"), 1)


PAIR_LINE = "cannot open the rdma device mlx5_0 for a queue pair today"
MEMH = "the memh of 7 was not registered by this process"


@pytest.mark.parametrize(
    ("log", "titles"),
    [
        (f"UCX {PAIR_LINE}", [f"{PAIR}: 1"]),
        # Cut at its end: enough is left that no other entry has.
        ("cannot open the rdma device mlx5_0 for a queue pair", [f"{PAIR}: 1"]),
        ("cannot open the rdma device mlx5_0 for a queue pa >\"'`|", [f"{PAIR}: 1"]),
        ("cannot open the rdma device mlx5_0 for a queue ", []),
        ("cannot open the rdma device ml", []),
        ("cannot open the rdma device mlx5_0 for a queue pair in a dream", []),
        (f"{4100 * 'x'} cannot open the rdma device mlx5_0 for a queue pair", []),
        # Wrapped: the next lines continue it, or the line before begins it.
        ("cannot open the rdma device mlx5_0 for a\n queue pair today", [f"{PAIR}: 1"]),
        ("cannot open the rdma device mlx5_0 for a\n> queue pair today", [f"{PAIR}: 1"]),
        ("cannot open the rdma device mlx5_0 for a\nqueue pair\ntoday", [f"{PAIR}: 1"]),
        ("cannot open the rdma device mlx5_0 for a\nqueue\npair\ntoday", []),
        (600 * "padding\n" + "cannot open the rdma device mlx5_0 for a\n queue pair today", [f"{PAIR}: 601"]),
        (f"{MEMH[:20]}\n{MEMH[20:]}", ["the memh of … was not registered by this process: 2"]),
        # The lost part may be what rules an entry out, or what it must have.
        ("the memh of 7 was not registered by this pr", []),
        ("the pkey 7 is not there", []),
        ("the pkey 7 is not there, sir", ["the pkey … is not there: 1"]),
        # Without a word of the field it needs its speaker's sign.
        ("Error: something went all wrong on a day", ["something went all wrong on a day of rain: 1"]),
        ("something went all wrong on a day", []),
        ("page: the memh of 7 was not registered by this pr", ["the memh of … was not registered by this process: 1"]),
    ],
)
def test_a_line_that_is_cut_or_wrapped_is_recognised_if_enough_of_it_is_left(log: str, titles: list[str]) -> None:
    for end in ("", "\n"):
        assert seen(log + end) == titles


def test_a_quotation_that_begins_with_a_message_needs_no_sign() -> None:
    for log, quoted, titles in (
        ("rdma gone", True, ["rdma gone: 1"]), ("> rdma gone", True, ["rdma gone: 1"]), ("x rdma gone", True, []),
        ("rdma gone", False, []), ("engine: rdma gone", False, ["rdma gone: 1"]), ("too short", True, []),
    ):  # fmt: skip
        assert seen(log, quoted=quoted) == titles


@pytest.mark.parametrize(
    ("text", "lines", "others"),
    [
        ("ab cd", ("ab cd", "x ab cd y", "(ab cd)", "ab cde ab cd"), ("xab cd", "ab cdx", "ab  cd", "cd ab")),
        ("…ab cd", ("ab cd", "xab cd"), ("ab cdx",)),
        ("ab cd…", ("ab cd", "ab cdx"), ("xab cd",)),
        ("ab … cd", ("ab cd", "ab x cd", "ab ab cd"), ("cd ab", "ab c d", "abx cdx")),
    ],
)
def test_a_form_is_on_a_line_with_its_parts_in_order(
    text: str, lines: tuple[str, ...], others: tuple[str, ...]
) -> None:
    assert [line for line in (*lines, *others) if Form.read(text).is_on(line.encode())] == list(lines)


def message(text: str) -> Message:
    return Message(text, "UCX", "cause", (Form.read(text),), (), (), (), False, {})


@pytest.mark.parametrize(
    ("text", "parts", "ends", "words", "cores"),
    [
        ("Ab cd ef", ("ab cd ef",), (True, True), "ab cd ef", ("Ab cd", "cd ef")),
        ("…ab cd ef…", ("ab cd ef",), (False, False), "cd", ("…ab cd", "cd ef…")),
        ("ab (…) is-not", ("ab (", ") is-not"), (True, True), "ab is not", ("ab (…)", "is-not")),
        ("Cannot open … on … today", ("cannot open", "on", "today"), (True, True), "cannot", ("Cannot", "on … today")),
        ("…a b", ("a b",), (False, True), "b", ("…a", "b")),
        ("one", ("one",), (True, True), "one", ()),
    ],
)  # fmt: skip
def test_a_form_is_searched_by_its_longest_part_if_its_words_are_there(
    text: str, parts: tuple[str, ...], ends: tuple[bool, bool], words: str, cores: tuple[str, ...]
) -> None:
    form = Form.read(text)
    assert (form.text, form.parts, form.word_ends) == (text, tuple(map(str.encode, parts)), ends)
    assert (form.literal, form.size) == (max(form.parts, key=len), sum(map(len, parts)))
    assert form.required_words == set(words.encode().split())
    assert [cut.core.text for cut in message(text).cuts] == list(cores)
    assert [cut.backwards for cut in message(text).cuts] == [False, True][: len(cores)]


@pytest.mark.parametrize(
    ("line", "end", "beginning"),
    [
        ("ucx cannot open x on dev", "cannot open|on dev", None),
        ("cannot open x", "cannot open", None),
        ("can", "can", None),
        ("cannot open x on", None, None),  # the gap may go on
        ("cannot open x yz", None, None),
        ("xcannot open a on d", None, None),
        ("cannot open x on devx", None, None),
        ("cannot open x on device", "cannot open|on device", "cannot open|on device"),
        ("not open x on device", None, "not open|on device"),
        ("on device", None, "on device"),
        ("x on device", None, "on device"),
        ("vice", None, "vice"),
        ("on devices", None, None),
        ("", None, None),
    ],
)
def test_a_cut_line_has_the_beginning_or_the_end_of_a_form(line: str, end: str | None, beginning: str | None) -> None:
    of_end, of_beginning = message("cannot open … on device").cuts
    for cut, text, expected in ((of_end, line, end), (of_beginning, line[::-1], beginning)):
        size = cut.matched_bytes(text.encode())
        assert size == len((expected or "").replace("|", ""))
        assert expected is None or cut.remnant(size) == tuple(map(str.encode, expected.split("|")))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\x1b[31ma\x1b[0m ^[[1mb^[[0m #033[31mc#033[0m \\u001b[3md\\x1b[0m \x1b[2ke [0m", "a b c d e "),
        (r"a\nb\tc\rd\\ne", "a b c d e"),
        (r"\"q\' \/ \_ \* \[ \] \< \> \# \| \`", "\"q' / _ * [ ] < > # | `"),
        ("&lt;a&gt;&amp;&quot;&nbsp;&apos;&#34;&#39;&#x27;&#99;", "<a>&\" '\"''#99"),
        ("\u2018a\u2019 \u201cb\u201d\u00a0c", "'a' \"b\" c"),
        (r"\u0041 \\u003c", "A <"),
        ("nothing of it", "nothing of it"),
    ],
)
def test_colours_and_escapes_are_taken_out_of_a_line(text: str, plain: str) -> None:
    assert plain_text(text.encode()) == plain.encode()


#: The least that is enough of a form whose end, or else whose beginning, is lost: on a line with nothing else, of which
#: somebody quotes it, with its speaker's sign, or with both; None: all of it is not enough.
ENOUGH: tuple[tuple[str, bool, tuple[str | None, ...]], ...] = (
    # Three fifths, a word of the field, and half of the reason behind a colon.
    ("cannot open the rdma device … for reading today", False, ("cannot open the rdma device",) * 4),
    ("failed to map: no memory of ucx is left", False, ("failed to map: no memory of ucx",) * 4),
    ("the port of ucx: no memory", False, ("the port of ucx: no me",) * 4),
    ("the port of ucx: no memory", True, ("t of ucx: no memory",) * 4),
    # The word that reports the failure.
    ("cannot open the rdma device … for reading today", True, ("not open the rdma device for reading today",) * 4),
    ("it failed for ucx and rdma memory", False, ("it failed for ucx an",) * 4),
    ("it failed for ucx and rdma memory", True, ("failed for ucx and rdma memory",) * 4),
    # More words without a word of the field, and without the sign.
    ("went wrong on a day", False, (None, "went wrong on a d", "went wrong on a", "went wrong on a")),
    ("went wrong on a day", True, (None, None, "wrong on a day", "wrong on a day")),
    ("went all wrong now", False, (None, None, "went all wrong n", "went all wrong n")),
    ("all went wrong", False, (None,) * 4),
    ("plain words about nothing at all", False,
     (None, "plain words about nothing a", "plain words about no", "plain words about no")),
    ("ucx is gone", False, (None, "ucx is g", "ucx is g", "ucx is g")),
    ("ucx of ucx", False, ("ucx of ucx", "ucx of", "ucx of", "ucx of")),
    ("ucx of ucx", True, ("ucx of ucx", "of ucx", "of ucx", "of ucx")),
    ("error … of rdma ucx", False, ("error of rdma ucx", "error of rdma", "error of rdma", "error of rdma")),
)  # fmt: skip


@pytest.mark.parametrize(("text", "backwards", "enough"), ENOUGH)
def test_what_is_left_of_a_form_is_enough_if_it_is_specific(
    text: str, backwards: bool, enough: tuple[str | None, ...]
) -> None:
    cut = message(text).cuts[backwards]
    for (signed, quoted), expected in zip(
        ((False, False), (False, True), (True, False), (True, True)), enough, strict=True
    ):
        remnants = (cut.remnant(size) for size in range(1, cut.form.size + 1))
        least = next((remnant for remnant in remnants if cut.is_telling(remnant, signed, quoted)), None)
        assert least is None if expected is None else b" ".join(least or ()) == expected.encode()


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"error": [{"text": "a", "by": "UCY"}]}, "'a' has an unknown speaker or weight"),
        ({"error": [{"text": "a", "by": "UCX", "weight": "grave"}]}, "'a' has an unknown speaker or weight"),
        ({"error": [{"text": "a", "by": "engine", "source": "b"}]},
         "'a' is a class, and its speaker has no sign of an error"),
        ({"error": [{"text": "a", "by": "UCX", "source": r"\S+"}]},
         "'\\\\S+' is compared in lower case, which turns its \\S, \\W or \\D around"),
    ],
)  # fmt: skip
def test_a_malformed_entry_is_refused(change: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValueError, match=r"^error-texts") as refused:
        read_messages({**DOCUMENT, **change})
    assert str(refused.value) == f"error-texts.toml: {refusal}"
