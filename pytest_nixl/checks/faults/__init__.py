# SPDX-License-Identifier: Apache-2.0
"""What does NIXL do when a peer dies, stops or comes back, and when a program makes a mistake?"""
