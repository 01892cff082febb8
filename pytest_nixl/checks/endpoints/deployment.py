# SPDX-License-Identifier: Apache-2.0
"""The endpoints that a deployment uses, and the judgement of each check on them."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pytest_nixl.checks.endpoints.trial import SILENCE, complaint
from pytest_nixl.etcd.client import Credentials, EtcdClient, connect
from pytest_nixl.etcd.endpoints import Endpoint, parse_endpoints
from pytest_nixl.etcd.errors import EtcdError, speaks_http, speaks_tls
from pytest_nixl.etcd_servers.sources import credentials_of
from pytest_nixl.model.settings import Settings
from pytest_nixl.model.tools import own_variables
from pytest_nixl.model.verdicts import Judgement, Verdict
from pytest_nixl.nixl.agent import Agents
from pytest_nixl.nixl.backends import between_agents
from pytest_nixl.nixl.endpoint_explanation import Explanation, explain
from pytest_nixl.nixl.endpoint_reading import Address, suppose
from pytest_nixl.processes.hosts import LocalHost
from pytest_nixl.processes.supervisor import SupervisorClient
from pytest_nixl.processes.worker_errors import WorkerError

#: Timeout of a TCP connection to an endpoint in seconds.
CONNECT_SECONDS = 3.0
UNREADABLE = "no address can be read from it: see endpoints-well-formed"
PROXY_REMEDY = (
    "run `etcd grpc-proxy start --endpoints https://… --cacert … --cert … --key … --listen-addr 127.0.0.1:2379` on "
    "each agent's host and set NIXL_ETCD_ENDPOINTS=http://127.0.0.1:2379"
)

#: A member of a list that etcdctl reads, too: an address in brackets or a name, but not 127.1. It drops the others.
_ETCDCTL_MEMBER = re.compile(
    r"\s*(?i:https?://)?(?:\[[^\[\]]+\]|(?!\d+(?:\.\d+){0,2}:)[\w.-]+):0*[1-9]\d*\s*", re.ASCII
)


@dataclass(frozen=True)
class Deployment:
    """Endpoints as NIXL gets them.

    :param source: where they come from: a variable, an option, or the etcd of this run.
    :param text: the value itself, which may contain a password.
    :param explanation: how NIXL and other programs read the value.
    :param credentials: credentials of pytest-nixl's own client.
    """

    source: str
    text: str = field(repr=False)
    explanation: Explanation
    credentials: Credentials = field(repr=False, default_factory=Credentials)

    @classmethod
    def of(cls, settings: Settings, our_name: str) -> Deployment:
        """Read the settings. ``our_name`` is the endpoint of this run's etcd, used if the settings name none."""
        source = settings.sources.get("etcd", "")
        if settings.etcd:
            names = {"option": "--nixl-etcd", "ini": "the ini value nixl_etcd"}
            name = names.get(source, source.removeprefix("environment "))
            return cls(name, settings.etcd, explain(settings.etcd), credentials_of(settings))
        if is_set_and_empty(settings):
            return cls("NIXL_ETCD_ENDPOINTS", "", explain(""))
        return cls("the etcd of this run", our_name, explain(our_name))

    def __str__(self) -> str:
        return f"{self.source}={self.explanation.text}" if " " not in self.source else self.explanation.text

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return the endpoints for pytest-nixl's own client: as written, else as rewritten, else none.

        An https endpoint that speaks plaintext is used as http, unless a password would be sent to it.
        """
        for text in (self.text, self.explanation.rewrite):
            try:
                return tuple(self._as_served(endpoint) for endpoint in parse_endpoints(text))
            except ValueError:
                continue
        return ()

    def _as_served(self, endpoint: Endpoint) -> Endpoint:
        secret = endpoint.user or self.credentials.get("user")
        if endpoint.scheme == "https" and not secret and speaks_http(endpoint):
            return replace(endpoint, scheme="http")
        return endpoint


def is_set_and_empty(settings: Settings) -> bool:
    """Whether NIXL_ETCD_ENDPOINTS is set but empty, which NIXL treats differently from unset."""
    return not settings.etcd and os.environ.get("NIXL_ETCD_ENDPOINTS") == ""


def judge_form(deployment: Deployment) -> Judgement:
    """Judge only the form of the value: can NIXL read it? All host names count as resolving."""
    form = explain(deployment.text, suppose)
    remedy = f"in the deployment, {form.remedy}"
    if not form.nixl.works:
        return Judgement(Verdict.FAIL, f"{deployment}: {form.nixl.reason}", remedy)
    if not any(map(_ETCDCTL_MEMBER.fullmatch, deployment.text.split(","))):
        reason = f"{deployment}: NIXL reads it, but etcdctl does not: it needs [http://]HOST:PORT, and commas in a list"
        return Judgement(Verdict.WARN, reason, remedy)
    return Judgement(Verdict.PASS, f"{deployment}")


def judge_resolution(deployment: Deployment) -> Judgement:
    """Judge whether NIXL on this host resolves it to an address."""
    if not explain(deployment.text, suppose).nixl.works:
        return Judgement(Verdict.NOT_APPLICABLE, f"{deployment}: {UNREADABLE}")
    reading = deployment.explanation.nixl
    if not reading.works:
        remedy = f"{deployment.explanation.remedy}; check how this host resolves the name: getent ahostsv4 HOST"
        return Judgement(Verdict.FAIL, f"{deployment}: {reading.reason}", remedy)
    return Judgement(Verdict.PASS, f"{deployment}: {reading.reason}")


def judge_connection(deployment: Deployment) -> Judgement:
    """Judge whether every address that NIXL reads from it accepts a TCP connection."""
    contacts = deployment.explanation.nixl.contacts
    if not contacts:
        return Judgement(Verdict.NOT_APPLICABLE, f"{deployment}: NIXL reads no address from it")
    faults = {address: reason for address in contacts if (reason := _connection_fault(address))}
    if not faults:
        return Judgement(Verdict.PASS, f"{deployment}: {len(contacts)} of {len(contacts)} answer")
    private = deployment.explanation.private
    description = "; ".join(f"{'an address' if private else address}: {reason}" for address, reason in faults.items())
    remedy = "start that etcd, or correct host and port; if nothing answers, check firewalls and network policies"
    if len(faults) < len(contacts):
        return Judgement(
            Verdict.WARN, f"{deployment}: {len(faults)} of {len(contacts)} do not answer: {description}", remedy
        )
    return Judgement(Verdict.FAIL, f"{deployment}: {description}", remedy)


def _connection_fault(address: Address) -> str:
    try:
        socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS).close()
    except TimeoutError:
        return f"no connection within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def judge_health(deployment: Deployment) -> Judgement:
    """Judge whether each endpoint is a healthy etcd for pytest-nixl's own client and its credentials."""
    endpoints = deployment.endpoints()
    if not endpoints:
        return Judgement(Verdict.NOT_APPLICABLE, f"{deployment}: {UNREADABLE}")
    versions: dict[str, None] = {}
    errors: list[EtcdError] = []
    for endpoint in endpoints:
        try:
            with connect([endpoint], **deployment.credentials) as client:
                versions[client.version()] = None
        except EtcdError as error:
            errors.append(error)
    if errors:
        verdict = Verdict.WARN if versions else Verdict.FAIL
        description = "; ".join(dict.fromkeys(error.reason for error in errors))
        return Judgement(verdict, f"{deployment}: {len(errors)} of {len(endpoints)}: {description}", errors[0].remedy)
    return Judgement(Verdict.PASS, f"{deployment}: etcd {' and '.join(versions)}")


