# SPDX-License-Identifier: Apache-2.0
"""How long does what agents do before and around transfers take?"""
