# SPDX-License-Identifier: Apache-2.0
"""How long do agents take before and around transfers: creation, registration, metadata, connection, notifications?"""
