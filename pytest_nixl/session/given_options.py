# SPDX-License-Identifier: Apache-2.0
"""Read the options that were given on the command line, with secrets hidden."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from pytest_nixl.core.redaction import hider
from pytest_nixl.core.strict import error_text
from pytest_nixl.model.settings import OPTIONS


def hider_of(config: pytest.Config) -> Callable[[str], str]:
    """Return a function that hides the secrets of the options and of the environment variables in any text."""
    values = {item: config.getoption(item.ini, None) or config.getini(item.ini) for item in OPTIONS}
    typed = {item: str(text) for item, text in values.items() if text}
    # An option may differ from its variable: hide both.
    secret = {f"{item.environment[0]}_OPTION": text for item, text in typed.items() if item.secret}
    return hider({**os.environ, **secret}, *typed.values())


def given_options(config: pytest.Config) -> dict[str, str]:
    """Return the options that were given on the command line, by flag, with passwords hidden."""
    typed = {item: text for item in OPTIONS if (text := config.getoption(item.ini, None)) is not None}
    return {item.flag: item.show(text) if item.secret or item.hidden else text for item, text in typed.items()}


def printable_error(config: pytest.Config, error: pytest.UsageError) -> tuple[str, ...]:
    """Return the parts of a refusal with the secrets of the options hidden and control characters escaped."""
    hide = hider_of(config)
    return tuple(error_text(hide(str(part))) for part in error.args)
