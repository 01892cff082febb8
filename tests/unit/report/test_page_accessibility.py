# SPDX-License-Identifier: Apache-2.0
"""The page for readers with a keyboard, a screen reader or weak eyes, checked by its HTML and its colours."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path

import pytest
from helpers.browser import open_page
from helpers.records import key, record

from pytest_nixl.judge.run_comparison import compare_runs
from pytest_nixl.model.results import Result
from pytest_nixl.model.verdicts import Verdict
from pytest_nixl.report import page as page_module
from pytest_nixl.report.page import page
from pytest_nixl.report.run_report import RunReport
from pytest_nixl.store.record_reader import RecordedRun, parse_recorded

pytest_plugins = ["frame_fixtures"]

InFrame = Callable[..., str]
ROOT = Path(__file__).parents[3]
COMMAND = "pytest 'suites/bandwidth/test_bandwidth.py::test_row[UCX/WRITE]' --nixl-backend=UCX"
#: Elements that have no end tag.
VOID = {"meta", "link", "br", "img", "input"}


def recorded(rate: float, results: tuple[Result, ...] = ()) -> RecordedRun:
    rows = {key(size, op, pair): [rate, rate * 1.01, rate * 0.99]
            for size in ("64KiB", "1MiB") for op in ("READ", "WRITE") for pair in ("0-1", "1-0")}  # fmt: skip
    return parse_recorded(record("registry.example/nixl:1", rows, results=results, extra={"floor": 1e9}), "run.json")


@pytest.fixture(scope="module")
def text() -> str:
    """Return a page with every kind of section."""
    results = (
        Result("bandwidth", "x", Verdict.FAIL, "too slow", "Look at it.", repeat=COMMAND),
        Result("bandwidth", "y", Verdict.FAIL, "too slow, too", "Look at it.", repeat=f"{COMMAND} -x"),
        Result("bandwidth", "z", Verdict.FAIL, "too slow again", "Look at it.", repeat=COMMAND),
        Result("endpoints-encrypted", "e", Verdict.FAIL, "plain", "Write http.", finding="NIXL-ETCD-HTTPS-PLAINTEXT"),
        Result("another-package", "a", Verdict.WARN, "odd", "Ask them."),
        Result("metadata-of-a-dead-agent", "d", Verdict.PASS, "no lease", "Invalidate.", finding="NIXL-ETCD-STALE-KEY",
               known_limit=True),
    )  # fmt: skip
    run = recorded(2.0, results)
    return page(RunReport(run, compare_runs(recorded(2.0), run, 0.05), (recorded(2.0), run)))


@dataclass
class Element:
    """An element of a page, with the words and the elements in it."""

    tag: str
    attributes: dict[str, str | None]
    words: str = ""
    inside: list[Element] = field(default_factory=list, repr=False)


class Elements(HTMLParser):
    """Read a page into a list of its elements, and refuse one that is not nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[Element] = []
        self.open: list[Element] = []
        self.feed(text)
        assert self.open == [], f"{self.open[-1].tag} has no end"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.found.append(element)
        for outer in self.open:
            outer.inside.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> has no start"
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.words += data


