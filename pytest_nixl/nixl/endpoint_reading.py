# SPDX-License-Identifier: Apache-2.0
"""How a program reads a value of NIXL_ETCD_ENDPOINTS: the addresses that it contacts, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from pytest_nixl.model.nixl_releases import refuses_no_endpoints


class ReadOutcome(str, Enum):
    """What an agent does with a value of NIXL_ETCD_ENDPOINTS."""

    PUBLISHES = "publishes"
    UNREACHED = "reads an address where nothing answers"
    INVALID = "reads no address"
    NO_AGENT = "makes no agent"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Address:
    """An address that a reader connects to: a host name or numeric address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Note:
    """A warning about security or a skipped member; ``finding`` is the id of NIXL's defect, empty if none."""

    text: str
    finding: str = ""


@dataclass(frozen=True)
class EndpointReading:
    """How one program reads the value.

    :param reader: name of the program.
    :param works: whether the program finds an address in the value; nothing may answer at that address.
    :param why: one sentence.
    :param contacts: addresses that the program connects to.
    """

    reader: str
    works: bool
    why: str
    contacts: tuple[Address, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """The readings of one value, and a better one. Only ``contacts`` may show parts of a password: see ``private``.

    :param text: the value, without credentials and shortened.
    :param rewrite: a value that all three programs can read; empty if the text does not say what is meant.
    :param advice: sentences that complete the remedy.
    """

    text: str
    nixl: EndpointReading
    kvbench: EndpointReading
    etcdctl: EndpointReading
    rewrite: str
    advice: tuple[str, ...] = ()
    #: Whether the addresses in ``contacts`` may be parts of a password. If true, do not show them.
    private: bool = False

    @property
    def readings(self) -> tuple[EndpointReading, ...]:
        """The readings of all three programs."""
        return (self.nixl, self.kvbench, self.etcdctl)

    @property
    def findings(self) -> tuple[str, ...]:
        """Ids of the findings about NIXL that apply to this value."""
        return tuple(dict.fromkeys(note.finding for note in self.nixl.notes if note.finding))

    @property
    def remedy(self) -> str:
        """One sentence that says what to write instead."""
        write = f"write {self.rewrite}" if self.rewrite else "write http://HOST:PORT"
        return "; ".join((write, *self.advice))

    def predict(self, answers: Callable[[Address], bool], version: str = "") -> ReadOutcome:
        """Return what a real agent will do.

        :param answers: tells whether an etcd answers in plaintext at an address.
        :param version: version of NIXL, such as ``1.5.1``; empty for 1.5 and newer.
        """
        if not self.nixl.works:
            refused = not self.text and refuses_no_endpoints(version)
            return ReadOutcome.NO_AGENT if refused else ReadOutcome.INVALID
        return ReadOutcome.PUBLISHES if any(map(answers, self.nixl.contacts)) else ReadOutcome.UNREACHED
