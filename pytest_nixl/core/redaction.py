# SPDX-License-Identifier: Apache-2.0
"""Hide secrets in texts: values of variables with secrets, and users and passwords in URLs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"

#: The scheme of a URL with what follows it, as a regular expression. Its length is bounded, because a search in a long
#: word would else take time that grows with the square of its length.
URL_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{0,63}://"

# What stands before the last @ of a URL is hidden, whatever is in it; the next URL begins after a separator.
_NOT_NEXT = rf"(?![,;\s]+{URL_SCHEME})"
_IN_URL = re.compile(rf"(?P<scheme>{URL_SCHEME})(?:{_NOT_NEXT}[^\n])*@")
# The same where no scheme tells that it is a URL; the digest of a container image is none.
_BARE = re.compile(rf"(?P<before>^|[,;])(?!{URL_SCHEME})(?:[^@/,;]+|[^@/:,;]+:(?:{_NOT_NEXT}\S)*)@(?!sha(?:256|512):)")
_SPACES = re.compile(r"(\s+)")

#: A variable with one of these words in its name contains a secret, or the path of one.
_NAMES = re.compile(
    r"(?:^|_)(?:PASS|PASSWD|PASSWORD|PASSPHRASE|PWD|SECRET|SECRETS|TOKEN|TOKENS|JWT|KEY|KEYS|APIKEY|CREDENTIAL|CREDENTIALS|"
    r"AUTH|AUTHORIZATION|USER|BEARER|COOKIE|SIGNATURE|SAS|PAT|CONNECTION_STRING)(?:_|$)",
    re.IGNORECASE,
)
_NOT_SECRET = frozenset({"PWD", "OLDPWD", "USER"})
_PARAMETER = re.compile(
    r"(?P<name>[?&;,\s]?(?:password|passwd|token|secret|access_?key|secret_?key|account_?key|sharedaccesssignature|signature|sig|x-amz-[a-z-]+|auth)=)"
    r"[^&;,\s\"']+",
    re.IGNORECASE,
)
#: The key in a connection string of Azure, which may also be met alone.
_ACCOUNT_KEY = re.compile(r"(?:AccountKey|SharedAccessSignature)=([^;]+)", re.IGNORECASE)
_CREDENTIALS = re.compile(r"//([^/\s@]*(?:/[^/\s@]*)*?)@")
#: Shorter secrets are not searched for, because they are part of too many words.
_SHORTEST = 4
#: The characters of a shell command that is taken apart.
MOST_COMMAND = 4096
#: Harmless values of variables whose name sounds like a secret.
_WORDS = frozenset({"true", "false", "none", "null", "auto", "root", "default", "enabled", "disabled"})


def redact(text: str) -> str:
    """Replace user and password of every URL in ``text`` by ``***``; if they are ambiguous, hide more."""
    if "@" not in text:
        return text
    words = (_to_last_at(word, _BARE, r"\g<before>***@") for word in _SPACES.split(text))
    lines = (_to_last_at(line, _IN_URL, r"\g<scheme>***@") for line in "".join(words).split("\n"))
    return "\n".join(lines)


def _to_last_at(text: str, secret: re.Pattern[str], instead: str) -> str:
    """Replace what is secret as far as the last ``@``.

    A search that goes on behind it would read to the end from every place, in time that grows with the square.
    """
    end = text.rfind("@") + len("@sha512:")
    return secret.sub(instead, text[:end]) + text[end:] if "@" in text else text


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
    """Hide the secrets in a shell command: the values of variables with secrets, and what :func:`clean` hides.

    A command of more than :data:`MOST_COMMAND` characters is hidden whole, because its parts would take too long.
    """
    if len(command) > MOST_COMMAND:
        return HIDDEN
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
            found |= {value, value.partition(":")[2], *_ACCOUNT_KEY.findall(value)}
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
