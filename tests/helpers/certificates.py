# SPDX-License-Identifier: Apache-2.0
"""A certificate of a server on 127.0.0.1, and of the authority that signed it, which no machine trusts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """The files of a server's certificate, of its private key, and of the authority's certificate."""

    chain: Path
    key: Path
    authority: Path


def make_certificates(folder: Path) -> Certificates:
    """Make them in a folder."""
    certificates = Certificates(folder / "server.pem", folder / "server.key", folder / "authority.pem")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(certificates.key))
    for pem in issued.cert_chain_pems:
        pem.write_to_path(str(certificates.chain), append=True)
    authority.cert_pem.write_to_path(str(certificates.authority))
    return certificates
