# SPDX-License-Identifier: Apache-2.0
"""Seal the values of a group in etcd, so that only a process that has the group token can write a valid value.

A seal is an HMAC-SHA256 over the key, a sequence and the value. The sequence is different for every value of a key, so
that an old value, or the value of another key, is refused like a forged one. The seal is checked before the value is
parsed. A seal does not encrypt: everyone who can read the etcd can read the value.
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
    """A value has no valid seal for its key and its sequence."""


class Seals:
    """Seals and opens the values of one group. Without a token, values have no seal and every value is believed.

    :param token: the shared secret of all ranks; empty if there is none.
    :param root: the prefix of the group's keys.
    """

    def __init__(self, token: str, root: str) -> None:
        key = hmac.new(token.encode(), _LABEL + b"\0" + root.encode(), hashlib.sha256).digest()
        self._mac = hmac.new(key, digestmod=hashlib.sha256) if token else None

    @property
    def sealed(self) -> bool:
        """Whether the group has a token."""
        return self._mac is not None

    def seal(self, key: str, value: bytes, sequence: str = "") -> bytes:
        """Return the value with its seal, to be stored under ``key``.

        :param sequence: what makes this value unique, as far as the key does not: its writer, reader and number.
        """
        return value if self._mac is None else self._digest(key, value, sequence) + b" " + value

    def open(self, key: str, stored: bytes, sequence: str = "") -> bytes:
        """Check the seal of what is stored under ``key``, and return the value without it.

        :raises SealError: if the seal is not valid.
        """
        if self._mac is None:
            return stored
        value = stored[_HEX + 1 :]
        if not hmac.compare_digest(self._digest(key, value, sequence) + b" ", stored[: _HEX + 1]):
            raise SealError(
                "it has no valid seal of this group: its writer does not have the group token, or the value is old"
            )
        return value

    def _digest(self, key: str, value: bytes, sequence: str) -> bytes:
        assert self._mac is not None, "only a group with a token has seals"
        mac = self._mac.copy()
        for part in (key.encode(errors="surrogateescape"), sequence.encode(), value):
            mac.update(len(part).to_bytes(8, "big"))
            mac.update(part)
        return mac.hexdigest().encode()


def unsealed(stored: bytes) -> bytes:
    """Return a value without its seal, unchecked: only for text that nothing else depends on."""
    return stored[_HEX + 1 :] if _SEAL.match(stored) else stored
