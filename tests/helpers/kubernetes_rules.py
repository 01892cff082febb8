# SPDX-License-Identifier: Apache-2.0
"""Rules for manifests beyond the schemas of Kubernetes. Each rule yields one sentence for each violation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]

LEADER_WORKER_SET, JOB_SET, MPI_JOB = "LeaderWorkerSet", "JobSet", "MPIJob"
#: The variables that the controller of LeaderWorkerSets sets in every container.
_INJECTED = {"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}

#: The valid words of a field, anywhere in a document. For fields of the same name the words are merged.
ENUMS: Mapping[str, set[str]] = {
    "accessModes": {"ReadWriteMany", "ReadWriteOnce", "ReadOnlyMany", "ReadWriteOncePod"},
    "completionMode": {"Indexed", "NonIndexed"},
    "dnsPolicy": {"ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"},
    "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "medium": {"", "Memory", "HugePages", "HugePages-2Mi", "HugePages-1Gi"},
    "operator": {"Exists", "Equal", "In", "NotIn", "DoesNotExist"},
    "podManagementPolicy": {"OrderedReady", "Parallel"},
    # The words for a pod, and those for the group of a LeaderWorkerSet.
    "restartPolicy": {"Always", "OnFailure", "Never", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"},
    "cleanPodPolicy": {"All", "Running", "None"},
    "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
    "startupPolicy": {"LeaderCreated", "LeaderReady"},
    # The words for a Deployment, a StatefulSet, a Service and a seccomp profile.
    "type": {"Recreate", "RollingUpdate", "OnDelete", "ClusterIP", "NodePort", "LoadBalancer", "RuntimeDefault"},
}
#: The fields of a LeaderWorkerSet that the manifests use. There is no schema of it in the package.
_SET_FIELDS = {"replicas", "startupPolicy", "leaderWorkerTemplate", "rolloutStrategy", "networkConfig"}
_GROUP_FIELDS = {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
#: The same of a JobSet and of an MPIJob.
_JOB_SET_FIELDS = {"network", "failurePolicy", "successPolicy", "replicatedJobs", "suspend", "ttlSecondsAfterFinished"}
_MPI_FIELDS = {"slotsPerWorker", "launcherCreationPolicy", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath"}


@dataclass(frozen=True)
class Manifest:
    """One file of documents, and the documents of the files with which it may be applied."""

    name: str
    text: str
    others: tuple[Document, ...] = ()

    @cached_property
    def documents(self) -> list[Document]:
        return [document for document in yaml.load_all(self.text, Loader=yaml.CSafeLoader) if document]

    @property
    def known(self) -> list[Document]:
        """The documents of the other files and then its own. Of two with the same name, the later one counts."""
        return [*self.others, *self.documents]

    @property
    def header(self) -> str:
        """The comment at the top of the file."""
        lines = self.text.splitlines()
        end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
        return "\n".join(lines[:end])


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
        return [word for container in self.containers for word in container.get("args", ())]

    @property
    def runs_ranks(self) -> bool:
        """Whether its containers are ranks, and not an etcd."""
        return any(word.startswith("--nixl-") for word in self.arguments)

    def option(self, flag: str) -> str | None:
        """Return the value of an option; None if it is not given."""
        return next((word.partition("=")[2] for word in self.arguments if word.startswith(f"{flag}=")), None)


def read(paths: Sequence[Path]) -> list[Manifest]:
    """Read files that are applied together."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    documents = {name: Manifest(name, text).documents for name, text in texts.items()}
    return [
        Manifest(name, text, tuple(each for other, found in documents.items() if other != name for each in found))
        for name, text in texts.items()
    ]


def jobs_of(document: Document) -> list[Document]:
    """Return the Jobs that a document is or makes, without those of an MPIJob, which its operator writes."""
    if document["kind"] == JOB_SET:
        return [{"apiVersion": "batch/v1", "kind": "Job", **each["template"]} for each in _replicated(document)]
    return [document] if document["kind"] == "Job" else []


def _replicated(job_set: Document) -> list[Document]:
    return list(job_set["spec"].get("replicatedJobs", ()))


