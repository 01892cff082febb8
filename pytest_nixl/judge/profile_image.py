# SPDX-License-Identifier: Apache-2.0
"""What a profile wants of the installed software: its tables ``[image]`` and ``[versions]``."""

from __future__ import annotations

from pytest_nixl.judge.profile_table import ProfileTable, backend_name
from pytest_nixl.model.image import SOFTWARE, ImageRequirements
from pytest_nixl.model.version_range import VERSION_FORM, VersionRange


def read_image(document: ProfileTable) -> ImageRequirements:
    """Read the two tables of a profile's file.

    :raises ValueError: if one is not valid: one sentence.
    """
    image = document.table("image")
    image.allow("plugins", "etcd_uri_patch")
    versions = document.table("versions")
    versions.allow(*SOFTWARE)
    wanted = {key: versions.text(key, VERSION_FORM, VersionRange.parse) for key in versions.data}
    return ImageRequirements(
        plugins=image.texts("plugins", 'names of NIXL plugins such as "UCX"', backend_name) or (),
        etcd_uri_patch=image.flag("etcd_uri_patch", default=True) if "etcd_uri_patch" in image.data else None,
        versions={key: each for key, each in wanted.items() if each is not None},
    )
