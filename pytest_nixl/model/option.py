# SPDX-License-Identifier: Apache-2.0
"""One option: its flag, ini value and environment variables, its accepted form, and how it is read and shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Option:
    """One setting. A field of :class:`~pytest_nixl.model.settings.Settings` declares it by :func:`option`.

    :param field: the name of the field.
    :param parser: the accepted choices, or the parser of a text as ``MODULE:FUNCTION`` within ``pytest_nixl``. It is
        named here and imported when a setting is read: pytest loads the options in every project, and a parser may
        need any part of the package.
    :param form: the accepted form in words, for ``--help`` and for error messages.
    :param default: the default as text; empty: there is none.
    :param environment: the environment variables that the option falls back to.
    :param variable: the parser of these variables; None: that of the option.
    :param empty: the value of a setting that was not given and has no default.
    :param printer: writes a value as it would be typed: a function, or its name as for a parser; None: by its type.
    :param secret: whether the value is never shown.
    :param hidden: whether the value may contain a password, which is then redacted.
    :param switch: whether the option takes no value on the command line.
    :param per_rank: whether it may differ between ranks: the rank itself, how it reaches the etcd, where it writes.
    """

    field: str
    parser: str | tuple[str, ...]
    form: str
    default: str
    help: str
    metavar: str
    environment: tuple[str, ...]
    variable: Callable[[str], Any] | None
    empty: Any
    printer: str | Callable[[Any], str] | None
    secret: bool
    hidden: bool
    switch: bool
    per_rank: bool

    @property
    def flag(self) -> str:
        """The option on the command line, such as ``--nixl-join-timeout``."""
        return f"--nixl-{self.field.replace('_', '-')}"

    @property
    def ini(self) -> str:
        """The name of its ini value, and its name in pytest's configuration."""
        return f"nixl_{self.field}"

    @property
    def usual(self) -> Any:
        """The value of a setting that was not given."""
        # An empty text is not parsed here: only a person who gives an empty text gets an error for it.
        return self.parse(self.default) if self.default else self.empty

    def parse(self, text: str) -> Any:
        """Return the value of a text. :raises ValueError: with one sentence, if the text has another form."""
        if isinstance(self.parser, str):
            return _function(self.parser)(text)
        if text not in self.parser:
            raise ValueError(f"{text!r} is not one of the choices")
        return text

    def show(self, value: Any) -> str:
        """Return a value as it would be typed, with secrets redacted."""
        from pytest_nixl.core.redaction import redact

        if self.secret:
            return "***" if value else "none"
        if value is None:
            return self.default or "none"
        if self.printer is not None:
            return (_function(self.printer) if isinstance(self.printer, str) else self.printer)(value)
        if isinstance(value, tuple):
            return redact(",".join(str(part) for part in value)) or "none"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float):
            return f"{f'{value:.9f}'.rstrip('0').rstrip('.')}s"
        return redact(str(value)) if value != "" else "none"


def option(
    parser: str | tuple[str, ...],
    form: str = "",
    *,
    help: str,
    default: str = "",
    metavar: str = "VALUE",
    environment: tuple[str, ...] = (),
    variable: Callable[[str], Any] | None = None,
    empty: Any = "",
    printer: str | Callable[[Any], str] | None = None,
    secret: bool = False,
    hidden: bool = False,
    switch: bool = False,
    per_rank: bool = False,
) -> Any:
    """Declare a field of the settings by its option. See :class:`Option` for the parameters."""
    row = {**locals(), "form": form or " | ".join(parser)}
    return field(repr=not (secret or hidden), metadata=row)


def _function(name: str) -> Callable[[Any], Any]:
    from pkgutil import resolve_name

    found: Callable[[Any], Any] = resolve_name(f"pytest_nixl.{name}")
    return found