def judge_publication(deployment: Deployment, settings: Settings, supervisor: SupervisorClient) -> Judgement:
    """Give the unchanged value to a real agent that publishes its metadata, and look for the key.

    The agent uses a private namespace. Its keys are deleted afterwards, even after ``kill -9`` of pytest. NIXL refuses
    to publish an agent whose backends all move bytes to storage.
    """
    if not between_agents(settings.backend):
        names = ",".join(settings.backend)
        reason = f"--nixl-backend={names} moves bytes only to storage, and such agents have no metadata to publish"
        return Judgement(Verdict.NOT_APPLICABLE, reason)
    prefix = f"/pytest-nixl/{secrets.token_hex(8)}/publish/"
    endpoints = deployment.endpoints()
    if not endpoints:
        return _published(deployment, settings, supervisor, prefix, None)
    supervisor.watch_prefix(prefix, endpoints, **deployment.credentials)
    with connect(endpoints, **deployment.credentials) as client:
        try:
            return _published(deployment, settings, supervisor, prefix, client)
        finally:
            if not _unreachable(client, prefix):
                client.delete_prefix(prefix)
            supervisor.unwatch_prefix(prefix, endpoints)


def _unreachable(client: EtcdClient, prefix: str) -> bool:
    """Whether pytest-nixl's own client cannot reach the etcd either, so that there is nothing to delete."""
    try:
        client.count_prefix(prefix)
    except EtcdError:
        return True
    return False


