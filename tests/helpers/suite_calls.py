# SPDX-License-Identifier: Apache-2.0
"""Call the tests and fixtures of the suites as pytest does, with arguments of our own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.model.verdicts import Judgement


class _ConcludedError(BaseException):
    """A test has called ``verdict`` or ``finding``, which ends it."""


def conclusion_of(test: Callable[..., None], **arguments: Any) -> str:
    """Return the verdict and the reason with which a test of a suite ends, or what it says of a finding.

    :param arguments: its arguments but ``verdict`` and ``finding``.
    """

    def verdict(judgement: Judgement) -> None:
        raise _ConcludedError(f"{judgement.verdict.value}: {judgement.reason}")

    def finding(id: str, occurs: bool, reason: str, *, affects: bool = False) -> None:
        text = "occurs" if occurs else "does not occur"
        raise _ConcludedError(f"{id} {text}{' and affects' if affects else ''}: {reason}")

    concluders = {"verdict": verdict, "finding": finding}
    names = inspect.signature(test).parameters
    try:
        test(**arguments, **{name: value for name, value in concluders.items() if name in names})
    except _ConcludedError as conclusion:
        return str(conclusion)
    return "no conclusion"


def ending_of(test: Callable[..., None], **arguments: Any) -> str:
    """Return what :func:`conclusion_of` returns, or the error with its remedy with which a test of a suite ends."""
    try:
        return conclusion_of(test, **arguments)
    except AssertionError as error:
        return f"AssertionError: {error}".partition("\n")[0]  # pytest explains the expression on further lines
    except NixlPluginError as error:
        return f"{type(error).__name__}: {error}"


def arguments_of(test: Callable[..., None], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a test of a suite takes as arguments."""
    return {name: values[name] for name in inspect.signature(test).parameters if name in values}


def value_of(fixture: Any, stack: ExitStack, **arguments: Any) -> Any:
    """Return the value of a fixture; what it does after its ``yield`` happens when the stack ends."""
    function = inspect.unwrap(fixture)
    if inspect.isgeneratorfunction(function):
        return stack.enter_context(contextmanager(function)(**arguments))
    return function(**arguments)
