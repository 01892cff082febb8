# SPDX-License-Identifier: Apache-2.0
"""The profiles of a site: each .toml file here is one, by its name."""
