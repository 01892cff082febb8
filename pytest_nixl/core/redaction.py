# SPDX-License-Identifier: Apache-2.0
"""Hide secrets in texts: values of variables with secrets, and users and passwords in URLs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"

#: The scheme of a URL with what follows it, as a regular expression.
URL_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*://"

# What stands before the last @ of a URL is hidden, whatever is in it; the next URL begins after a separator.
_NOT_NEXT = rf"(?![,;\s]+{URL_SCHEME})"
_IN_URL = rf"(?P<scheme>{URL_SCHEME})(?:{_NOT_NEXT}[^\n])*@"
# The same where no scheme tells that it is a URL; the digest of a container image is none.
_BARE = rf"(?P<before>^|[,;\s])(?!{URL_SCHEME})(?:[^@/,;\s]+|[^@/:,;\s]+:(?:{_NOT_NEXT}\S)*)@(?!sha(?:256|512):)"
_SECRET = re.compile(f"{_IN_URL}|{_BARE}")

#: A variable with one of these words in its name contains a secret, or the path of one.
_NAMES = re.compile(
    r"(?:^|_)(?:PASS|PASSWD|PASSWORD|PASSPHRASE|PWD|SECRET|SECRETS|TOKEN|TOKENS|JWT|KEY|KEYS|APIKEY|CREDENTIAL|CREDENTIALS|"
    r"AUTH|AUTHORIZATION|USER|BEARER|COOKIE|SIGNATURE|SAS|PAT)(?:_|$)",
    re.IGNORECASE,
)
_NOT_SECRET = frozenset({"PWD", "OLDPWD", "USER"})
_PARAMETER = re.compile(
    r"(?P<name>[?&;,\s]?(?:password|passwd|token|secret|access_?key|secret_?key|signature|sig|x-amz-[a-z-]+|auth)=)"
    r"[^&;,\s\"']+",
    re.IGNORECASE,
)
_CREDENTIALS = re.compile(r"//([^/\s@]*(?:/[^/\s@]*)*?)@")
#: Shorter secrets are not searched for, because they are part of too many words.
_SHORTEST = 4
#: Harmless values of variables whose name sounds like a secret.
_WORDS = frozenset({"true", "false", "none", "null", "auto", "root", "default", "enabled", "disabled"})


def redact(text: str) -> str:
    """Replace user and password of every URL in ``text`` by ``***``; if they are ambiguous, hide more."""
    return _SECRET.sub(lambda match: f"{match['scheme'] or match['before'] or ''}***@", text)


def is_secret(name: str) -> bool:
    """Return whether a variable of this name contains a secret."""
    return name not in _NOT_SECRET and _NAMES.search(name) is not None


def shown(name: str, value: str) -> str:
    """Return the value of a variable with its secrets hidden."""
    return HIDDEN if is_secret(name) and value else clean(value)


def clean(text: str) -> str:
    """Hide users and passwords in URLs, and the values of parameters such as ``password=``."""
    return _PARAMETER.sub(lambda match: f"{match['name']}{HIDDEN}", redact(text))


def hide_command(command: str) -> str:
    """Hide the secrets in a shell command: the values of variables with secrets, and what :func:`clean` hides."""
    try:
        words = shlex.split(command)
    except ValueError:  # its quotes are not balanced, so its words are unknown
        return HIDDEN
    parts = ((word, *word.partition("=")) for word in words)
    hidden = (f"{name}={HIDDEN}" if sign and is_secret(name) else clean(word) for word, name, sign, _ in parts)
    return shlex.join(hidden)


def hider(environ: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that hides the secrets of these environment variables in any text."""
    found: set[str] = set()
    for name, value in environ.items():
        if is_secret(name):
            found |= {value, value.partition(":")[2]}
        for part in _CREDENTIALS.findall(value):
            user, _, password = part.partition(":")
            found |= {part, password, unquote(password)} if password else {user, unquote(user)}
    secrets = sorted((each for each in found if len(each) >= _SHORTEST and each not in _WORDS), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, secrets))) if secrets else None

    def hide(text: str) -> str:
        return clean(text) if pattern is None else clean(pattern.sub(HIDDEN, text))

    return hide


def hide_all(value: Any, hide: Callable[[str], str]) -> Any:
    """Hide secrets in every text of JSON values.

    :param hide: the function that hides secrets in one text.
    """
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, dict):
        return {key: hide_all(part, hide) for key, part in value.items()}
    if isinstance(value, list):
        return [hide_all(part, hide) for part in value]
    return value
