# SPDX-License-Identifier: Apache-2.0
"""Runs of several ranks: how the ranks meet in an etcd, exchange messages, and notice that one of them is gone."""
