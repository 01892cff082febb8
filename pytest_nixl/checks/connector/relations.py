# SPDX-License-Identifier: Apache-2.0
"""How the values of a field on two sides must be related: equal, different, divisible, or no loopback address."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from pytest_nixl.checks.connector.engine_fields import EngineSide, FieldValue
from pytest_nixl.model.verdicts import Verdict


@dataclass(frozen=True)
class SidePair:
    """The two sides that are compared.

    :param one_host: whether both run on one host.
    :param plugins: NIXL's plugins in the engine's image; None if they are not known.
    """

    prefill: EngineSide
    decode: EngineSide
    one_host: bool = False
    plugins: frozenset[str] | None = None

    @property
    def sides(self) -> tuple[EngineSide, EngineSide]:
        """Prefill and decode."""
        return self.prefill, self.decode

    def values(self, field: str) -> tuple[FieldValue, FieldValue]:
        """Return the values of a field. An engine that has no such field has one that is not readable."""
        absent = FieldValue("", is_set=False, is_readable=False)
        return self.prefill.values.get(field, absent), self.decode.values.get(field, absent)


@dataclass(frozen=True)
class Mismatch:
    """What is wrong with a field.

    :param reason: what the sides must do and do not, after both values were named.
    :param remedy: replaces the rule's remedy if it is not empty.
    :param slow: what makes the transfer slow although it works, for the last line; empty if nothing does.
    """

    reason: str
    remedy: str = ""
    verdict: Verdict = Verdict.FAIL
    slow: str = ""


#: Judges one field of a pair; None if nothing is wrong.
Relation = Callable[[SidePair, str], Mismatch | None]


def undecided(why: str, remedy: str = "") -> Mismatch:
    """Return a mismatch that may be none."""
    return Mismatch(why, remedy, Verdict.INCONCLUSIVE)


def unknown_value(pair: SidePair, field: str) -> Mismatch | None:
    """Return why a field cannot be judged because a value comes from somewhere else; None if both are known."""
    sides = zip(("prefill", "decode"), pair.values(field), strict=True)
    unknown = " and ".join(f"that of {name}" for name, value in sides if not value.is_known)
    return undecided(f"{unknown} is not in the file", f"write the value of {field} into the file") if unknown else None


def equal(normal: Callable[[str], str] = str.strip) -> Relation:
    """Return a relation for values that must be equal.

    :param normal: returns the one spelling of a value; empty if the engine chooses the value.
    """

    def judge(pair: SidePair, field: str) -> Mismatch | None:
        prefill, decode = pair.values(field)
        if normal(prefill.text) == normal(decode.text):
            return None
        if unknown := unknown_value(pair, field):
            return unknown
        if not all(normal(value.text) for value in (prefill, decode)):
            return undecided("they must be equal, and the engine chooses one of them", f"set {field} on both sides")
        return Mismatch("they must be equal")

    return judge


def different(pair: SidePair, field: str) -> Mismatch | None:
    """Judge values that must differ if both are set."""
    prefill, decode = pair.values(field)
    both = prefill.is_set and decode.is_set and prefill.text == decode.text
    return Mismatch("they must be different") if both else None


def one_of_each_side(role_of_prefill: tuple[str, ...], role_of_decode: tuple[str, ...]) -> Relation:
    """Return a relation for values that only certain texts may have on each side."""

    def judge(pair: SidePair, field: str) -> Mismatch | None:
        values = pair.values(field)
        if unknown := unknown_value(pair, field):
            return unknown
        allowed = (role_of_prefill, role_of_decode)
        if all(value.text in texts for value, texts in zip(values, allowed, strict=True)):
            return None
        prefill, decode = (" or ".join(filter(None, texts)) for texts in allowed)
        same = f"both must be {prefill}" if prefill == decode else f"prefill must be {prefill}, and decode {decode}"
        return Mismatch(same)

    return judge


def positive_integers(pair: SidePair, field: str) -> tuple[int, int] | Mismatch:
    """Return both values as positive integers, or what is wrong with them."""
    values = pair.values(field)
    if unknown := unknown_value(pair, field):
        return unknown
    numbers = [int(value.text) if value.text.isascii() and value.text.isdigit() else 0 for value in _short(values)]
    if not all(numbers):
        return Mismatch("each must be a positive number")
    return numbers[0], numbers[1]


def _short(values: tuple[FieldValue, FieldValue]) -> list[FieldValue]:
    return [value if len(value.text) < 10 else FieldValue("") for value in values]


def divisible(pair: SidePair, field: str) -> Mismatch | None:
    """Judge sizes of which the larger must be a multiple of the smaller."""
    sizes = positive_integers(pair, field)
    if isinstance(sizes, Mismatch):
        return sizes
    return Mismatch("the larger must be a multiple of the smaller") if max(sizes) % min(sizes) else None


def is_loopback(host: str) -> bool:
    """Return whether a host is this host's loopback address."""
    host = host.strip().lower().strip("[]").rstrip(".")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_unspecified(host: str) -> bool:
    """Return whether a host is the address on which a server listens for all, such as 0.0.0.0."""
    try:
        return ipaddress.ip_address(host.strip().strip("[]")).is_unspecified
    except ValueError:
        return False


def prefill_listens(pair: SidePair, field: str) -> Mismatch | None:
    """Judge the host on which the prefill side listens for the decode side."""
    prefill = pair.values(field)[0]
    if not pair.one_host and prefill.is_known and is_loopback(prefill.text):
        return Mismatch("decode connects to prefill's bootstrap server, so prefill must not listen on loopback only")
    return None
