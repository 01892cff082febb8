# SPDX-License-Identifier: Apache-2.0
"""The libraries of NIXL in the text of ``/proc/PID/maps``."""

from __future__ import annotations

from pytest_nixl.host.loaded_libraries import libraries_of_nixl

#: The form of proc(5): addresses, permissions, offset, device, inode and path.
MAPS = """\
560000000000-560000001000 r-xp 00000000 fe:00 11 /usr/lib/libfabric.so.1/python3.so
7f0000000000-7f0000001000 r--p 00000000 fe:00 12                         /opt/with space/libucp.so.0.0.0
7f0000001000-7f0000002000 r-xp 00001000 fe:00 12                         /opt/with space/libucp.so.0.0.0
7f0000002000-7f0000003000 r-xp 00000000 fe:00 13                         /opt/libnixl.so (deleted)
7f0000003000-7f0000004000 r--p 00000000 fe:00 14                         /usr/lib/locale/libcuda
7f0000004000-7f0000005000 r--p 00000000 fe:00 15                         /usr/lib/notlibucs.so.0
7f0000005000-7f0000006000 rw-p 00000000 00:00 0
7f0000006000-7f0000007000 r-xp 00000000 fe:00 16                         /libucs.so.0
7f0000007000-7f0000008000 rw-p 00000000 00:00 0                          [anon:/libuct.so]
"""


def test_libraries_are_named_once_by_their_whole_paths_in_the_order_of_their_addresses() -> None:
    libraries = libraries_of_nixl(MAPS)
    assert libraries == ["/opt/with space/libucp.so.0.0.0", "/opt/libnixl.so (deleted)", "/libucs.so.0"]
