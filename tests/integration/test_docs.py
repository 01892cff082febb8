# SPDX-License-Identifier: Apache-2.0
"""What README and docs print runs as it is printed: tests, commands and profiles. No page links to nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.cli_run import ROOT, environment, execute, parse_line
from helpers.doc_blocks import Block, blocks, pages
from helpers.pytester_run import run_pytest
from helpers.records import record, write

from pytest_nixl.judge.profiles import load_profile

BLOCKS = list(blocks())
#: The variables of printed commands: their programs are those of this Python. No figure of their rows is judged, so a
#: busy machine need not measure them again.
SHORT = environment(
    PATH=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
    PYTHONPATH=str(ROOT / "tests"),
    PYTEST_ADDOPTS="-p no:cacheprovider -p helpers.no_contention -p helpers.short_launches",
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FILE = re.compile(r"(?:tests|deploy|\.ci)/[\w./-]*\w")


def _of(selected: list[Block], proven: Collection[str] = ()) -> pytest.MarkDecorator:
    """Return the mark of a test of these blocks.

    :param proven: the names of those that CI need not run, because it runs others that do the same.
    """
    whole = pytest.mark.whole
    cases = [pytest.param(block, id=str(block), marks=[whole] if str(block) in proven else []) for block in selected]
    return pytest.mark.parametrize("block", cases)


#: The page whose tests share helpers, and are one file.
COOKBOOK = "docs/how-to/cookbook.md"
PRINTED = [
    block for block in BLOCKS if block.language == "python" and "def test_" in block.text and block.page != COOKBOOK
]
#: Printed commands below run them.
RUN_BY_COMMANDS = {"docs/how-to/own-tests-1", "docs/how-to/own-tests-4", "docs/how-to/own-tests-7"}


@pytest.mark.long
def test_the_printed_tests_run(pytester: pytest.Pytester) -> None:
    """Where they ask for GPU memory they are skipped with that reason."""
    cookbook = [block.text for block in BLOCKS if block.page == COOKBOOK and block.language == "python"]
    texts = ["\n\n".join(cookbook), *(block.text for block in PRINTED if str(block) not in RUN_BY_COMMANDS)]
    pytester.makepyfile(**{f"test_printed_{number}": text for number, text in enumerate(texts)})
    run = run_pytest(pytester, "--nixl-backend=UCX", "--nixl-blocks=1MiB", "--nixl-timeout=300s", "-rs")
    counted = run.parseoutcomes()
    skipped = counted.get("skipped", 0)
    assert run.ret == 0, run.stdout.str()
    # That of a metric in the cookbook is made for each operation.
    assert counted.get("passed", 0) + skipped >= sum(text.count("def test_") for text in texts) + 1
    assert skipped == run.stdout.str().count("needs a GPU, and this host has")


def test_pages_with_printed_tests_are_found() -> None:
    assert {block.page for block in PRINTED} >= {"README.md", "docs/how-to/gpu.md", "docs/how-to/rank-race.md"}


def test_each_block_names_its_language_and_is_run_or_says_why_not() -> None:
    """Its language is console, text, toml, ini or python; above one of commands stands whether a test runs it."""
    assert [str(block) for block in BLOCKS if not block.language] == []
    unclear = [str(block) for block in BLOCKS if block.is_command and not (block.runs or block.why_not)]
    assert unclear == [], "write <!-- run --> or <!-- not run: REASON --> on the line above"


def test_the_files_that_a_reason_names_exist() -> None:
    named = {(str(block), name) for block in BLOCKS for name in _FILE.findall(block.why_not)}
    assert named
    assert [(block, name) for block, name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A directory with the files that the printed commands read."""
    for rank, name in enumerate(("01_normal.rank_a.out", "01_normal.rank_b.out")):
        shutil.copy(ROOT / "fixtures" / "nixlbench" / name, tmp_path / f"rank{rank}.out")
    sources = [block.text for block in PRINTED if block.page == "docs/how-to/own-tests.md"]
    for name, text in zip(("test_mine.py", "test_more.py", "test_layout.py", "test_ported.py"), sources, strict=True):
        (tmp_path / name).write_text(text)
    rows = {"UCX/WRITE/DRAM:DRAM/64KiB/batch1/depth1/0-1": [4.0, 4.1, 4.0, 4.05, 4.02]}
    store = tmp_path / "store"
    store.mkdir()
    for number in (1, 2, 3):
        write(tmp_path / f"run{number}.json", record("nixl:1", rows, week=number))
        write(store / f"run{number}.json", record(f"nixl:{number}", rows, week=number))
    return tmp_path


#: Blocks whose commands another block has, too.
REPEATED = {
    "docs/explanation/comparison-1": "docs/how-to/regressions-5",
    "docs/how-to/infrastructure-1": "docs/tutorial/first-run-2",
    "docs/reference/error-texts-1": "docs/tutorial/first-run-2",
}


