# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the program ``docker``: its images are this host, each with variables of its own.

A double, because CI has no runtime for GPUs, cannot raise the limit of locked memory, and can pull no image. It knows
the options that the shipped recipe for GitHub gives: ``-e``, ``-v`` and the command are as in Docker, and the others do
nothing. The command runs as root in a root directory of its own, with this host's directories and the volumes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from helpers.own_root import in_own_root

#: The exit code of ``docker run`` if there is no container.
NO_CONTAINER = 125


def install(folder: Path, images: Mapping[str, Mapping[str, str]]) -> None:
    """Write the program ``docker`` into a folder that is to be on PATH.

    :param images: the variables of each image, by its name.
    """
    program = folder / "docker"
    document = json.dumps({name: dict(values) for name, values in images.items()})
    arguments = [f"PYTHONPATH={Path(__file__).parents[1]}", sys.executable, "-m", "helpers.docker_standin", document]
    program.write_text(f'#!/bin/sh\nexec env {shlex.join(arguments)} "$@"\n')
    program.chmod(0o755)


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="docker run", allow_abbrev=False)
    parser.add_argument("--rm", action="store_true", required=True)
    for option in ("--network", "--ipc", "--cap-add", "--ulimit", "--gpus"):
        parser.add_argument(option)
    parser.add_argument("-e", action="append", default=[])
    parser.add_argument("-v", action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def main(images: Mapping[str, Mapping[str, str]], arguments: list[str]) -> int:
    """Run a command of an image; return its exit code, or 125 if the image is not there."""
    if arguments[:1] != ["run"]:
        print(f"docker: {shlex.join(arguments)}: the stand-in knows only run", file=sys.stderr)
        return NO_CONTAINER
    options = _parsed(arguments[1:])
    if options.image not in images:
        print(f"docker: Unable to find image {options.image!r} locally", file=sys.stderr)
        return NO_CONTAINER
    variables = dict(images[options.image])
    for variable in options.e:
        name, equals, value = variable.partition("=")
        if equals or name in os.environ:
            variables[name] = value if equals else os.environ[name]
    volumes = []
    for variable in options.v:
        source, target, *mode = variable.split(":")
        volumes.append((source, target, mode[0] if mode else "rw"))
    with tempfile.TemporaryDirectory() as root:
        command = in_own_root(root, volumes, *options.command)
        path = {"PATH": os.environ["PATH"]}
        return subprocess.run(command, env={**path, **variables}, cwd="/", check=False).returncode


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
