# SPDX-License-Identifier: Apache-2.0
"""Fixtures: an etcd with a prefix of the test's own, an etcd to break, and a client of the etcd3 package."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_nixl.etcd.client import EtcdClient
    from pytest_nixl.etcd.path import EtcdPath
    from pytest_nixl.etcd.servers import EtcdServer, OwnServer, SessionEtcd
    from pytest_nixl.settings import Settings


@dataclass(frozen=True)
class EtcdFixture:
    """An etcd, and a prefix in it that nobody else uses."""

    #: Its URLs, as ``NIXL_ETCD_ENDPOINTS`` wants them.
    endpoint: str
    client: EtcdClient
    #: Ends with a slash; every key under it is deleted at the end.
    prefix: str
    server: EtcdServer


@dataclass(frozen=True)
class PrivateEtcd:
    """An etcd that only this test uses, and that it may stop, kill and restart."""

    server: OwnServer
    client: EtcdClient

    @property
    def endpoint(self) -> str:
        """Its URL; the same after a restart."""
        return self.server.endpoint

    def stop(self) -> None:
        """End it gracefully; its data stays."""
        self.server.stop()

    def kill(self) -> None:
        """End it by SIGKILL; its data stays."""
        self.server.kill()

    def restart(self) -> None:
        """Start it again, on the same port and with the same data."""
        self.server.restart()


@pytest.fixture(scope="session")
def nixl_etcd_server(nixl_settings: Settings, pytestconfig: pytest.Config) -> Iterator[SessionEtcd]:
    """The etcd of this session; ``.server()`` starts it when first called. Several ranks have that of their group."""
    from pytest_nixl.etcd.servers import SessionEtcd
    from pytest_nixl.keeper import keeper
    from pytest_nixl.run import Run

    party = Run.of(pytestconfig).party
    session = SessionEtcd(nixl_settings, keeper, party.agents_etcd() if party is not None else None)
    yield session
    session.close()


@pytest.fixture
def nixl_etcd(nixl_etcd_server: SessionEtcd, request: pytest.FixtureRequest) -> Iterator[EtcdFixture]:
    """An etcd with a client and an unused prefix, which is deleted at the end, also after ``kill -9`` of pytest."""
    from pytest_nixl.etcd.endpoints import parse_endpoints
    from pytest_nixl.etcd.errors import EtcdError
    from pytest_nixl.etcd.servers import ExternalServer
    from pytest_nixl.keeper import keeper

    server = nixl_etcd_server.server()
    prefix = f"/pytest-nixl/{secrets.token_hex(8)}/{re.sub(r'[^A-Za-z0-9._-]+', '-', request.node.name)}/"
    endpoints = server.endpoints if isinstance(server, ExternalServer) else parse_endpoints(server.endpoint)
    credentials: dict[str, Any] = server.credentials if isinstance(server, ExternalServer) else {}
    own_keeper = keeper()
    own_keeper.watch_prefix(prefix, endpoints, **credentials)
    with server.client() as client:
        # An etcd that does not answer is found here, and not in the middle of the test.
        client.count_prefix(prefix)
        yield EtcdFixture(server.endpoint, client, prefix, server)
        try:
            nixl_etcd_server.check()
        except EtcdError:
            # The prefix has died with its etcd.
            own_keeper.unwatch_prefix(prefix, endpoints)
            raise
        client.delete_prefix(prefix)
        own_keeper.unwatch_prefix(prefix, endpoints)


@pytest.fixture
def nixl_private_etcd(nixl_settings: Settings) -> Iterator[PrivateEtcd]:
    """An etcd for this test alone, to be stopped, killed and restarted."""
    from pytest_nixl.etcd.servers import start_private
    from pytest_nixl.keeper import keeper

    server = start_private(nixl_settings, keeper())
    try:
        with server.client() as client:
            yield PrivateEtcd(server, client)
    finally:
        server.discard()


@pytest.fixture
def nixl_etcd_path() -> Iterator[Callable[[str], EtcdPath]]:
    """Open a path to the etcd with the given URL, which counts, holds, cuts and loses requests; it ends with the test.

    ``client = nixl_etcd_path(nixl_etcd.endpoint).client("agent")``: who is given ``client.endpoint`` goes that way, and
    ``client.requests`` tells what it asked. Of several URLs the path goes to the first one.
    """
    from pytest_nixl.etcd.path import EtcdPath

    with ExitStack() as opened:
        yield lambda endpoint: opened.enter_context(EtcdPath(endpoint.split(",")[0]))


@pytest.fixture
def etcd3_client(nixl_etcd: EtcdFixture) -> Iterator[Any]:
    """A client of the package ``etcd3`` on the session's etcd; skips with the reason where that cannot be imported."""
    from pytest_nixl.etcd.endpoints import parse_endpoints
    from pytest_nixl.etcd.servers import ExternalServer

    etcd3 = _import_etcd3()
    first = parse_endpoints(nixl_etcd.client.endpoint)[0]
    server = nixl_etcd.server
    options: dict[str, Any] = {}
    if isinstance(server, ExternalServer):
        given = server.credentials
        options = {"ca_cert": given["cacert"], "cert_cert": given["cert"], "cert_key": given["key"]}
        options |= {"user": given["user"] or next((e.user for e in server.endpoints if e.user), "")}
        options |= {"password": given["password"] or next((e.password for e in server.endpoints if e.user), "")}
    client = etcd3.client(host=first.host, port=first.port, **{name: value for name, value in options.items() if value})
    yield client
    client.close()


def _import_etcd3() -> Any:
    try:
        import etcd3
    except ModuleNotFoundError as error:
        if error.name == "etcd3":
            pytest.skip("etcd3 is not installed: `pip install 'pytest-nixl[etcd3]'`")
        pytest.skip(f"etcd3 cannot be imported: {error}")
    except Exception as error:
        # Whatever an old package raises in a new environment; the reason is what the user needs.
        first_line = (str(error).splitlines() or [""])[0]
        why = f"etcd3 cannot be imported: {type(error).__name__}: {first_line}"
        if "Descriptors cannot" in first_line:
            why += " (etcd3 0.12.0 needs protobuf <= 3.20, and a newer one is installed)"
        pytest.skip(why)
    return etcd3
