# SPDX-License-Identifier: Apache-2.0
"""Read the file in which NIXL's exporter BUFFER keeps the last events of an agent.

The layout is that of NIXL's own reader (``examples/python/telemetry_reader.py``, version 4; NIXL 1.4.1 to 1.5.1 write
it): a header, then a ring of events. NIXL adds an event for each registration and each error, and four for each
transfer.
"""

from __future__ import annotations

import struct
from collections import Counter

from pytest_nixl.core.errors import NotApplicableError
from pytest_nixl.core.strict import StrictError

VERSION = 4
#: Positions of the next write and read, version, expected version, number of places in the ring, and its mask.
_HEADER = struct.Struct("<QQIIQQ")
#: The type of an event, seven bytes that NIXL does not write, and the value.
_EVENT = struct.Struct("<B7xQ")
_MOST_PLACES = 1 << 20
#: The metrics by the number of their type, spelled as NIXL spells them.
EVENTS = (
    "agent_tx_bytes",
    "agent_rx_bytes",
    "agent_tx_requests_num",
    "agent_rx_requests_num",
    "agent_memory_registered",
    "agent_memory_deregistered",
    "agent_xfer_time",
    "agent_xfer_post_time",
    "agent_err_not_posted",
    "agent_err_invalid_param",
    "agent_err_backend",
    "agent_err_not_found",
    "agent_err_mismatch",
    "agent_err_not_allowed",
    "agent_err_repost_active",
    "agent_err_unknown",
    "agent_err_not_supported",
    "agent_err_remote_disconnect",
    "agent_err_canceled",
    "agent_err_no_telemetry",
    "agent_telemetry_events_dropped",
)


def read_event_buffer(data: bytes) -> dict[str, float]:
    """Return the sum of the values of each metric's events.

    :param data: the content of the file, of which nothing has been read by another reader.
    :raises NotApplicableError: another version of the format.
    :raises StrictError: it is not such a file.
    """
    if len(data) < _HEADER.size:
        raise StrictError(f"it has {len(data)} bytes: expected a header of {_HEADER.size}")
    end, start, version, _, places, mask = _HEADER.unpack_from(data)
    if version != VERSION:
        raise NotApplicableError(f"this NIXL writes version {version} of the event buffer: pytest-nixl reads {VERSION}")
    if not 0 < places <= _MOST_PLACES or mask != places - 1 or places & mask or max(end, start) >= places:
        raise StrictError(f"its header has {places} places, mask {mask}, and positions {start} to {end}")
    if len(data) != _HEADER.size + places * _EVENT.size:
        raise StrictError(f"it has {len(data)} bytes: expected {_HEADER.size + places * _EVENT.size}")
    sums: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))
    for place in range(start, end if end >= start else end + places):
        kind, value = _EVENT.unpack_from(data, _HEADER.size + (place & mask) * _EVENT.size)
        if kind >= len(EVENTS):
            raise StrictError(f"an event has the unknown type {kind}")
        sums[EVENTS[kind]] += value
    return {name: float(value) for name, value in sums.items()}
