# SPDX-License-Identifier: Apache-2.0
"""The accepted forms, in words, of values that options and other inputs share.

They are apart from the parsers, because pytest needs the help texts in every project in which the plugin is installed.
"""

from __future__ import annotations

SIZE_FORM = "a number of bytes with an optional unit B, KiB, MiB, GiB (or K, M, G for the same; KB, MB, GB are decimal)"
RATE_FORM = "a number with a unit GB/s, MB/s, GiB/s, Gb/s or Mb/s"
TIME_FORM = "a number with a unit ns, us, ms, s, min or h"
FREQUENCY_FORM = 'a number a second with the unit /s, such as "10000/s"'
COUNT_FORM = 'a number in quotes without a unit, such as "0.5"'
BLOCKS_FORM = "a range A..B that doubles from A to B (4KiB..64MiB), or a list A,B,C"

LISTEN_FORM = "ADDR:PORT, such as 0.0.0.0:23790"
ENDPOINTS_FORM = "URL[,URL] where URL is http://HOST:PORT or https://HOST:PORT, with no path and no trailing slash"
MEMORY_FORM = "INITIATOR:TARGET with DRAM or VRAM, and FILE or OBJ as the target of a storage backend"

KV_MODEL_NAMES = (
    "generic",
    "llama-3-8b",
    "llama-3-70b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "deepseek-r1",
    "gpt-oss-20b",
    "gpt-oss-120b",
)
KV_MODEL_FORM = f"{', '.join(KV_MODEL_NAMES)}, or the path of a Hugging Face config.json"
#: A pattern of a host's name. No resolver takes a part that is empty or longer: Python's raises another error for it.
HOST_NAME = r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?"
