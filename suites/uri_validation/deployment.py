# SPDX-License-Identifier: Apache-2.0
"""The endpoints that a deployment uses, and a judgement of each question about them."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_nixl import (
    Agents,
    Endpoint,
    EtcdClient,
    EtcdError,
    Judgement,
    LocalHost,
    Settings,
    SupervisorClient,
    Verdict,
    WorkerError,
    parse_endpoints,
)
from pytest_nixl.checks.endpoints.trial import SILENCE, complaint
from pytest_nixl.etcd.client import connect
from pytest_nixl.etcd.errors import speaks_http, speaks_tls
from pytest_nixl.nixl.endpoint_readers import Address, Explanation, explain, suppose

#: Seconds that a TCP connection to an endpoint may take.
CONNECT_SECONDS = 3.0
UNREADABLE = "no address can be read of it: see endpoints-well-formed"
PROXY_REMEDY = (
    "run `etcd grpc-proxy start --endpoints https://… --cacert … --cert … --key … --listen-addr 127.0.0.1:2379` beside "
    "each agent and set NIXL_ETCD_ENDPOINTS=http://127.0.0.1:2379"
)  # fmt: skip


@dataclass(frozen=True)
class Deployment:
    """Endpoints, as NIXL is given them.

    :param source: where they are from: a variable, an option, or what stands for both.
    :param text: the text itself; it may hold a password.
    :param credentials: what our own client needs beside the endpoints.
    """

    source: str
    text: str = field(repr=False)
    explanation: Explanation
    credentials: Mapping[str, Any] = field(repr=False, default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, own: str) -> Deployment:
        """Read the settings; ``own`` is the endpoint of this run's etcd, for where none is given."""
        user, _, password = settings.etcd_user.partition(":")
        credentials = {
            "cacert": settings.etcd_cacert,
            "cert": settings.etcd_cert,
            "key": settings.etcd_key,
            "user": user,
            "password": password,
        }
        source = settings.sources.get("etcd", "")
        if settings.etcd:
            names = {"option": "--nixl-etcd", "ini": "the ini value nixl_etcd"}
            name = names.get(source, source.removeprefix("environment "))
            return cls(name, settings.etcd, explain(settings.etcd), credentials)
        if is_set_and_empty(settings):
            return cls("NIXL_ETCD_ENDPOINTS", "", explain(""))
        return cls("the etcd of this run", own, explain(own))

    def __str__(self) -> str:
        return f"{self.source}={self.explanation.text}" if " " not in self.source else self.explanation.text

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where our own client looks: the members as they are written, else as they ought to be; none where unclear.

        What is written https and speaks plaintext is taken for what it is, unless a password would go there.
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
    """Whether the deployment sets NIXL_ETCD_ENDPOINTS to nothing, which is not the same to NIXL as not setting it."""
    return not settings.etcd and os.environ.get("NIXL_ETCD_ENDPOINTS") == ""


def judge_form(deployment: Deployment) -> Judgement:
    """Judge the text alone: is it of a form that NIXL reads? Names count as resolving."""
    form = explain(deployment.text, suppose)
    remedy = f"in the deployment, {form.remedy}"
    if not form.nixl.works:
        return Judgement(Verdict.FAIL, f"{deployment}: {form.nixl.why}", remedy)
    if not form.etcdctl.works:
        return Judgement(Verdict.WARN, f"{deployment}: NIXL reads it, and etcdctl does not: {form.etcdctl.why}", remedy)
    for_kvbench = "" if form.kvbench.works else f" (NIXL's KV benchmark does not read it: {form.kvbench.why})"
    return Judgement(Verdict.PASS, f"{deployment}{for_kvbench}")


def judge_resolution(deployment: Deployment) -> Judgement:
    """Does NIXL make an address of it here, on this machine?"""
    if not explain(deployment.text, suppose).nixl.works:
        return Judgement(Verdict.NOT_APPLICABLE, f"{deployment}: {UNREADABLE}")
    reading = deployment.explanation.nixl
    if not reading.works:
        remedy = f"{deployment.explanation.remedy}; see what this machine makes of the name: getent ahostsv4 HOST"
        return Judgement(Verdict.FAIL, f"{deployment}: {reading.why}", remedy)
    return Judgement(Verdict.PASS, f"{deployment}: {reading.why}")


