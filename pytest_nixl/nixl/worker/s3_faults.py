# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults of an S3 server, each with one remedy, by the server's answer or by the error of a connection."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_nixl.nixl.worker.object_stores import ConnectionFaults, StoreFault

_BUSY = "run it again with less --nixl-depth and --nixl-batch, because the server limits requests"
_REGION = "set AWS_DEFAULT_REGION to the region of the bucket"

#: By the ``Code`` of the server's answer.
BY_CODE: Mapping[str, StoreFault] = {
    "NoSuchBucket": StoreFault("bucket", "set AWS_DEFAULT_BUCKET to an existing bucket, or create it"),
    "NoSuchKey": StoreFault("key", "write the object before it is read, and let no other program or rule delete it"),
    "InvalidAccessKeyId": StoreFault(
        "credentials", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to a key of this server"
    ),
    "SignatureDoesNotMatch": StoreFault("credentials", "correct AWS_SECRET_ACCESS_KEY"),
    "ExpiredToken": StoreFault(
        "credentials", "renew AWS_SESSION_TOKEN, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    ),
    "AccessDenied": StoreFault("rights", "give this key the right to put, get and delete objects of this bucket"),
    "RequestTimeTooSkewed": StoreFault("clock", "set this host's clock: run `chronyc makestep`"),
    "AuthorizationHeaderMalformed": StoreFault("region", _REGION),
    "IllegalLocationConstraintException": StoreFault("region", _REGION),
    "PermanentRedirect": StoreFault(
        "region", "set AWS_DEFAULT_REGION and AWS_ENDPOINT_URL to those of the bucket's region"
    ),
    "SlowDown": StoreFault("busy", _BUSY),
    "ServiceUnavailable": StoreFault("busy", "run it again when the server is healthy"),
    "InternalError": StoreFault("server", "read the log of the server"),
}  # fmt: skip

#: By the status of an answer without such a code.
BY_STATUS: Mapping[int, StoreFault] = {
    301: BY_CODE["PermanentRedirect"],
    403: BY_CODE["AccessDenied"],
    429: BY_CODE["SlowDown"],
    503: BY_CODE["ServiceUnavailable"],
}
#: For other answers.
UNKNOWN = StoreFault("server", "read the log of the server")
CHECKSUM = StoreFault("checksum", "use --nixl-backend-params=OBJ:req_checksum=required, which sends no such checksums")

CONNECTION_FAULTS = ConnectionFaults(
    StoreFault("endpoint", "correct AWS_ENDPOINT_URL, and check that the server runs and that this host reaches it"),
    StoreFault("tls", "write http:// in AWS_ENDPOINT_URL, or give the server a certificate"),
    StoreFault("tls", "set AWS_CA_BUNDLE to the file of the certificates that signed the server's"),
)


def trusted_by(bundle: str) -> str:
    """Return what makes NIXL's plugin trust a server, as an imperative.

    :param bundle: the file with the certificates; empty: it is not known.
    """
    return f"use --nixl-backend-params=OBJ:ca_bundle={bundle or 'FILE'}, and give the engine's OBJ that parameter too"
