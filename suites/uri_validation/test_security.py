# SPDX-License-Identifier: Apache-2.0
"""Known defects of NIXL in handling endpoints, tested on private servers."""

from __future__ import annotations

import socket
import threading

import pytest

from pytest_nixl import (
    NixlAgent,
    NixlError,
    PrivateEtcd,
    ReadOutcome,
    Settings,
    parse_endpoints,
    supervisor,
    wait_until,
)
from pytest_nixl.checks.endpoints.trial import complaint, try_texts

from ..conftest import FindingFixture

#: First bytes of a connection with HTTP/2 in plaintext, and of a TLS handshake.
PLAINTEXT, TLS = b"PRI * HTTP/2.0", b"\x16\x03"


@pytest.mark.nixl_check("https-is-encrypted")
@pytest.mark.nixl_early
def test_https_is_encrypted(nixl_agent: NixlAgent, nixl_settings: Settings, finding: FindingFixture) -> None:
    """An agent with an https:// endpoint opens its connection with a TLS handshake."""
    with _Listener() as listener:
        nixl_agent.another(
            "speaker",
            backends=[],
            listen_thread=True,
            environment={"NIXL_ETCD_ENDPOINTS": f"https://127.0.0.1:{listener.port}", "NIXL_ETCD_NAMESPACE": "/https"},
        )
        first_bytes = wait_until(listener.heard, "an agent to speak to its etcd", seconds=nixl_settings.timeout)
    assert first_bytes.startswith((PLAINTEXT, TLS)), (
        f"the agent's first bytes are {first_bytes!r}, which is neither HTTP/2 nor TLS"
    )
    finding(
        "NIXL-ETCD-HTTPS-PLAINTEXT",
        first_bytes.startswith(PLAINTEXT),
        f"a connection to https:// begins with {first_bytes!r}",
    )


@pytest.mark.nixl_check("credentials-are-used")
@pytest.mark.nixl_early
def test_credentials_are_used(nixl_private_etcd: PrivateEtcd, nixl_settings: Settings, finding: FindingFixture) -> None:
    """An agent with a user and password in its endpoint reaches an etcd, even one that needs none."""
    bare = nixl_private_etcd.endpoint.removeprefix("http://")
    texts = {f"http://user:password@{bare}": ReadOutcome.INVALID}
    [trial] = try_texts(texts, nixl_private_etcd.client, nixl_settings, supervisor(), namespace="/trial")
    how = f"with http://user:password@… of a healthy etcd an agent {trial.outcome} and wrote {trial.message!r}"
    finding("NIXL-ETCD-CREDENTIALS-DROPPED", trial.outcome is not ReadOutcome.PUBLISHES, how)


@pytest.mark.nixl_check("unread-members-are-reported")
@pytest.mark.nixl_early
def test_a_member_that_cannot_be_read_is_reported(
    nixl_private_etcd: PrivateEtcd, nixl_agent: NixlAgent, nixl_settings: Settings, finding: FindingFixture
) -> None:
    """In a list with one malformed member, NIXL uses the other member and names the malformed one on stderr."""
    good, bad = nixl_private_etcd.endpoint, f"{nixl_private_etcd.endpoint}/"
    environment = {"NIXL_ETCD_ENDPOINTS": f"{bad},{good}", "NIXL_ETCD_NAMESPACE": "/members"}
    agent = nixl_agent.another("member", backends=[], listen_thread=True, environment=environment)
    wait_until(
        lambda: nixl_private_etcd.client.get("/members/member/") is not None,
        "an agent to use the good one of two members",
        seconds=nixl_settings.timeout,
        remedy=lambda: complaint(agent.worker.output(), agent.name),
    )
    (endpoint,) = parse_endpoints(good)
    named = [line for line in agent.worker.output().splitlines() if str(endpoint.port) in line]
    how = f"of two members, the first with a slash after its port, NIXL used the second and wrote {named or 'nothing'}"
    finding("NIXL-ETCD-MEMBER-DROPPED", not named, how)


@pytest.mark.nixl_check("failures-are-raised")
@pytest.mark.nixl_early
def test_a_failure_to_publish_is_raised(
    nixl_private_etcd: PrivateEtcd, nixl_agent: NixlAgent, nixl_settings: Settings, finding: FindingFixture
) -> None:
    """If NIXL cannot read an agent's endpoint, send_local_metadata() raises an error."""
    environment = {"NIXL_ETCD_ENDPOINTS": f"{nixl_private_etcd.endpoint}/", "NIXL_ETCD_NAMESPACE": "/silent"}
    agent = nixl_agent.another("silent", listen_thread=True, environment=environment)
    agent.register(agent.allocate(4096))
    raised = ""
    try:
        agent.send_local_metadata()
    except NixlError as error:
        raised = error.type_name
    stored = nixl_private_etcd.client.count_prefix("/silent/")
    assert not stored, "NIXL published through an endpoint with a slash after its port: see endpoints-conform"
    outcome = f"raised {raised}" if raised else "returned, but nothing is in etcd"
    how = f"with an endpoint that NIXL cannot read, send_local_metadata() {outcome}"
    finding("NIXL-ETCD-SILENT-FAILURE", not raised, how)


class _Listener:
    """A port on loopback that keeps the first bytes that any connection sends."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._heard = b""
        self._thread = threading.Thread(target=self._listen, daemon=True)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def heard(self) -> bytes:
        return self._heard

    def _listen(self) -> None:
        while not self._heard:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed: the test is over
            with connection:
                connection.settimeout(5)
                try:
                    self._heard = connection.recv(len(PLAINTEXT))
                except OSError:
                    continue

    def __enter__(self) -> _Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Only shutdown() wakes a thread in accept(); close() alone does not.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
