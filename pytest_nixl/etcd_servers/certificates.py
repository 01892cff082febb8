# SPDX-License-Identifier: Apache-2.0
"""The certificate by which rank 0's etcd and the ranks of its group know each other, made from the group's token.

Every rank makes the same two files from the same token, byte for byte, so that no key crosses the network. The one
certificate is signed with its own key, and each side trusts it and nothing else. The package ``cryptography`` makes key
and signature. Its builder of certificates is not used, because its import takes five times as long as all of this.
"""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pytest_nixl.etcd.client import Credentials

#: The host in the certificate: when the ranks make it, they need not know which host rank 0 has.
SERVER_NAME = "rank-0.pytest-nixl"
_LABEL = b"pytest-nixl: key of the group's etcd"
#: Rounds of PBKDF2, for 5 ms: whoever can connect sees the public key, and could try short tokens on it.
_ROUNDS = 10_000
#: From 2000 to 2049, as the clocks of the ranks need not agree.
_VALID = (b"000101000000Z", b"491231235959Z")

# Tags of ASN.1, and object identifiers in their encoding.
_BOOLEAN, _INTEGER, _BITS, _OCTETS, _IDENTIFIER = 0x01, 0x02, 0x03, 0x04, 0x06
_UTF8, _TIME, _SEQUENCE, _SET = 0x0C, 0x17, 0x30, 0x31
_VERSION, _EXTENSIONS, _DNS_NAME = 0xA0, 0xA3, 0x82
_ED25519, _ORGANIZATION = b"\x2b\x65\x70", b"\x55\x04\x0a"
_KEY_USAGE, _NAMES, _CONSTRAINTS, _PURPOSES = (b"\x55\x1d" + end for end in (b"\x0f", b"\x11", b"\x13", b"\x25"))
_SERVER_AUTH, _CLIENT_AUTH = (b"\x2b\x06\x01\x05\x05\x07\x03" + end for end in (b"\x01", b"\x02"))


def write_certificates(directory: Path, token: str) -> Credentials:
    """Write the files that a rank with this token has, and return them as arguments of ``connect``.

    :param directory: a private directory, which is removed with the run.
    :param token: the group's token, which cannot be computed from the files.
    """
    secret = hashlib.pbkdf2_hmac("sha256", token.encode(errors="surrogateescape"), _LABEL, _ROUNDS)
    contents = {
        "CERTIFICATE": _certificate(Ed25519PrivateKey.from_private_bytes(secret)),
        "PRIVATE KEY": _der(_SEQUENCE, _der(_INTEGER, b"\0"), _ALGORITHM, _der(_OCTETS, _der(_OCTETS, secret))),
    }
    paths = []
    for label, content in contents.items():
        paths.append(str(directory / f"group-{label.split()[-1].lower()}.pem"))
        text = f"-----BEGIN {label}-----\n{base64.encodebytes(content).decode()}-----END {label}-----\n"
        with open(os.open(paths[-1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
            file.write(text)
    return Credentials(cacert=paths[0], cert=paths[0], key=paths[1], server_name=SERVER_NAME)


def _certificate(key: Ed25519PrivateKey) -> bytes:
    """Return the certificate of a key (RFC 5280), signed with the key itself."""
    public = key.public_key().public_bytes_raw()
    name = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _der(_IDENTIFIER, _ORGANIZATION), _der(_UTF8, b"pytest-nixl"))))
    purposes = (_der(_IDENTIFIER, purpose) for purpose in (_SERVER_AUTH, _CLIENT_AUTH))
    extensions = (
        _extension(_CONSTRAINTS, _der(_SEQUENCE, _der(_BOOLEAN, b"\xff")), critical=True),  # it is its own CA
        _extension(_KEY_USAGE, _der(_BITS, b"\x02\x84"), critical=True),  # digitalSignature and keyCertSign
        # The gateway in the etcd connects to the etcd with this certificate, too.
        _extension(_PURPOSES, _der(_SEQUENCE, *purposes)),
        _extension(_NAMES, _der(_SEQUENCE, _der(_DNS_NAME, SERVER_NAME.encode()))),
    )
    content = _der(
        _SEQUENCE,
        _der(_VERSION, _der(_INTEGER, b"\x02")),  # X.509 version 3
        _der(_INTEGER, b"\x01"),
        _ALGORITHM,
        name,
        _der(_SEQUENCE, *(_der(_TIME, time) for time in _VALID)),
        name,
        _der(_SEQUENCE, _ALGORITHM, _der(_BITS, b"\0", public)),
        _der(_EXTENSIONS, _der(_SEQUENCE, *extensions)),
    )
    return _der(_SEQUENCE, content, _ALGORITHM, _der(_BITS, b"\0", key.sign(content)))


def _extension(identifier: bytes, value: bytes, *, critical: bool = False) -> bytes:
    flag = _der(_BOOLEAN, b"\xff") if critical else b""
    return _der(_SEQUENCE, _der(_IDENTIFIER, identifier), flag, _der(_OCTETS, value))


def _der(tag: int, *contents: bytes) -> bytes:
    """Encode a value in DER: its tag, its length and its contents."""
    content = b"".join(contents)
    size = len(content)
    length = size.to_bytes((size.bit_length() + 7) // 8 or 1, "big")
    return bytes([tag]) + (length if size < 0x80 else bytes([0x80 | len(length)]) + length) + content


_ALGORITHM = _der(_SEQUENCE, _der(_IDENTIFIER, _ED25519))