def test_the_parts_of_a_page_are_nested_and_its_links_lead_to_them(text: str) -> None:
    elements = Elements(text).found
    ids = [element.attributes["id"] for element in elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    targets = [element.attributes.get("href") or "" for element in elements if element.tag == "a"]
    assert {to[1:] for to in targets if to.startswith("#")} <= set(ids)
    assert [element.attributes for element in elements if element.tag == "button"
            and element.attributes.get("type") != "button"] == []  # fmt: skip


def palettes(text: str) -> dict[str, dict[str, str]]:
    """Return the colours of each style by name: light, dark and print."""
    style = text.partition("<style>")[2].partition("</style>")[0]
    blocks = re.findall(r"(@media \([^)]*dark\) \{ |@media print \{ )?:root \{([^}]*)\}", style)
    names = {"": "light", "@media print { ": "print"}
    return {names.get(media, "dark"): dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", inner)) for media, inner in blocks}


def contrast(first: str, other: str) -> float:
    """Return the contrast of two colours by WCAG 2: 1 for equal ones, 21 for black and white."""

    def luminance(colour: str) -> float:
        shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        parts = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    bright, dark = sorted((luminance(first), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def mixed(first: str, other: str, share: float) -> str:
    """Return a colour between two, as ``color-mix`` does."""
    channels = [(int(first[n : n + 2], 16), int(other[n : n + 2], 16)) for n in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in channels)


@pytest.mark.parametrize("style", ["light", "dark"])
def test_every_text_and_line_stands_out_from_what_is_behind_it(text: str, style: str) -> None:
    """4.5 for text and 3 for what is drawn: level AA of WCAG 2."""
    colours = palettes(text)[style]
    backs = ["bg", "card"]
    texts = [(name, back) for name in ("text", "soft") for back in (*backs, "pass-bg", "warn-bg", "fail-bg")]
    texts += [(tone, back) for tone in ("pass", "warn", "fail") for back in ("card", f"{tone}-bg")]
    drawn = [(name, "card") for name in ("s0", "s1", "s2", "s3", "s4", "s5", "warn", "fail")]
    low = [(*pair, round(contrast(*(colours[name] for name in pair)), 2))
           for pairs, least in ((texts, 4.5), (drawn, 3)) for pair in pairs
           if contrast(*(colours[name] for name in pair)) < least]  # fmt: skip
    assert low == []
    for percent in range(36):  # the cells of the matrix
        back = mixed(colours["pass"], colours["fail-bg"], percent / 100)
        assert contrast(colours["text"], back) >= 4.5


def test_paper_is_printed_in_the_colours_of_light(text: str) -> None:
    themes = palettes(text)
    assert themes["print"] == themes["light"] != themes["dark"]
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_every_command_of_a_group_is_there_once_with_its_button(text: str) -> None:
    commands = [
        element for element in Elements(text).found if "command" in (element.attributes.get("class") or "").split()
    ]
    texts = [command.inside[0].words for command in commands]
    assert [text for text in texts if text.startswith("pytest ")] == [COMMAND, f"{COMMAND} -x"]
    buttons = [[inner for inner in command.inside if inner.tag == "button"] for command in commands]
    assert all(len(of) == 1 and "hidden" in of[0].attributes for of in buttons)


@pytest.mark.parametrize(
    ("urls", "site"),
    [
        (["NIXL, https://nixl.example", "Documentation, https://docs.example/a/"], "https://docs.example/a"),
        (["NIXL, https://nixl.example", "Documentation, javascript:alert(1)"], ""),
        (None, ""),
    ],
)
def test_a_section_of_the_docs_is_a_command_and_on_a_site_a_link(
    monkeypatch: pytest.MonkeyPatch, urls: list[str] | None, site: str
) -> None:
    class Metadata:
        def get_all(self, name: str) -> list[str] | None:
            assert name == "Project-URL"
            return urls

    monkeypatch.setattr(page_module, "metadata", lambda name: Metadata())
    finding = Result("endpoints-encrypted", "e", Verdict.FAIL, "plain", "Write.", finding="NIXL-ETCD-HTTPS-PLAINTEXT")
    elements = Elements(page(RunReport(recorded(2.0, (finding, Result("theirs", "t", Verdict.WARN, "odd")))))).found
    commands = [element.words for element in elements if element.tag == "code"]
    names = ["NIXL-ETCD-HTTPS-PLAINTEXT", "endpoints-encrypted"]  # and nothing of another package's check
    assert [text for text in commands if text.endswith(tuple(names))] == [f"pytest-nixl explain {id}" for id in names]
    addresses = [element.attributes["href"] or "" for element in elements if element.tag == "a"]
    pages = [("findings", "nixl-etcd-https-plaintext"), ("checks", "endpoints-encrypted")]
    expected = [f"{site}/reference/{file}.html#{anchor}" for file, anchor in pages] if site else []
    assert [address for address in addresses if not address.startswith("#")] == expected
    for file, anchor in pages:
        heads = re.findall(r"^#+ (\S+)$", (ROOT / f"docs/reference/{file}.md").read_text(), re.MULTILINE)
        assert anchor in [head.lower() for head in heads]


def test_a_sentence_has_no_backtick_and_an_option_is_not_broken() -> None:
    remedy = "Run `pytest-nixl doctor --peer=HOST`, or choose <one>: --nixl-profile=tcp-loopback, not x--y."
    text = page(RunReport(recorded(2.0, (Result("theirs", "t", Verdict.FAIL, "see `ibstat -l`", remedy),))))
    body = text.partition("<script>")[0]
    assert "`" not in body
    whole = [element.words for element in Elements(text).found if element.attributes.get("class") == "word"]
    assert {"--peer=HOST", "--nixl-profile=tcp-loopback,", "-l"} <= set(whole)
    assert not {"", "--y."} & set(whole)
    rule = re.search(r"\.word \{([^}]*)\}", text)
    assert rule is not None
    assert "display: inline-block" in rule[1]


def test_paper_has_the_verdict_and_the_run_on_each_page_whatever_the_name_is() -> None:
    name = 'evil"; } body { display: none } </style>\\'
    run = recorded(2.0)
    image = replace(run.provenance.image, reference=name)
    text = page(RunReport(replace(run, provenance=replace(run.provenance, image=image))))
    rules = text.partition("@page {")[2].partition("</style>")[0]
    contents = re.findall(r'content: "([^"]*)"', rules)
    shown = [re.sub(r"\\([0-9a-f]+) ", lambda match: chr(int(match[1], 16)), content) for content in contents]
    assert shown[:2] == ["NIXL NO CHECK IS RECORDED", name]


def test_a_press_on_a_button_copies_its_command(text: str, tmp_path: Path) -> None:
    """Without a clipboard, as on a page of plain http, the command is selected and copied by the browser's command."""
    press = """
    Object.defineProperty(navigator, "clipboard", {value: undefined});
    document.execCommand = (name) => { document.title = `${name}: ${getSelection()}`; return true; };
    const button = document.querySelector("code + button.copy");
    document.body.dataset.shown = String(!button.hidden && button.getAttribute("aria-label").startsWith("Copy: "));
    button.click();
    """
    pressed = tmp_path / "pressed.html"
    bare = re.sub(r'<meta http-equiv="Content.*', "", text)
    pressed.write_text(bare.replace("</body>", f"<script>{press}</script></body>"))
    opened = open_page(pressed, tmp_path, "--virtual-time-budget=3000")
    assert opened.console == ()
    assert f"<title>copy: {COMMAND}</title>" in opened.document
    assert 'data-shown="true"' in opened.document
    assert ">Copied</button>" in opened.document


def test_the_page_is_read_without_javascript(text: str, tmp_path: Path) -> None:
    """In a frame that runs no script, every section and row is to be seen, and no control that would do nothing."""
    read = "onload = () => document.body.append(document.querySelector('iframe').contentDocument.body.innerText);"
    outer = tmp_path / "without.html"
    outer.write_text(
        f'<!doctype html><iframe sandbox="allow-same-origin" srcdoc="{html.escape(text)}" width="1280"></iframe>'
        f"<script>{read}</script>"
    )
    shown = html.unescape(open_page(outer, tmp_path, "--virtual-time-budget=20000").document.rpartition("</script>")[2])
    heads = [element.words for element in Elements(text).found if element.tag == "h2"]
    rows = [element.inside[1].words for element in Elements(text).found if "data-verdict" in element.attributes]
    assert len(heads) > 5
    assert len(rows) > 5
    assert [head for head in heads if head not in shown] == []
    assert [row for row in rows if row not in shown] == []
    assert all(fragment in shown for fragment in ("too slow, too", "Look at it.", COMMAND, "UCX WRITE DRAM:DRAM 1MiB"))
    assert [fragment for fragment in ("Copy", "search", "Press a heading", "arrow keys") if fragment in shown] == []


def test_the_first_number_is_on_the_first_screen_of_a_phone(text: str, in_frame: InFrame) -> None:
    bottom = "send(String(document.querySelector('.number').getBoundingClientRect().bottom));"
    assert 0 < float(in_frame(text, bottom)) < 640


def test_the_filter_leaves_what_fits_and_a_link_leads_to_a_hidden_row(text: str, in_frame: InFrame) -> None:
    script = """
    const said = [], count = () => document.querySelector(".filter output").textContent;
    const set = (name, value) => {
      const field = document.querySelector(`.filter ${name}`);
      field.value = value;
      field.dispatchEvent(new Event("input", {bubbles: true}));
      said.push(count());
    };
    said.push(count());
    set("[name=verdict]", "FAIL"); set("[name=verdict]", "");
    set("input", "WRITE"); set("input", "");
    set("input", "nothing of this");
    const row = [...document.querySelectorAll("tr[data-backend=UCX]")][0];
    row.querySelector("a").click();
    setTimeout(() => {
      said.push(row.hidden, document.querySelector(":target") === row, count());
      send(said.join(", "));
    }, 50);
    """
    assert in_frame(text, script) == ("14 of 14, 4 of 14, 14 of 14, 4 of 14, 14 of 14, 0 of 14, false, true, 14 of 14")


def test_the_arrow_keys_read_the_values_of_a_chart(text: str, in_frame: InFrame) -> None:
    script = """
    const svg = document.querySelector("figure svg"), output = svg.nextElementSibling, said = [];
    for (const key of ["ArrowLeft", "ArrowRight", "ArrowRight"]) {
      svg.dispatchEvent(new KeyboardEvent("keydown", {key}));
      said.push(output.textContent);
    }
    const box = svg.querySelector(".point").getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.x + 3, clientY: box.y + 3}));
    send([...said, svg.tabIndex, output.textContent].join("; "));
    """
    first, second = "READ before 64KiB: 2 GB/s (16 Gb/s)", "READ before 1MiB: 2 GB/s (16 Gb/s)"
    last = "WRITE 1MiB: 2 GB/s (16 Gb/s)"
    readings = in_frame(text, script)
    assert readings == f"{last}; {first}; {second}; 0; {first}"


def test_axe_has_nothing_to_object_to(text: str, tmp_path: Path, in_frame: InFrame) -> None:
    """In a page with planted faults it names each of them."""
    distribution = metadata.distribution("axe-playwright-python")
    [engine] = [file for file in distribution.files or () if file.name == "axe.min.js"]
    (tmp_path / "axe.js").write_text(Path(str(engine.locate())).read_text(encoding="utf-8"))
    run = """</script><script src="axe.js"></script><script>
    for (const each of document.querySelectorAll("details")) each.open = true;
    axe.run(document).then((found) => send(JSON.stringify(found.violations.map((one) => one.id).sort())));
    """
    good = page(RunReport(replace(recorded(2.0), results=(Result("nixl-loads", "x", Verdict.PASS),))))
    assert json.loads(in_frame(text, run, 1280, 900)) == json.loads(in_frame(good, run, 1280, 900)) == []
    broken = text
    for old, new in (('<html lang="en">', "<html>"), ("<main>", '<main><button type="button"></button>')):
        assert old in broken
        broken = broken.replace(old, new)
    assert json.loads(in_frame(broken, run, 1280, 900)) == ["button-name", "html-has-lang"]
