# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults of an S3 server, each with one remedy, by the server's answer or by the error of a connection."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

#: S3 servers refuse a request whose time differs by more, in seconds.
MOST_SKEW = 900.0


@dataclass(frozen=True)
class S3Fault:
    """A kind of fault.

    :param kind: its name, such as ``bucket`` or ``clock``.
    :param remedy: what to do, as an imperative.
    """

    kind: str
    remedy: str


_BUSY = "run it again with less --nixl-depth and --nixl-batch, because the server limits requests"
_REGION = "set AWS_DEFAULT_REGION to the region of the bucket"

#: By the ``Code`` of the server's answer.
BY_CODE: Mapping[str, S3Fault] = {
    "NoSuchBucket": S3Fault("bucket", "set AWS_DEFAULT_BUCKET to an existing bucket, or create it"),
    "NoSuchKey": S3Fault("key", "write the object before it is read, and let no other program or rule delete it"),
    "InvalidAccessKeyId": S3Fault(
        "credentials", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to a key of this server"
    ),
    "SignatureDoesNotMatch": S3Fault("credentials", "correct AWS_SECRET_ACCESS_KEY"),
    "ExpiredToken": S3Fault(
        "credentials", "renew AWS_SESSION_TOKEN, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    ),
    "AccessDenied": S3Fault("rights", "give this key the right to put, get and delete objects of this bucket"),
    "RequestTimeTooSkewed": S3Fault("clock", "set this host's clock: run `chronyc makestep`"),
    "AuthorizationHeaderMalformed": S3Fault("region", _REGION),
    "IllegalLocationConstraintException": S3Fault("region", _REGION),
    "PermanentRedirect": S3Fault(
        "region", "set AWS_DEFAULT_REGION and AWS_ENDPOINT_URL to those of the bucket's region"
    ),
    "SlowDown": S3Fault("busy", _BUSY),
    "ServiceUnavailable": S3Fault("busy", "run it again when the server is healthy"),
    "InternalError": S3Fault("server", "read the log of the server"),
}  # fmt: skip

#: By the status of an answer without such a code.
BY_STATUS: Mapping[int, S3Fault] = {
    301: BY_CODE["PermanentRedirect"],
    403: BY_CODE["AccessDenied"],
    429: BY_CODE["SlowDown"],
    503: BY_CODE["ServiceUnavailable"],
}
#: For other answers.
UNKNOWN = S3Fault("server", "read the log of the server")
CHECKSUM = S3Fault("checksum", "use --nixl-backend-params=OBJ:req_checksum=required, which sends no such checksums")

_ADDRESS = S3Fault(
    "endpoint", "correct AWS_ENDPOINT_URL, and check that the server runs and that this host reaches it"
)  # fmt: skip
_NO_TLS = S3Fault("tls", "write http:// in AWS_ENDPOINT_URL, or give the server a certificate")
_UNTRUSTED = S3Fault("tls", "set AWS_CA_BUNDLE to the file of the certificates that signed the server's")


def fault_of(error: Exception, seconds: float) -> tuple[str, S3Fault]:
    """Return what a failed connection or request means: a sentence without its subject, and the fault.

    :param error: the :class:`OSError` or :class:`http.client.HTTPException`.
    :param seconds: the time that the server had.
    """
    if isinstance(error, socket.gaierror):
        return f"has a host name that does not resolve ({error.strerror})", _ADDRESS
    if isinstance(error, TimeoutError):
        return f"did not answer within {seconds:g} s", _ADDRESS
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"has a certificate that is not trusted ({error.verify_message})", _UNTRUSTED
    if isinstance(error, ssl.SSLError):
        return f"does not speak TLS ({error.reason})", _NO_TLS
    if isinstance(error, http.client.HTTPException):
        return f"closed the connection or does not speak HTTP ({type(error).__name__})", _ADDRESS
    return f"cannot be reached ({getattr(error, 'strerror', '') or error})", _ADDRESS