@pytest.mark.parametrize(("block", "other"), REPEATED.items())
def test_commands_of_a_repeated_block_are_those_of_another(block: str, other: str) -> None:
    text = {str(each): each.text for each in BLOCKS}
    commands = [line.partition("  #")[0].strip() for line in text[block].splitlines()]
    assert commands
    assert [line for line in commands if not any(each.startswith(line) for each in text[other].splitlines())] == []


# The rehearsal with two ranks is run below, where its output is compared.
@_of(
    [block for block in BLOCKS if block.is_command and block.runs and "MASTER_ADDR=127.0.0.1" not in block.text],
    REPEATED,
)
@pytest.mark.long
def test_a_printed_command_runs(block: Block, workplace: Path) -> None:
    """Those that measure rows do so for one operation.

    A shell runs those of README, and those that need one. A line that only starts one of our programs is forked.
    """
    env = {**SHORT, "PYTEST_ADDOPTS": f"{SHORT['PYTEST_ADDOPTS']} --nixl-op=WRITE --nixl-duration=20ms"}
    lines = [parse_line(line) for line in block.text.splitlines()]
    if block.page == "README.md" or None in lines:
        lines = [({}, ["bash", "-e", "-c", block.text])]
    code = 0
    with (workplace / "printed").open("w+") as output:
        for variables, argv in filter(None, lines):
            fork = argv[0] == sys.executable
            code = code or execute(
                argv, cwd=workplace, env={**env, **variables}, output=output, errors=output, timeout=600, fork=fork
            )
        output.seek(0)
        printed = output.read()
    assert code in block.codes, printed
    assert "Traceback" not in printed


def test_the_page_of_the_connector_prints_what_its_command_prints(workplace: Path) -> None:
    ours = [block for block in BLOCKS if block.page == "docs/how-to/connector.md"]
    command, printed = next(pair for pair in pairwise(ours) if "pytest-nixl connector prefill.sh" in pair[0].text)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(["bash", "-c", command.text], cwd=workplace, capture_output=True, text=True, check=False,
                          env=environment(PATH=path))  # fmt: skip
    assert done.stdout == printed.text


@pytest.mark.long
def test_the_page_of_slurm_prints_the_verdict_and_the_columns_of_its_rehearsal(workplace: Path) -> None:
    if Path("/sys/class/infiniband").exists():
        pytest.skip("the page shows a machine without RDMA devices, where the check each-nic has nothing to do")
    ours = [block for block in BLOCKS if block.page == "docs/how-to/slurm.md"]
    command, printed = next(pair for pair in pairwise(ours) if "MASTER_ADDR=127.0.0.1" in pair[0].text)
    done = subprocess.run(
        ["bash", "-c", command.text], cwd=workplace, capture_output=True, text=True, timeout=600, check=False,
        env=SHORT,
    )  # fmt: skip
    rank, columns, *rows, verdict = printed.text.splitlines()
    assert (len(rows), done.returncode) == (2, 0), done.stdout
    assert {rank, columns} <= set(done.stdout.splitlines()), done.stdout
    assert re.search(f"^{re.escape(verdict).replace('…', '.*')}$", done.stdout, re.MULTILINE), done.stdout


@_of([block for block in BLOCKS if block.language == "toml" and block.text.startswith("[profile]")])
def test_a_printed_profile_is_loaded(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "printed.toml"
    path.write_text(block.text, encoding="utf-8")
    profile = load_profile(str(path))
    assert profile.expectations or (profile.image.plugins and profile.image.versions)


def test_pages_link_only_to_files_and_sections_that_exist() -> None:
    broken = []
    for page in pages():
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in _LINK.findall(text):
            if link.startswith(("http://", "https://")):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_pages_that_the_code_names_exist() -> None:
    folders = (ROOT / name for name in ("pytest_nixl", "suites", "tests", "benchmarks", "deploy"))
    files = [ROOT / "tox.ini", *(path for folder in folders for path in sorted(folder.rglob("*.py")))]
    named = {name for file in files for name in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text(encoding="utf-8"))}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    ("text", "runs", "why_not"),
    [
        ("<!-- run -->\n```console\ntrue\n```\n", True, ""),
        ("<!-- run, exit code 0 or 1 -->\n```console\nfalse\n```\n", True, ""),
        ("<!-- not run: it needs two hosts -->\n```console\nsrun\n```\n", False, "it needs two hosts"),
        ("<!-- not run: no -->\n```console\nsrun\n```\n", False, ""),
        ("<!-- run -->\n\n```console\ntrue\n```\n", False, ""),
        ("```console\ntrue\n```\n", False, ""),
    ],
)
def test_a_comment_above_a_block_is_read(tmp_path: Path, text: str, runs: bool, why_not: str) -> None:
    (tmp_path / "README.md").write_text(text)
    [block] = blocks(tmp_path)
    assert (block.runs, block.why_not) == (runs, why_not)
