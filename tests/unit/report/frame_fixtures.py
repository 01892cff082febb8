# SPDX-License-Identifier: Apache-2.0
"""A page of a report in a narrow window of a browser."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.browser import open_page


@pytest.fixture
def in_frame(tmp_path: Path) -> Callable[..., str]:
    """Return what a script sends to the page around a page in a frame, because no window is as narrow as a phone.

    The script calls ``send(text)`` once.
    """

    def run(text: str, script: str, width: int = 360, height: int = 640) -> str:
        send = "const send = (text) => parent.postMessage(text, '*');"
        bare = re.sub(r'<meta http-equiv="Content.*', "", text)
        (tmp_path / "inner.html").write_text(bare.replace("</body>", f"<script>{send}{script}</script></body>"))
        frame = tmp_path / "frame.html"
        frame.write_text(
            "<!doctype html><script>onmessage = (event) => { document.title = event.data; };</script>"
            f'<iframe src="inner.html" style="width: {width}px; height: {height}px; border: 0"></iframe>'
        )
        opened = open_page(frame, tmp_path, "--virtual-time-budget=20000")
        assert opened.console == ()
        [title] = re.findall(r"<title>([^<]*)</title>", opened.document)
        return html.unescape(title)

    return run
