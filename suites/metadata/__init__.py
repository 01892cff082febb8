# SPDX-License-Identifier: Apache-2.0
"""Do agents find each other, with and without etcd, after kills, restarts and outages?"""
