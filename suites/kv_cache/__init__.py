# SPDX-License-Identifier: Apache-2.0
"""Do the requests that engines make for KV blocks move the right bytes: scattered, prepared once, each with a
notification?
"""
