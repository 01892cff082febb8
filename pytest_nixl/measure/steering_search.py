# SPDX-License-Identifier: Apache-2.0
"""Find the variables that keep bytes from arriving, by trying smaller and smaller sets of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

#: Variables that steer NIXL, its libraries, or what the loader gives them.
_STEERING = re.compile(
    r"(?:UCX|NIXL|FI|OFI|CUDA|NVIDIA|RDMAV|IBV|MLX5|EFA|GDRCOPY)_\w+|GLIBC_TUNABLES|LD_PRELOAD|LD_LIBRARY_PATH"
)
#: Workers that move bytes never have these.
_UNUSED = re.compile(r"NIXL_ETCD_\w+")
#: Variables without which NIXL or its libraries may not be there at all.
SEARCH_PATHS = frozenset({"LD_LIBRARY_PATH", "NIXL_PLUGIN_DIR", "UCX_MODULE_DIR", "FI_PROVIDER_PATH"})


def steering_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the variables that steer NIXL, in alphabetical order."""
    return tuple(sorted(name for name in environ if _STEERING.fullmatch(name) and not _UNUSED.fullmatch(name)))


class SearchEndedError(Exception):
    """There is no time for another attempt."""


def smallest_set(names: Sequence[str], suffices: Callable[[frozenset[str]], bool]) -> tuple[str, ...]:
    """Return a set of names that suffices and of which none can be left out, by delta debugging.

    :param names: names that suffice together.
    :param suffices: returns whether a set of them does; it is not asked twice about the same set. If it raises
        :class:`SearchEndedError`, the smallest set so far is returned, which may be larger than necessary.
    """
    answers: dict[frozenset[str], bool] = {}
    ended = False

    def ask(part: Sequence[str]) -> bool:
        nonlocal ended
        key = frozenset(part)
        if key not in answers and not ended:
            try:
                answers[key] = suffices(key)
            except SearchEndedError:
                ended = True
        return answers.get(key, False)

    candidates, count = tuple(names), 2
    while len(candidates) > 1 and not ended:
        parts = [
            candidates[len(candidates) * number // count : len(candidates) * (number + 1) // count]
            for number in range(count)
        ]
        rests = [tuple(name for name in candidates if name not in part) for part in parts] if count > 2 else []
        smaller = next(filter(ask, [*parts, *rests]), None)
        if smaller is not None:
            count = max(count - 1, 2) if smaller in rests else 2
            candidates = smaller
        elif count < len(candidates):
            count = min(2 * count, len(candidates))
        else:
            break
    return candidates


def find_culprits(
    names: Iterable[str], moves_without: Callable[[frozenset[str]], bool]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the smallest set of variables without which bytes arrive, and what is a fault only together with it.

    :param names: variables without which bytes arrive, though they do not arrive with all of them.
    :param moves_without: returns whether bytes arrive if these variables are not set; it raises
        :class:`SearchEndedError` if there is no time for another attempt.
    """
    every = tuple(names)
    culprits = smallest_set(every, moves_without)
    remaining = tuple(name for name in every if name not in culprits)
    try:
        if not remaining or not moves_without(frozenset(remaining)):
            return culprits, ()
    except SearchEndedError:
        return culprits, ()
    # The culprits alone are harmless: find the others that make them a fault.
    partners = smallest_set(remaining, lambda part: not moves_without(frozenset(remaining) - part))
    return culprits, partners
