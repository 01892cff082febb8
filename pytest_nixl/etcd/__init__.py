# SPDX-License-Identifier: Apache-2.0
"""Speak to an etcd: endpoints, client, transactions, and a proxy that can disturb requests. Imports core and model."""
