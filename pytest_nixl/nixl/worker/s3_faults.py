# SPDX-License-Identifier: Apache-2.0
"""The kinds of faults of an S3 server, each with one remedy, by the server's answer or by the error of a connection."""

from __future__ import annotations

from pytest_nixl.core.texts import Entries
from pytest_nixl.nixl.worker.object_stores import StoreFault, connection_faults, faults_by_code, faults_by_status

_FAULTS = Entries("store-faults", StoreFault, "s3")
BY_CODE, BY_STATUS, CONNECTION_FAULTS = faults_by_code(_FAULTS), faults_by_status(_FAULTS), connection_faults(_FAULTS)
#: For other answers.
UNKNOWN = _FAULTS["unknown"]
CHECKSUM = _FAULTS["checksum"]


def trusted_by(bundle: str) -> str:
    """Return what makes NIXL's plugin trust a server, as an imperative.

    :param bundle: the file with the certificates; empty: it is not known.
    """
    return f"use --nixl-backend-params=OBJ:ca_bundle={bundle or 'FILE'}, and give the engine's OBJ that parameter too"
