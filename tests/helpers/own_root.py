# SPDX-License-Identifier: Apache-2.0
"""A root directory as a container has it: the folders of this machine, and volumes at paths of its own."""

from __future__ import annotations

from collections.abc import Sequence

#: Arguments: the new root, then source, target and mode of each volume, then ``--`` and the command.
_ENTER = """
set -e
root=$1
shift
mount -t tmpfs none "$root"
for top in /*; do
    if [ -L "$top" ]; then
        cp -P "$top" "$root$top"
    elif [ -d "$top" ]; then
        mkdir "$root$top"
        mount --rbind "$top" "$root$top"
    fi
done
while [ "$1" != -- ]; do
    mkdir -p "$1" "$root$2"
    mount --bind "$1" "$root$2"
    [ "$3" != ro ] || mount -o remount,bind,ro "$root$2"
    shift 3
done
shift
exec chroot "$root" "$@"
"""


def in_own_root(root: str, volumes: Sequence[tuple[str, str, str]], *command: str) -> list[str]:
    """Return the command that runs a command, as root, in a root directory of its own, in ``/``.

    :param root: an empty folder. It stays empty, because only the command sees what is mounted there.
    :param volumes: the folder, the path that it gets, and ``rw`` or ``ro``; a folder that does not exist is made.
    """
    arguments = [argument for volume in volumes for argument in volume]
    return [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        _ENTER,
        "sh",
        root,
        *arguments,
        "--",
        *command,
    ]
