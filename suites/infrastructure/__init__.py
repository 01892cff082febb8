# SPDX-License-Identifier: Apache-2.0
"""Is anything wrong with this machine: libraries, limits, devices, network, GPUs, environment?"""
