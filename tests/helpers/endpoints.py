# SPDX-License-Identifier: Apache-2.0
"""Endpoints with credentials that no message may show."""

from __future__ import annotations

# Each holds USER and SECRET, and none can be read.
LEAKY = [
    "http://USER:SECRET@h",
    "http://USER:SECRET@h:1/",
    "USER:SECRET@h:99999",
    "ftp://USER:SECRET@h:1",
    "http://USER:SEC/SECRET@h:1",
    "http://USER:/SECRET@h:1",
    "http://USER:SECRET@SECRET@h:1",
    "http://USER:SECRET,SECRET@h:1",
    "http://USER:SECRET,http@h:1/path",
    "http://USER:a b SECRET@h:1",
    "http://USER:SECRET@",
    "http://USER:SECRET?@h:1",
    "http://USER:SECRET#@h:1",
    "http://USER:SECRET://@h:1",
    "USER:SECRET/SECRET@h:1",
    "USER:SECRET://x@h:1",
    "http://a:1,http://USER:SECRET@b",
    "http://USER:SECRET@a:1,http://USER:SECRET@b",
    "http://USER/SECRET,@b",
]
