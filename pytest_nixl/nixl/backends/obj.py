# SPDX-License-Identifier: Apache-2.0
"""The OBJ backend, which moves bytes between host memory and objects of an S3 server."""

from __future__ import annotations

from pytest_nixl.nixl.backends.storage import ObjectBackend

#: The parameters that NIXL's plugin takes, although it lists none. Credentials are left to AWS's own variables, because
#: parameters are recorded.
PARAMETERS = (
    "bucket", "ca_bundle", "crtMinLimit", "endpoint_override", "region", "req_checksum", "resp_checksum", "scheme",
    "use_virtual_addressing",
)  # fmt: skip


class ObjBackend(ObjectBackend):
    """The OBJ backend."""

    NAME = "OBJ"
    PLUGIN = "OBJ"


BACKEND = ObjBackend()
