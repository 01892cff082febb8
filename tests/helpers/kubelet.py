# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a kubelet, of which none can be had here: it starts the container of a pod on a host of a network.

The image is this machine, with variables of its own. The command, the arguments, the variables and the volumes are
those of the manifest; resources, huge pages, probes, security contexts and placement have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.manifests import Document, Pod
from helpers.own_root import in_own_root

_LABEL = re.compile(r"metadata\.labels\['([^']+)'\]")


@dataclass(frozen=True)
class Given:
    """What a pod gets from its cluster.

    :param folder: for its own files: the root, and the volumes that end with it.
    :param claims: the folder behind each PersistentVolumeClaim, by name.
    :param secrets: the values of each Secret, by name.
    :param labels: what a controller adds to the labels of the template.
    :param variables: those of the image, and what a controller adds to those of the container.
    """

    folder: Path
    claims: Mapping[str, Path] = field(default_factory=dict)
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def container_of(pod: Pod) -> Document:
    (container,) = pod.containers
    return container


def variables_of(pod: Pod, given: Given) -> dict[str, str]:
    """Return the variables of the one container of a pod."""
    results = dict(given.variables)
    for variable in container_of(pod).get("env", ()):
        name, value = variable["name"], variable.get("value")
        results[name] = _read(variable["valueFrom"], pod, given) if value is None else _expanded(value, results)
    return results


def command_of(pod: Pod, given: Given) -> list[str]:
    """Return the command line of the one container of a pod, with its volumes at their paths."""
    container = container_of(pod)
    variables = variables_of(pod, given)
    arguments = [_expanded(argument, variables) for argument in (*container["command"], *container.get("args", ()))]
    volumes = {entry["name"]: entry for entry in pod.spec.get("volumes", ())}
    mounts = [
        (str(_folder(volumes[mount["name"]], given)), mount["mountPath"], "ro" if mount.get("readOnly") else "rw")
        for mount in container.get("volumeMounts", ())
        if not _is_of_huge_pages(volumes[mount["name"]])
    ]
    root = given.folder / "root"
    root.mkdir(parents=True)
    return in_own_root(str(root), mounts, *arguments)


def _is_of_huge_pages(volume: Document) -> bool:
    """Whether a volume is of huge pages, which this machine need not have."""
    return str(volume.get("emptyDir", {}).get("medium", "")).startswith("HugePages")


def _folder(volume: Document, given: Given) -> Path:
    if "persistentVolumeClaim" in volume:
        return given.claims[volume["persistentVolumeClaim"]["claimName"]]
    assert "emptyDir" in volume, f"{volume['name']} is a volume of an unknown kind"
    return given.folder / "volumes" / str(volume["name"])


def _read(source: Mapping[str, Any], pod: Pod, given: Given) -> str:
    """Return the value of a variable that is read from a Secret or from a label of the pod."""
    if "secretKeyRef" in source:
        return given.secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
    label = _LABEL.fullmatch(source["fieldRef"]["fieldPath"])
    assert label is not None, source
    return {**pod.labels, **given.labels}[label[1]]


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` as a kubelet does: a name that is not known stays, and ``$$`` is one ``$``."""
    return re.sub(
        r"\$(?:\$|\(([A-Za-z_][\w.-]*)\))",
        lambda match: "$" if match[1] is None else variables.get(match[1], match[0]),
        text,
    )