def _published(
    deployment: Deployment, settings: Settings, supervisor: SupervisorClient, prefix: str, client: EtcdClient | None
) -> Judgement:
    environment = {"NIXL_ETCD_ENDPOINTS": deployment.text, "NIXL_ETCD_NAMESPACE": prefix.rstrip("/")}
    variables = own_variables(settings.programs, memory=settings.memory)
    with Agents(LocalHost(supervisor, own=variables), settings) as agents:
        try:
            agent = agents.start("publisher", environment=environment, listen_thread=True)
        except WorkerError as error:
            if "NIXL cannot create an agent: Config" not in error.reason:
                raise
            reason = f"{deployment}: {deployment.explanation.nixl.reason}: {error.reason}"
            return Judgement(Verdict.FAIL, reason, deployment.explanation.remedy)
        agent.register(agent.allocate(4096))
        agent.send_local_metadata()
        started = time.monotonic()
        if client is not None and _unreachable(client, prefix):
            client = None
        timeout = settings.timeout if client is not None and deployment.explanation.nixl.works else SILENCE
        while True:
            if client is not None and client.get(f"{prefix}publisher/metadata"):
                return Judgement(Verdict.PASS, f"{deployment}: an agent's metadata is in etcd")
            complaint_text = complaint(agent.worker.output(), agent.name)
            if complaint_text or time.monotonic() > started + timeout:
                return _unpublished(deployment, complaint_text)
            time.sleep(0.01)


def _unpublished(deployment: Deployment, condition: str) -> Judgement:
    reading = deployment.explanation.nixl
    from_nixl = f"NIXL wrote {condition!r}" if condition else "NIXL wrote nothing"
    reason = f"{deployment}: an agent published, but nothing is in etcd, and Python got no error: {from_nixl}"
    if not reading.works:
        return Judgement(Verdict.FAIL, f"{reason}; {reading.reason}", deployment.explanation.remedy)
    if "user name is empty" in condition:
        reason = f"{reason}; that etcd asks for a user and password, which NIXL cannot send"
        remedy = "give NIXL an etcd without authentication on a separate network; a grpc-proxy does not help here"
        return Judgement(Verdict.FAIL, reason, remedy)
    if any(speaks_tls(Endpoint("https", address.host, address.port)) for address in reading.contacts):
        reason = f"{reason}; that etcd speaks TLS, but NIXL speaks plaintext with any scheme"
        return Judgement(Verdict.FAIL, reason, PROXY_REMEDY)
    remedy = "see the checks endpoints-connect and endpoints-healthy, and the output of `pytest-nixl endpoint`"
    return Judgement(Verdict.FAIL, f"{reason}; {reading.reason}", remedy)


def notes_about(deployment: Deployment, finding: str) -> Sequence[str]:
    """Return the sentences in which the deployment's endpoints meet a finding."""
    return [note.text for note in deployment.explanation.nixl.notes if note.finding == finding]
