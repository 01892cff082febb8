# SPDX-License-Identifier: Apache-2.0
"""The seal of a group's values in etcd: only a process that has the group's token can write a value that is believed.

A seal is an HMAC-SHA256 of a value, of the key that holds it and of a sequence, which no value before or elsewhere has:
an old value, or one of another key, is refused like a forged one. It is compared before the value is parsed. The value
itself can be read by everyone who can read the etcd: a seal hides nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from pytest_nixl.core.strict import StrictError

_LABEL = b"pytest-nixl: values of a group in etcd, 1"
_HEX = hashlib.sha256().digest_size * 2
_SEAL = re.compile(rb"[0-9a-f]{%d} " % _HEX)


class SealError(StrictError):
    """A value has no seal of the group's for its key and its sequence."""


class Seals:
    """Seals the values of one group and opens them. Without a token values are as they are, and every one is believed.

    :param token: what all ranks of the group have been given and no stranger knows; empty: there is none.
    :param root: the start of the group's keys.
    """

    def __init__(self, token: str, root: str) -> None:
        key = hmac.new(token.encode(), _LABEL + b"\0" + root.encode(), hashlib.sha256).digest()
        self._mac = hmac.new(key, digestmod=hashlib.sha256) if token else None

    @property
    def sealed(self) -> bool:
        """Whether there is a token."""
        return self._mac is not None

    def seal(self, key: str, value: bytes, sequence: str = "") -> bytes:
        """Return what is to be stored under ``key``.

        :param sequence: who writes it, to whom, and the how manieth it is, as far as the key does not say so.
        """
        return value if self._mac is None else self._digest(key, value, sequence) + b" " + value

    def open(self, key: str, stored: bytes, sequence: str = "") -> bytes:
        """Return the value of what is stored under ``key``. :raises SealError: where the seal is not the group's."""
        if self._mac is None:
            return stored
        value = stored[_HEX + 1 :]
        if not hmac.compare_digest(self._digest(key, value, sequence) + b" ", stored[: _HEX + 1]):
            raise SealError(
                "it has no valid seal of this group: whoever wrote it has not its token, or it is an old one"
            )
        return value

    def _digest(self, key: str, value: bytes, sequence: str) -> bytes:
        assert self._mac is not None, "there is no seal without a token"
        mac = self._mac.copy()
        for part in (key.encode(errors="surrogateescape"), sequence.encode(), value):
            mac.update(len(part).to_bytes(8, "big"))
            mac.update(part)
        return mac.hexdigest().encode()


def unsealed(stored: bytes) -> bytes:
    """Return a value without looking whether its seal is right: for words that nothing depends on."""
    return stored[_HEX + 1 :] if _SEAL.match(stored) else stored
