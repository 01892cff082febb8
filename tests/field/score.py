# SPDX-License-Identifier: Apache-2.0
"""Score ``pytest-nixl explain`` on lines of logs with known answers: right, generic, silent or false.

It also prints the score of pairs of files and of pages of metrics: see ``score_files.py``.

``python tests/field/score.py`` prints the score of each set: ``lines``, ``held_out``, ``public``, whose lines come
from public reports with the answers of their threads, and ``set_aside``, which are such lines that no entry was written
for. ``-v`` also prints the wrong lines of the set that may be read.
Right: the first cause that is printed has the word that the line's answer must have; a harmless line is called harmless
or passed over; nothing is said of an unknown line. Generic: only a symptom is named where the cause is known.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_nixl.cli.log_scan import LogScan, read_messages
from pytest_nixl.core.texts import parse_texts, text_file

sys.path.insert(0, str(Path(__file__).parent.parent))

from field.score_files import print_scores

FIELD = Path(__file__).parent
SETS = ("lines", "held_out", "public", "set_aside")
SCORES = ("right", "generic", "silent", "false")


def read_lines(field_set: str) -> list[dict[str, Any]]:
    """Return the lines of one set."""
    lines: list[dict[str, Any]] = parse_texts((FIELD / f"{field_set}.toml").read_text(encoding="utf-8"))["line"]
    return lines


def score_line(line: dict[str, Any], scan: LogScan) -> str:
    """Return the score of what a scan says of a line."""
    scan.read(io.BytesIO(line["log"].encode()))
    harmful = [problem.message for problem in scan.seen() if problem.message.weight != "harmless"]
    if line["answer"] in ("harmless", "unknown"):
        return "false" if harmful or (line["answer"] == "unknown" and scan.seen()) else "right"
    if not harmful:
        return "false" if scan.seen() else "silent"
    explanation = " ".join(str(harmful[0].fields.get(name, "")) for name in ("text", "means", "do")).casefold()
    if line["says"].casefold() in explanation:
        return "right" if line["answer"] == "symptom" or harmful[0].weight != "symptom" else "generic"
    return "generic" if harmful[0].weight == "symptom" else "false"


def scores(field_set: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each line of one set with its score."""
    messages, speakers = read_messages(parse_texts(text_file("error-texts")))
    for line in read_lines(field_set):
        yield line, score_line(line, LogScan(messages, speakers))


def main() -> None:
    print_scores(verbose="-v" in sys.argv[1:])
    for field_set in SETS:
        results = list(scores(field_set))
        counts = Counter(score for _, score in results)
        causes = Counter(score for line, score in results if line["answer"] == "cause")
        share = 100 * causes["right"] // max(causes.total(), 1)
        counted = ", ".join(f"{counts[score]} {score}" for score in SCORES)
        print(f"{field_set}: {counted} of {len(results)} ({share} % of {causes.total()} causes right)")
        if field_set == SETS[0] and "-v" in sys.argv[1:]:
            for line, score in results:
                if score != "right":
                    print(f"  {score}: {line['answer']} {line.get('says', '')}: {line['log'].strip()[:160]}")


if __name__ == "__main__":
    main()
