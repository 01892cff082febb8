# SPDX-License-Identifier: Apache-2.0
"""A proxy to an etcd that counts requests and can disturb them."""

from pytest_nixl.etcd.proxy.client import ProxyClient, ProxyError
from pytest_nixl.etcd.proxy.proxy import EtcdProxy
from pytest_nixl.etcd.proxy.request import Access, Request, State

__all__ = ["Access", "EtcdProxy", "ProxyClient", "ProxyError", "Request", "State"]