def pods_of(document: Document) -> list[Pod]:
    """Return the pod templates of a document; of an MPIJob, the worker with what the launcher starts there."""
    spec = document.get("spec", {})
    if document["kind"] == JOB_SET:
        return [replace(pod, owner={**job, "kind": JOB_SET}) for job in jobs_of(document) for pod in pods_of(job)]
    if document["kind"] == MPI_JOB:
        return [_mpi_worker(document)]
    group = spec.get("leaderWorkerTemplate", {})
    templates = [spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")]
    return [Pod(document, each["metadata"]["labels"], each["spec"]) for each in templates if each]


def _mpi_worker(document: Document) -> Pod:
    launcher, worker = (document["spec"]["mpiReplicaSpecs"][name]["template"] for name in ("Launcher", "Worker"))
    (starts,), (container,) = launcher["spec"]["containers"], worker["spec"]["containers"]
    started = {**container, **{name: starts[name] for name in ("command", "args", "env")}}
    policy = document["spec"]["mpiReplicaSpecs"]["Worker"].get("restartPolicy", "Always")
    spec = {**worker["spec"], "restartPolicy": policy, "containers": [started]}
    return Pod(document, worker["metadata"]["labels"], spec)


def _pods(manifest: Manifest) -> Iterator[Pod]:
    for document in manifest.documents:
        yield from pods_of(document)


def _ranks(manifest: Manifest) -> Iterator[Pod]:
    return (pod for pod in _pods(manifest) if pod.runs_ranks)


def _resources(container: Document) -> tuple[dict[str, str], dict[str, str]]:
    found = container.get("resources", {})
    return (
        {name: str(value) for name, value in found.get("requests", {}).items()},
        {name: str(value) for name, value in found.get("limits", {}).items()},
    )


def _bytes(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]i)?", quantity)
    assert match is not None, f"{quantity!r} is no number of bytes"
    return int(match[1]) * _UNITS.get(match[2] or "", 1)


