# SPDX-License-Identifier: Apache-2.0
"""The AZURE_BLOB backend, which moves bytes between host memory and blobs of an Azure storage account."""

from __future__ import annotations

from pytest_nixl.nixl.backends.storage import ObjectBackend

#: The parameters that NIXL's plugin takes, although it lists none. Credentials and the account's URL are left to
#: Azure's own variables: parameters are recorded, and a row key holds no URL.
PARAMETERS = ("ca_bundle", "container_name")


class AzureBlobBackend(ObjectBackend):
    """The AZURE_BLOB backend."""

    NAME = "AZURE_BLOB"
    PLUGIN = "AZURE_BLOB"


BACKEND = AzureBlobBackend()
