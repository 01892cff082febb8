# SPDX-License-Identifier: Apache-2.0
"""A real browser without a screen: what it complained of, what it asked for, and what it drew."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from helpers.needs import program

#: What a browser asks of its maker for itself is not asked by the page.
_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars",
)  # fmt: skip


@dataclass(frozen=True)
class Opened:
    """A page as the browser has it: the document after it was loaded, its console, and the URLs that it asked for."""

    document: str
    console: tuple[str, ...]
    requests: tuple[str, ...]


def chromium() -> str:
    """Return the browser; skip where there is none, and fail in CI, where it can be installed."""
    return program("chromium", "chromium-browser", "google-chrome")


def open_page(page: Path, scratch: Path, *options: str) -> Opened:
    """Open a file in a browser with a profile of its own, and return what came of it."""
    net_log = scratch / "net.json"
    command = [
        chromium(), *_QUIET, f"--user-data-dir={scratch / 'profile'}", "--enable-logging=stderr", "--v=0",
        f"--log-net-log={net_log}", "--net-log-capture-mode=Everything", *options, "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = tuple(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return Opened(done.stdout, console, _requests(net_log))


def _requests(net_log: Path) -> tuple[str, ...]:
    """The URLs that the page asked for, by the log of the browser's network: what it asks for itself has no origin."""
    log = json.loads(net_log.read_text())
    kind = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    started = (event.get("params", {}) for event in log["events"] if event["type"] == kind)
    return tuple(params["url"] for params in started if "url" in params and params.get("initiator") != "not an origin")
