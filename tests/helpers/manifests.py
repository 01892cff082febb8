# SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests: their documents, their pods, and the places in them that must agree with each other."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

Document = dict[str, Any]

LEADER_WORKER_SET, JOB_SET, MPI_JOB = "LeaderWorkerSet", "JobSet", "MPIJob"
#: The variables that the controller of LeaderWorkerSets sets in every container.
_INJECTED = {"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}
#: The options that name files of a run.
_RESULTS = ("--nixl-log-dir", "--junitxml", "--nixl-report")


@dataclass(frozen=True)
class Manifest:
    """One file of documents, and the documents of the files with which it may be applied."""

    name: str
    text: str
    others: tuple[Document, ...] = ()

    @cached_property
    def documents(self) -> list[Document]:
        return [document for document in yaml.load_all(self.text, Loader=yaml.CSafeLoader) if document]

    def named(self, kind: str) -> dict[str, Document]:
        """The documents of a kind by name. Of two with the same name, that of this file counts."""
        documents = [*self.others, *self.documents]
        return {document["metadata"]["name"]: document for document in documents if document["kind"] == kind}

    @property
    def header(self) -> str:
        """The comment at the top of the file."""
        return self.text[: re.match(r"(?:#.*\n)*", self.text).end()]  # type: ignore[union-attr]


@dataclass(frozen=True)
class Pod:
    """A pod template, and the document that contains it."""

    owner: Document
    labels: Mapping[str, str]
    spec: Document

    @property
    def kind(self) -> str:
        return str(self.owner["kind"])

    @property
    def containers(self) -> list[Document]:
        return list(self.spec["containers"])

    @property
    def arguments(self) -> list[str]:
        return [argument for container in self.containers for argument in container.get("args", ())]

    @property
    def runs_ranks(self) -> bool:
        """Whether its containers are ranks, and not an etcd."""
        return any(argument.startswith("--nixl-") for argument in self.arguments)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of its container; None for one that is read from another object."""
        return {variable["name"]: variable.get("value") for variable in self.containers[0].get("env", ())}

    def option(self, flag: str) -> str | None:
        """Return the value of an option; None if it is not given."""
        prefix = f"{flag}="
        return next((argument[len(prefix) :] for argument in self.arguments if argument.startswith(prefix)), None)


def read(paths: Sequence[Path]) -> list[Manifest]:
    """Read files that are applied together."""
    manifests = [Manifest(path.name, path.read_text(encoding="utf-8")) for path in paths]
    return [
        replace(manifest, others=tuple(
            document for other in manifests if other is not manifest for document in other.documents
        ))
        for manifest in manifests
    ]  # fmt: skip


def jobs_of(document: Document) -> list[Document]:
    """Return the Jobs that a document is or makes, without those of an MPIJob, which its operator writes."""
    if document["kind"] == JOB_SET:
        jobs = document["spec"]["replicatedJobs"]
        return [{"apiVersion": "batch/v1", "kind": "Job", **job["template"]} for job in jobs]
    return [document] if document["kind"] == "Job" else []


def pods_of(document: Document) -> list[Pod]:
    """Return the pod templates of a document; of an MPIJob, the worker with what the launcher starts there."""
    spec = document.get("spec", {})
    if document["kind"] == JOB_SET:
        return [replace(pod, owner={**job, "kind": JOB_SET}) for job in jobs_of(document) for pod in pods_of(job)]
    if document["kind"] == MPI_JOB:
        return [_mpi_worker(document)]
    group = spec.get("leaderWorkerTemplate", {})
    templates = [spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")]
    return [Pod(document, template["metadata"]["labels"], template["spec"]) for template in templates if template]


def _mpi_worker(document: Document) -> Pod:
    launcher, worker = (document["spec"]["mpiReplicaSpecs"][name]["template"] for name in ("Launcher", "Worker"))
    (starts,), (container,) = launcher["spec"]["containers"], worker["spec"]["containers"]
    started = {**container, **{name: starts[name] for name in ("command", "args", "env")}}
    return Pod(document, worker["metadata"]["labels"], {**worker["spec"], "containers": [started]})


def validate(document: Document) -> None:
    """Validate a document by the newest published schemas; of one that a controller reads, its Jobs or pods."""
    if document["kind"] == JOB_SET:
        documents = jobs_of(document)
    elif document["kind"] in (LEADER_WORKER_SET, MPI_JOB):
        documents = [
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": dict(pod.labels)}, "spec": pod.spec}
            for pod in pods_of(document)
        ]
    else:
        documents = [document]
    for item in documents:
        _validate(json.dumps(item))


@functools.cache
def _validate(text: str) -> None:
    """Validate a document as JSON. Reading the schemas takes a second, and most documents of two tests are equal."""
    kubernetes_validate.validate(json.loads(text), kubernetes_validate.latest_version(), strict=True)


def disagreements(manifest: Manifest) -> list[tuple[str, Any, Any]]:
    """Return the places of a manifest that a user must keep equal and that differ, of its pods of ranks."""
    pods = [pod for document in manifest.documents for pod in pods_of(document) if pod.runs_ranks]
    return [
        (name, value, expected)
        for pod in pods
        for name, value, expected in [*_counts(pod), *_names(manifest, pod), *_files(manifest, pod), *_node(pod)]
        if value != expected
    ]


def _counts(pod: Pod) -> Iterator[tuple[str, Any, Any]]:
    """Compare the number of pods that a controller starts with the number of ranks."""
    spec, ranks = pod.owner["spec"], pod.option("--nixl-ranks")
    if pod.kind in ("Job", JOB_SET):
        yield "completions and --nixl-ranks", str(spec.get("completions")), ranks
        yield "parallelism and --nixl-ranks", str(spec.get("parallelism")), ranks
    elif pod.kind == "StatefulSet":
        yield "replicas and --nixl-ranks", str(spec.get("replicas")), ranks
    elif pod.kind == MPI_JOB:
        started = dict(pairwise(pod.arguments)).get("-n")
        yield "workers and -n of mpirun", str(spec["mpiReplicaSpecs"]["Worker"].get("replicas")), started


def _names(manifest: Manifest, pod: Pod) -> Iterator[tuple[str, Any, Any]]:
    """Compare the names by which ranks find each other and the etcd with what makes these names."""
    services = {name: document["spec"] for name, document in manifest.named("Service").items()}
    if pod.kind in ("Job", "StatefulSet"):
        service = services.get(pod.spec.get("subdomain") or pod.owner["spec"].get("serviceName") or "", {})
        yield "a headless Service names the pods", service.get("clusterIP"), "None"
        yield "it names them before they are ready", service.get("publishNotReadyAddresses"), True
        yield "it selects them", {**pod.labels, **service.get("selector", {})}, pod.labels
    if url := pod.option("--nixl-etcd"):
        host, _, port = url.removeprefix("http://").partition(":")
        service = services.get(host, {"ports": [], "selector": {"none": ""}})
        yield "a Service has the port of --nixl-etcd", port in {str(entry["port"]) for entry in service["ports"]}, True
        deployments = [template for document in manifest.named("Deployment").values() for template in pods_of(document)]
        selected = [template for template in deployments if service["selector"].items() <= template.labels.items()]
        yield "it selects the pod of etcd", len(selected), 1
    if pod.kind == JOB_SET:
        (job_set,) = manifest.named(JOB_SET).values()
        (job,), subdomain = job_set["spec"]["replicatedJobs"], job_set["spec"]["network"]["subdomain"]
        rank0 = f"{job_set['metadata']['name']}-{job['name']}-0-0.{subdomain}"
        yield "runs of one JobSet", job["replicas"], 1
        yield "MASTER_ADDR and the name of rank 0", pod.variables.get("MASTER_ADDR"), rank0
    if pod.spec.get("hostNetwork"):
        yield "dnsPolicy beside hostNetwork", pod.spec.get("dnsPolicy"), "ClusterFirstWithHostNet"
        numbered = pod.kind != "StatefulSet" or pod.option("--nixl-rank") is not None
        yield "with hostNetwork a StatefulSet's pods get --nixl-rank", numbered, True


def _files(manifest: Manifest, pod: Pod) -> Iterator[tuple[str, Any, Any]]:
    """Compare variables, volumes and objects that a pod refers to with those that are there."""
    (container,) = pod.containers
    yield "NIXL_IMAGE and the image", pod.variables.get("NIXL_IMAGE"), container["image"]
    used = set(re.findall(r"\$\(([A-Za-z_]\w*)\)", " ".join(pod.arguments)))
    yield "variables of the arguments that are not set", used - pod.variables.keys() - _INJECTED, set()
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", ())}
    mounts = {mount["mountPath"]: volumes.get(mount["name"]) for mount in container.get("volumeMounts", ())}
    yield "mounts without a volume", [path for path, volume in mounts.items() if volume is None], []
    shm = (mounts.get("/dev/shm") or {}).get("emptyDir", {})
    yield "/dev/shm, which has 64 MiB else, is in memory", shm.get("medium"), "Memory"
    durable = [path for path, volume in mounts.items() if volume and "persistentVolumeClaim" in volume]
    for flag in _RESULTS:
        path = pod.option(flag) or ""
        yield f"{flag} is on a volume and of this run", path.startswith(tuple(f"{at}/$(RUN)" for at in durable)), True
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values()
              if "persistentVolumeClaim" in volume]  # fmt: skip
    yield "claims that no file makes", set(claims) - manifest.named("PersistentVolumeClaim").keys(), set()
    references = [variable.get("valueFrom", {}).get("secretKeyRef") for variable in container.get("env", ())]
    secrets = [reference["name"] for reference in references if reference]
    unmade = [name for name in secrets if f"secret generic {name} " not in manifest.header]
    yield "Secrets that no command of the header makes", unmade, []


def _node(pod: Pod) -> Iterator[tuple[str, Any, Any]]:
    """Compare what Kubernetes refuses unless it is equal, and the labels that keep two ranks from one node."""
    (container,) = pod.containers
    requests, limits = (
        {name: value for name, value in container["resources"][side].items() if name not in ("cpu", "memory")}
        for side in ("requests", "limits")
    )
    yield "requests and limits of devices and huge pages", requests, limits
    terms = pod.spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    apart = [(term["topologyKey"], {**pod.labels, **term["labelSelector"]["matchLabels"]}) for term in terms]
    yield "one rank on a node", apart, [("kubernetes.io/hostname", dict(pod.labels))]
