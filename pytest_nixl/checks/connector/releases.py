# SPDX-License-Identifier: Apache-2.0
"""The release of an engine as far as its files say it, and the releases for which a rule holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pytest_nixl.checks.connector.engine_fields import EngineSide
from pytest_nixl.model.nixl_releases import numbers

#: Packages whose release a command may name (``pip install nixl==1.5.1``).
_INSTALLED = re.compile(r"\b(nixl(?:-cu1[23])?|vllm|sglang|ai-dynamo)(?:\[[\w,-]*\])?==([\w.+!-]+)")
#: The package whose release is the tag of an image, by the image's name.
_IMAGES = MappingProxyType(
    {
        "vllm-openai": "vllm",
        "vllm": "vllm",
        "sglang": "sglang",
        "vllm-runtime": "ai-dynamo",
        "sglang-runtime": "ai-dynamo",
        "tensorrtllm-runtime": "ai-dynamo",
    }
)
_NAMES: Mapping[str, str] = MappingProxyType({"vllm": "vLLM", "sglang": "SGLang", "ai-dynamo": "Dynamo"})


@dataclass(frozen=True)
class ReleaseRange:
    """The releases for which a rule holds, as read from the sources of these releases.

    :param since: the first of them; empty for all earlier ones.
    :param before: the first release after them; empty for all later ones.
    """

    package: str
    since: str = ""
    before: str = ""

    def __str__(self) -> str:
        name = _NAMES[self.package]
        since = f" from {self.since}" if self.since else ""
        return f"{name}{since}{f' before {self.before}' if self.before else ''}"

    def excludes(self, side: EngineSide) -> bool:
        """Return whether a side has a known release for which the rule does not hold."""
        release = release_of(side, self.package)
        if not release:
            return False
        below = bool(self.since) and numbers(release) < numbers(self.since)
        return below or (bool(self.before) and numbers(release) >= numbers(self.before))


def installed(side: EngineSide) -> dict[str, str]:
    """Return the releases that a side's command installs or its variables name, by package."""
    launch = side.source.launch
    releases: dict[str, str] = dict(_INSTALLED.findall(launch.script))
    for package in ("nixl", "vllm", "sglang"):
        if version := launch.environment.get(f"{package.upper()}_VERSION"):
            releases.setdefault(package, version)
    return releases


def release_of(side: EngineSide, package: str) -> str:
    """Return the release of a package on one side; empty if the file does not say it."""
    name, _, tag = side.source.image.rpartition("/")[2].partition(":")
    from_image = tag.partition("@")[0].removeprefix("v") if _IMAGES.get(name) == package else ""
    release = installed(side).get(package, "") or from_image
    return release if re.match(r"\d+\.\d+", release) else ""


def older_than(side: EngineSide, package: str, release: str) -> bool:
    """Return whether a side is known to have an older release of a package."""
    return ReleaseRange(package, since=release).excludes(side)
