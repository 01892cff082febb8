# SPDX-License-Identifier: Apache-2.0
"""The overlays, built by the real kustomize in kubectl."""

from __future__ import annotations

import subprocess
from pathlib import Path

from helpers.cli_run import ROOT
from helpers.manifests import Manifest, Pod, pods_of
from helpers.needs import program

OVERLAYS = ROOT / "deploy" / "overlays"
#: Longer than a busy machine needs to start kubectl.
SECONDS = 240


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build an overlay as ``kubectl apply -k`` does."""
    return subprocess.run(
        [program("kubectl"), "kustomize", str(folder)], capture_output=True, text=True, timeout=SECONDS, check=False
    )


def built(folder: Path) -> Manifest:
    """What is applied, with the comment of the file that people change."""
    done = build(folder)
    assert (done.returncode, done.stderr) == (0, "")
    comment = [line for line in (folder / "cluster.yaml").read_text().splitlines() if line.startswith("#")]
    return Manifest(folder.name, "\n".join([*comment, done.stdout]))


def rank_pod(manifest: Manifest) -> Pod:
    """The one pod template whose containers are ranks."""
    (pod,) = (pod for document in manifest.documents for pod in pods_of(document) if pod.runs_ranks)
    return pod
