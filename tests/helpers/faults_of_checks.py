# SPDX-License-Identifier: Apache-2.0
"""For plugins of inner runs: faults that each harm one check, although the checks run in threads at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from suites import early

Function = Callable[..., Any]

_thread = threading.local()
_run, _call = early.EarlyCheck.run, early.call


def _enter(item: pytest.Item) -> None:
    marker = item.get_closest_marker("nixl_check")
    _thread.check = marker.args[0] if marker else ""


def _run_in_thread(check: early.EarlyCheck) -> None:
    _enter(check.item)
    _run(check)


def _call_in_main_thread(item: pytest.Function) -> bool | None:
    _enter(item)
    return _call(item)


setattr(early.EarlyCheck, "run", _run_in_thread)  # noqa: B010 - mypy wants no method replaced
setattr(early, "call", _call_in_main_thread)  # noqa: B010


def within(check: str, owner: object, name: str) -> Callable[[Function], Function]:
    """Replace a function of a class or module while a check calls it: its new first argument is the function itself."""
    function = getattr(owner, name)

    def plant(fault: Function) -> Function:
        def either(*arguments: Any, **named: Any) -> Any:
            if getattr(_thread, "check", "") == check:
                return fault(function, *arguments, **named)
            return function(*arguments, **named)

        setattr(owner, name, either)
        return fault

    return plant


def is_in_vain(check: str, module: object, description: str, written: str = "") -> None:
    """End a wait of a check after a second, because its fault lets it wait for what never comes.

    :param module: has imported ``wait_until``.
    :param description: a part of that for which it waits.
    :param written: what the remedy then quotes; it is awaited first, however busy the machine is.
    """

    @within(check, module, "wait_until")
    def wait_shorter(
        wait_until: Function, condition: Function, awaited: str, *, seconds: float, remedy: Callable[[], str]
    ) -> object:
        if description in awaited:
            if written:
                quoted = f"the remedy to have {written!r}"
                wait_until(lambda: condition() or written in remedy(), quoted, seconds=seconds, remedy=remedy)
            seconds = 1
        return wait_until(condition, awaited, seconds=seconds, remedy=remedy)
