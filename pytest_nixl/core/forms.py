# SPDX-License-Identifier: Apache-2.0
"""The accepted forms of values in words, for help texts and error messages.

They are apart from the parsers, because pytest needs the help texts in every project in which the plugin is installed.
"""

from __future__ import annotations

SIZE_FORM = "a number of bytes with an optional unit B, KiB, MiB, GiB (or K, M, G for the same; KB, MB, GB are decimal)"
RATE_FORM = "a number with a unit GB/s, MB/s, GiB/s, Gb/s or Mb/s"
TIME_FORM = "a number with a unit ns, us, ms, s, min or h"
LEASE_FORM = "whole seconds from 2s to 1h, such as 30s or 5min"
FREQUENCY_FORM = 'a number a second with the unit /s, such as "10000/s"'
COUNT_FORM = 'a number in quotes without a unit, such as "0.5"'
BLOCKS_FORM = "a range A..B that doubles from A to B (4KiB..64MiB), or a list A,B,C"

LISTEN_FORM = "ADDR:PORT, such as 0.0.0.0:23790"
S3_FORM = "http://HOST[:PORT], https://HOST[:PORT], embedded, container, or container:IMAGE"
ENDPOINTS_FORM = "URL[,URL] where URL is http://HOST:PORT or https://HOST:PORT, with no path and no trailing slash"

DEVICES_FORM = "INITIATOR:TARGET as GPU numbers, or auto"
MEMORY_FORM = "INITIATOR:TARGET with DRAM or VRAM, and FILE or OBJ as the target of a storage backend"
PAIRING_FORM = "first (rank 0 with every other rank), ring (each rank with the next), all, or pairs such as 0:1,2:3"
PATTERN_FORM = (
    "pairs, incast, outcast or alltoall, each also with a number of ranks as in incast:8, or the path of a traffic "
    "matrix of kvbench"
)

NIXLBENCH_ARGUMENTS_FORM = (
    "flags of nixlbench as on its command line, such as '--mode=MG --num_initiator_dev=8 --num_target_dev=8'"
)
LEVELS_FORM = "quick, standard or extended, or 1, 2 or 3 for the same"

NOTIFY_FORM = "each | last"
FOOTPRINT_FORM = "row, auto, or a size such as 1GiB"

AGENTS_FORM = "default | vllm | dynamo | sglang"
PROGRESS_THREAD_FORM = "auto, off, on, or off,on for both"
SYNC_MODES_FORM = "auto | none | strict | rw"
THREADS_FORM = "an integer from 1 to 256, INITIATOR:TARGET where one of the two may be 0, or none"
BACKEND_PARAMS_FORM = (
    "BACKEND:NAME=VALUE with UCX, LIBFABRIC, POSIX, OBJ or AZURE_BLOB, such as UCX:num_workers=4, or a list of them"
)

KV_MODEL_NAMES = (
    "generic", "llama-3-8b", "llama-3-70b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b",
    "deepseek-r1", "gpt-oss-20b", "gpt-oss-120b",
)  # fmt: skip
KV_MODEL_FORM = f"{', '.join(KV_MODEL_NAMES)}, or the path of a Hugging Face config.json"
KV_DTYPES_FORM = "auto | bf16 | fp16 | fp32 | fp8 | int8"
