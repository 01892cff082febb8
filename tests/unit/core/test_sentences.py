# SPDX-License-Identifier: Apache-2.0
"""Sentences: of lists, of counts, of errors, of what ended a run, of a condition that does not become true."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_nixl.core.addresses import ask_addresses
from pytest_nixl.core.errors import LateError, NixlPluginError
from pytest_nixl.core.polling import wait_until
from pytest_nixl.core.sentences import named, plural
from pytest_nixl.core.signals import ending_text, sigterm_ends_in_order


@pytest.mark.parametrize(
    ("names", "most", "text"),
    [("", 4, ""), ("abcde", 4, "a, b, c, d, e"), ("abcdef", 4, "a, b, c, d and 2 more"), ("abcd", 1, "a and 3 more")],
)
def test_a_list_is_shortened_if_that_leaves_out_more_than_one(names: str, most: int, text: str) -> None:
    assert named(iter(names), most) == text
    assert named(names) == text or most != 4


def test_a_count_has_its_noun() -> None:
    assert [plural(count, "key") for count in (0, 1, 2, 1024)] == ["0 keys", "1 key", "2 keys", "1,024 keys"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NixlPluginError("it failed"), "it failed"),
        (NixlPluginError("it failed", "repair it", "line"), "it failed\nremedy: repair it\nline"),
    ],
)
def test_an_error_is_its_reason_its_remedy_and_its_evidence(error: NixlPluginError, text: str) -> None:
    assert (str(error), error.args, error.late) == (text, ("it failed",), False)


class Stopped(KeyboardInterrupt):
    """A subclass, as a library may raise."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyboardInterrupt(), "Ctrl-C (SIGINT)"),
        (KeyboardInterrupt("stop"), "stop"),
        (Stopped(), "Stopped"),
        (Stopped("\n of two\nlines"), "of two"),
        (pytest.exit.Exception("ended by SIGTERM"), "ended by SIGTERM"),
        (ValueError("no\nmore"), "ValueError: no"),
    ],
)
def test_what_ended_a_run_is_one_line(error: BaseException, text: str) -> None:
    assert ending_text(error) == text


@pytest.fixture
def default_handlers() -> Iterator[None]:
    """Set the handlers of both signals to the default, which ``nohup`` does not do."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_in_order_and_again_if_its_exception_was_swallowed(number: signal.Signals) -> None:
    with sigterm_ends_in_order() as end_if_signalled:
        end_if_signalled()
        attempts: list[Callable[[], None]] = [lambda: signal.raise_signal(number), end_if_signalled]
        for attempt in attempts:
            with pytest.raises(pytest.exit.Exception) as ended:
                attempt()
            assert (ended.value.msg, ended.value.returncode) == (f"ended by {number.name}", 128 + number)
        assert signal.getsignal(number) == signal.SIG_DFL  # a second one ends the process at once
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


@pytest.mark.usefixtures("default_handlers")
def test_a_handler_that_is_installed_stays_and_a_thread_installs_none() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handlers: list[Any] = []

    def enter() -> None:
        with sigterm_ends_in_order():
            handlers.append((signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    with sigterm_ends_in_order():
        assert callable(signal.getsignal(signal.SIGTERM))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert handlers == [(signal.SIG_DFL, signal.SIG_IGN)]


def test_a_condition_is_polled_until_it_is_true_or_late(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    values = iter([0, "", "ready"])
    assert (wait_until(lambda: next(values), "a value", seconds=600), naps) == ("ready", [0.01] * 2)
    clock = itertools.count(100.0, 0.5)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with pytest.raises(LateError) as late:
        wait_until(lambda: None, "a value", seconds=1.5, remedy=lambda: f"look after {len(naps)} naps")
    assert (late.value.reason, late.value.remedy) == ("waited 1.5 s for a value", "look after 5 naps")
    assert late.value.late


def test_the_addresses_of_this_host_have_their_prefix_lengths() -> None:
    with open("/proc/net/if_inet6") as file:
        rows = [line.split() for line in file]
    six = {name: int(length, 16) for _, _, length, _, _, name in rows}
    assert ask_addresses()["lo"] == ["127.0.0.1/8", *(["::1/128"] if "lo" in six else [])]
    for name, length in six.items():
        assert any(":" in text and text.endswith(f"/{length}") for text in ask_addresses()[name])