def judge_connection(deployment: Deployment) -> Judgement:
    """Does something answer TCP at every address that NIXL makes of it?"""
    contacts = deployment.explanation.nixl.contacts
    if not contacts:
        return Judgement(Verdict.NOT_APPLICABLE, f"{deployment}: NIXL makes no address of it")
    faults = {address: why for address in contacts if (why := _why_no_connection(address))}
    if not faults:
        return Judgement(Verdict.PASS, f"{deployment}: {len(contacts)} of {len(contacts)} answer")
    private = deployment.explanation.private
    said = "; ".join(f"{'an address' if private else address}: {why}" for address, why in faults.items())
    remedy = "start that etcd, or correct host and port; look for a firewall or network policy where nothing answers"
    if len(faults) < len(contacts):
        return Judgement(Verdict.WARN, f"{deployment}: {len(faults)} of {len(contacts)} do not answer: {said}", remedy)
    return Judgement(Verdict.FAIL, f"{deployment}: {said}", remedy)


def _why_no_connection(address: Address) -> str:
    try:
        socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS).close()
    except TimeoutError:
        return f"no connection within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def judge_health(deployment: Deployment) -> Judgement:
    """Is it an etcd, by its own word to our client, with the credentials that we are given?"""
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
        said = "; ".join(dict.fromkeys(error.reason for error in errors))
        return Judgement(verdict, f"{deployment}: {len(errors)} of {len(endpoints)}: {said}", errors[0].remedy)
    return Judgement(Verdict.PASS, f"{deployment}: etcd {' and '.join(versions)}")


def judge_publication(deployment: Deployment, settings: Settings, supervisor: SupervisorClient) -> Judgement:
    """Give the text, verbatim, to a real agent that publishes its metadata, and look for the key.

    Its namespace is a prefix of our own, which is deleted afterwards, also after ``kill -9`` of pytest.
    """
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
    """Whether our own client cannot see the keys either: nothing of ours is then there to delete."""
    try:
        client.count_prefix(prefix)
    except EtcdError:
        return True
    return False


def _published(
    deployment: Deployment, settings: Settings, supervisor: SupervisorClient, prefix: str, client: EtcdClient | None
) -> Judgement:
    environment = {"NIXL_ETCD_ENDPOINTS": deployment.text, "NIXL_ETCD_NAMESPACE": prefix.rstrip("/")}
    with Agents(LocalHost(supervisor), settings) as agents:
        try:
            agent = agents.start("publisher", environment=environment, listen_thread=True)
        except WorkerError as error:
            if "NIXL makes no agent: Config" not in error.reason:
                raise
            said = f"{deployment}: {deployment.explanation.nixl.why}: {error.reason}"
            return Judgement(Verdict.FAIL, said, deployment.explanation.remedy)
        agent.register(agent.allocate(4096))
        agent.send_local_metadata()
        started = time.monotonic()
        if client is not None and _unreachable(client, prefix):
            client = None
        patience = settings.timeout if client is not None and deployment.explanation.nixl.works else SILENCE
        while True:
            if client is not None and client.get(f"{prefix}publisher/metadata"):
                return Judgement(Verdict.PASS, f"{deployment}: an agent's metadata is in etcd")
            words = complaint(agent.worker.output(), agent.name)
            if words or time.monotonic() > started + patience:
                return _unpublished(deployment, words)
            time.sleep(0.01)


def _unpublished(deployment: Deployment, words: str) -> Judgement:
    reading = deployment.explanation.nixl
    said = f"NIXL wrote {words!r}" if words else "NIXL wrote nothing"
    reason = f"{deployment}: an agent published and nothing is in etcd, without an error in Python: {said}"
    if not reading.works:
        return Judgement(Verdict.FAIL, f"{reason}; {reading.why}", deployment.explanation.remedy)
    if "user name is empty" in words:
        reason = f"{reason}; that etcd asks for a user and password, and NIXL has no way to give one"
        remedy = "let NIXL have an etcd without authentication on a network of its own; a grpc-proxy does not help here"
        return Judgement(Verdict.FAIL, reason, remedy)
    if any(speaks_tls(Endpoint("https", address.host, address.port)) for address in reading.contacts):
        reason = f"{reason}; that etcd speaks TLS, and NIXL speaks plaintext whatever the scheme is"
        return Judgement(Verdict.FAIL, reason, PROXY_REMEDY)
    remedy = "see endpoints-connect and endpoints-healthy; compare with `pytest-nixl endpoint`"
    return Judgement(Verdict.FAIL, f"{reason}; {reading.why}", remedy)


def notes_about(deployment: Deployment, finding: str) -> Sequence[str]:
    """What of a known defect the deployment's endpoints meet."""
    return [note.text for note in deployment.explanation.nixl.notes if note.finding == finding]