def _fields(value: Any, name: str) -> Iterator[Any]:
    """Yield every value of a field, anywhere in a document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == name:
                yield from inner if isinstance(inner, list) else [inner]
            yield from _fields(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _fields(inner, name)


def host_network(manifest: Manifest) -> Iterator[str]:
    """With hostNetwork, names of Services need one dnsPolicy, and the host name of a pod is that of its node."""
    for pod in _pods(manifest):
        if not pod.spec.get("hostNetwork"):
            continue
        if pod.spec.get("dnsPolicy") != "ClusterFirstWithHostNet":
            yield "hostNetwork needs dnsPolicy ClusterFirstWithHostNet"
        if pod.kind == "StatefulSet" and pod.option("--nixl-rank") is None:
            yield "with hostNetwork no pod has its ordinal as its host's name: --nixl-rank is needed"


def huge_pages(manifest: Manifest) -> Iterator[str]:
    """Requests and limits of huge pages are equal, and the pages are mounted."""
    for pod in _pods(manifest):
        mediums = {
            volume["name"]: volume.get("emptyDir", {}).get("medium", "") for volume in pod.spec.get("volumes", ())
        }
        for container in pod.containers:
            requests, limits = _resources(container)
            for name in sorted({*requests, *limits}):
                if not name.startswith("hugepages-"):
                    continue
                if requests.get(name) != limits.get(name):
                    yield f"{name}: requests and limits differ"
                mounted = {mediums.get(mount["name"], "") for mount in container.get("volumeMounts", ())}
                if not mounted & {"HugePages", name.replace("hugepages", "HugePages")}:
                    yield f"{name} is in no volume that is mounted"


def devices(manifest: Manifest) -> Iterator[str]:
    """Requests and limits of an extended resource are equal."""
    for pod in _pods(manifest):
        for container in pod.containers:
            requests, limits = _resources(container)
            for name in sorted({*requests, *limits}):
                if "/" in name and requests.get(name) != limits.get(name):
                    yield f"{name}: requests and limits differ"


def ranks(manifest: Manifest) -> Iterator[str]:
    """The number of pods is the number of ranks, and they form one group."""
    for pod in _ranks(manifest):
        spec, asked = pod.owner["spec"], pod.option("--nixl-ranks")
        if pod.kind in ("Job", JOB_SET):
            started = {str(spec.get("completions")), str(spec.get("parallelism"))}
        elif pod.kind == MPI_JOB:
            started = {str(spec["mpiReplicaSpecs"]["Worker"].get("replicas"))}
            asked = asked or dict(pairwise(pod.arguments)).get("-n")
        elif pod.kind == LEADER_WORKER_SET:
            started = {str(spec["leaderWorkerTemplate"]["size"])}
            asked = asked or str(spec["leaderWorkerTemplate"]["size"])
            if spec.get("replicas") != 1:
                yield "each replica of a LeaderWorkerSet is another group: one is needed"
        else:
            started = {str(spec.get("replicas"))}
        if started != {asked}:
            yield f"--nixl-ranks={asked}, and {' and '.join(sorted(started))} pods are started"


def jobs(manifest: Manifest) -> Iterator[str]:
    """A Job is indexed, restarts nothing and has a deadline."""
    for document in (job for each in manifest.documents for job in jobs_of(each)):
        spec = document["spec"]
        if spec.get("completionMode") != "Indexed":
            yield "a Job's pods know their rank with completionMode Indexed only"
        if 0 not in (spec.get("backoffLimit"), spec.get("backoffLimitPerIndex")):
            yield "a failed rank would be tried again: backoffLimitPerIndex or backoffLimit must be 0"
        if "activeDeadlineSeconds" not in spec:
            yield "a Job needs activeDeadlineSeconds"


def sets(manifest: Manifest) -> Iterator[str]:
    """Sets start all ranks at once, and do not replace them one by one."""
    for document in manifest.documents:
        spec = document.get("spec", {})
        if document["kind"] == "StatefulSet":
            if spec.get("podManagementPolicy") != "Parallel":
                yield "a StatefulSet starts rank 1 before rank 0 is ready with podManagementPolicy Parallel only"
            if spec.get("updateStrategy", {}).get("type") != "OnDelete":
                yield "a StatefulSet would exchange one rank at a time: updateStrategy must be OnDelete"
        if document["kind"] == LEADER_WORKER_SET:
            group = spec.get("leaderWorkerTemplate", {})
            unknown = {*spec} - _SET_FIELDS | {*group} - _GROUP_FIELDS
            if unknown:
                yield f"a LeaderWorkerSet has no field {', '.join(sorted(unknown))}"
            if spec.get("startupPolicy") != "LeaderCreated":
                yield "the workers would wait for a leader that waits for them: startupPolicy must be LeaderCreated"
            if group.get("restartPolicy") != "None":
                yield "one restart would make all pods anew: restartPolicy of the group must be None"


def controllers(manifest: Manifest) -> Iterator[str]:
    """JobSets and MPIJobs have known fields, start one group once, and name the rank that serves the etcd."""
    for document in manifest.documents:
        spec = document.get("spec", {})
        if document["kind"] == JOB_SET:
            yield from _job_set(document)
        if document["kind"] == MPI_JOB:
            if unknown := {*spec} - _MPI_FIELDS:
                yield f"an MPIJob has no field {', '.join(sorted(unknown))}"
            if spec.get("runPolicy", {}).get("backoffLimit") != 0:
                yield "a failed run would be started again: backoffLimit must be 0"
            if "activeDeadlineSeconds" not in spec.get("runPolicy", {}):
                yield "an MPIJob needs activeDeadlineSeconds"
            if spec.get("slotsPerWorker") != 1:
                yield "each worker is one rank: slotsPerWorker must be 1"


def _job_set(document: Document) -> Iterator[str]:
    spec, network = document["spec"], document["spec"].get("network", {})
    if unknown := {*spec} - _JOB_SET_FIELDS:
        yield f"a JobSet has no field {', '.join(sorted(unknown))}"
    if spec.get("failurePolicy", {}).get("maxRestarts") != 0:
        yield "a failed run would be started again: maxRestarts must be 0"
    if not network.get("enableDNSHostnames") or not network.get("publishNotReadyAddresses"):
        yield "the ranks have no names before they are ready: enableDNSHostnames and publishNotReadyAddresses"
    for job, pod in zip(_replicated(document), pods_of(document), strict=True):
        if job.get("replicas") != 1:
            yield "each replica of a replicatedJob is another run: one is needed"
        rank0 = f"{document['metadata']['name']}-{job['name']}-0-0.{network.get('subdomain')}"
        said = {each["name"]: each.get("value") for each in pod.containers[0].get("env", ())}.get("MASTER_ADDR")
        if said != rank0:
            yield f"MASTER_ADDR is {said}, and rank 0 is {rank0}"


def restarts(manifest: Manifest) -> Iterator[str]:
    """The pods of a Job never restart. Those of a set always restart and have no deadline: Kubernetes requires both."""
    for pod in _pods(manifest):
        policy = pod.spec.get("restartPolicy", "Always")
        if pod.kind in ("Job", JOB_SET, MPI_JOB):
            if policy != "Never":
                yield f"a {pod.kind}'s restartPolicy must be Never"
            continue
        if policy != "Always":
            yield f"a {pod.kind}'s pods have restartPolicy Always"
        if "activeDeadlineSeconds" in pod.spec:
            yield f"a {pod.kind}'s pods can have no activeDeadlineSeconds"


def services(manifest: Manifest) -> Iterator[str]:
    """Services that name pods exist, are headless and select these pods. The Service of the etcd has its port."""
    found = {each["metadata"]["name"]: each["spec"] for each in manifest.known if each["kind"] == "Service"}
    for pod in _ranks(manifest):
        named = {pod.spec.get("subdomain"), pod.owner["spec"].get("serviceName")} - {None}
        for name in sorted(named):
            service = found.get(name)
            if service is None:
                yield f"there is no Service {name}"
                continue
            if service.get("clusterIP") != "None":
                yield f"Service {name} is not headless"
            if not service.get("selector", {}).items() <= pod.labels.items():
                yield f"Service {name} does not select the pods"
            if not service.get("publishNotReadyAddresses"):
                yield f"Service {name} hides the ranks until they are ready"
        if pod.kind in ("Job", "StatefulSet") and not named:
            yield "the pods have no names: subdomain or serviceName is missing"
        yield from _etcd(pod, found, manifest)


def _etcd(pod: Pod, found: Mapping[str, Document], manifest: Manifest) -> Iterator[str]:
    if (url := pod.option("--nixl-etcd")) is None:
        return
    host, _, port = url.removeprefix("http://").partition(":")
    service = found.get(host)
    if service is None or port not in {str(each["port"]) for each in service["ports"]}:
        yield f"--nixl-etcd={url} is no Service and port of these manifests"
    elif not any(
        service["selector"].items() <= each.labels.items() for document in manifest.known for each in pods_of(document)
    ):
        yield f"Service {host} selects no pods"


def references(manifest: Manifest) -> Iterator[str]:
    """Objects that pods refer to are defined, or the comment at the top contains the command that makes them."""
    defined = {(each["kind"], each["metadata"]["name"]) for each in manifest.known}
    for pod in _pods(manifest):
        wanted = [("Secret", each["name"]) for each in _fields(pod.spec, "secretKeyRef")]
        wanted += [("ConfigMap", each["name"]) for each in _fields(pod.spec, "configMapKeyRef")]
        wanted += [("PersistentVolumeClaim", name) for name in _fields(pod.spec, "claimName")]
        for kind, name in wanted:
            if (kind, name) not in defined and not re.search(
                rf"\b{kind.lower()} .*\b{re.escape(name)}\b", manifest.header
            ):
                yield f"{kind} {name} is neither defined nor named in the header"


def selectors(manifest: Manifest) -> Iterator[str]:
    """A document that makes pods selects them."""
    for pod in _pods(manifest):
        wanted = pod.owner["spec"].get("selector", {}).get("matchLabels", {})
        if not wanted.items() <= pod.labels.items():
            yield f"{pod.kind} {pod.owner['metadata']['name']} does not select its own pods"


def one_on_a_node(manifest: Manifest) -> Iterator[str]:
    """No two ranks run on the same node."""
    for pod in _ranks(manifest):
        affinity = pod.spec.get("affinity", {}).get("podAntiAffinity", {})
        terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", ())
        if not any(
            term["topologyKey"] == "kubernetes.io/hostname"
            and term["labelSelector"]["matchLabels"].items() <= pod.labels.items()
            for term in terms
        ):
            yield "two ranks may come to one node: podAntiAffinity does not select the pods themselves"


def volumes(manifest: Manifest) -> Iterator[str]:
    """Mounted volumes exist, /dev/shm is in memory, and the memory limit has room for all volumes in memory."""
    for pod in _pods(manifest):
        there = {volume["name"]: volume for volume in pod.spec.get("volumes", ())}
        for container in pod.containers:
            mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", ())}
            for name in sorted({*mounts.values()} - {*there}):
                yield f"there is no volume {name}"
            inside = [there.get(name, {}).get("emptyDir", {}) for name in mounts.values()]
            sizes = [each.get("sizeLimit") for each in inside if each.get("medium") == "Memory"]
            if None in sizes:
                yield "a volume in memory has no sizeLimit"
            limit = _resources(container)[1].get("memory", "0")
            if sum(_bytes(size) for size in sizes if size) >= _bytes(limit):
                yield f"volumes in memory may take all of the container's {limit}"
            shm = there.get(mounts.get("/dev/shm", ""), {}).get("emptyDir", {})
            if pod.runs_ranks and shm.get("medium") != "Memory":
                yield "/dev/shm has 64 MiB: mount an emptyDir of medium Memory there"


def locked_memory(manifest: Manifest) -> Iterator[str]:
    """A rank may lock memory: it has IPC_LOCK and runs as root, for whom alone IPC_LOCK has an effect."""
    for pod in _ranks(manifest):
        for container in pod.containers:
            context = container.get("securityContext", {})
            if "IPC_LOCK" not in context.get("capabilities", {}).get("add", ()) or context.get("runAsUser") != 0:
                yield "a rank needs the capability IPC_LOCK, and runAsUser 0 for it to have effect"


def variables(manifest: Manifest) -> Iterator[str]:
    """Every ``$(NAME)`` refers to a variable that is set, and Services add no variables."""
    for pod in _pods(manifest):
        if pod.spec.get("enableServiceLinks") is not False:
            yield "Services would put variables such as NIXL_ETCD_PORT into the environment: enableServiceLinks: false"
        for container in pod.containers:
            there = {each["name"] for each in container.get("env", ())} | _INJECTED
            words = " ".join(container.get("args", ()))
            for name in sorted(set(re.findall(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", words)) - there):
                yield f"$({name}) is no variable of the container"


def image(manifest: Manifest) -> Iterator[str]:
    """NIXL_IMAGE, which goes into the records, is the image that runs."""
    for pod in _ranks(manifest):
        for container in pod.containers:
            said = {each["name"]: each.get("value") for each in container.get("env", ())}.get("NIXL_IMAGE")
            if said != container["image"]:
                yield f"NIXL_IMAGE is {said}, and the image {container['image']}"


def results(manifest: Manifest) -> Iterator[str]:
    """Ranks write their results to a separate directory for each run, on a volume that outlives them."""
    for pod in _ranks(manifest):
        kept = {volume["name"] for volume in pod.spec.get("volumes", ()) if "persistentVolumeClaim" in volume}
        for container in pod.containers:
            places = [each["mountPath"] for each in container.get("volumeMounts", ()) if each["name"] in kept]
            for flag in ("--nixl-log-dir", "--nixl-store", "--junitxml"):
                path = pod.option(flag) or ""
                if not any(path.startswith(f"{place}/") for place in places):
                    yield f"{flag}={path} is on no volume that outlives the pod"
                elif flag != "--nixl-store" and "$(RUN)" not in path:
                    yield f"{flag}={path}: a later run would find the results of an earlier one"


def enums(manifest: Manifest) -> Iterator[str]:
    """Fields with a fixed set of words have one of them. The schemas do not check this."""
    for document in manifest.documents:
        for name, allowed in ENUMS.items():
            for value in _fields(document, name):
                if isinstance(value, str) and value not in allowed:
                    yield f"{name}: {value} is none of {', '.join(sorted(allowed - {''}))}"


RULES: tuple[Callable[[Manifest], Iterator[str]], ...] = (
    host_network, huge_pages, devices, ranks, jobs, sets, controllers, restarts, services, references, selectors,
    one_on_a_node, volumes, locked_memory, variables, image, results, enums,
)  # fmt: skip


def complaints(manifest: Manifest) -> list[tuple[str, str]]:
    """Return the violations of each rule, with the name of the rule."""
    return [(rule.__name__, sentence) for rule in RULES for sentence in rule(manifest)]
