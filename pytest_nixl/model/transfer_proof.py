# SPDX-License-Identifier: Apache-2.0
"""What came of moving a few bytes between two workers, and which variables kept them from arriving."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_nixl.core.units import KIB

#: The bytes that are moved each way.
PROOF_BYTES = 64 * KIB


@dataclass(frozen=True)
class TransferProof:
    """The result of moving :data:`PROOF_BYTES` each way between two workers with one backend.

    :param backend: the name of the backend, such as ``UCX``.
    :param memory: the memory types of initiator and target, such as ``DRAM:DRAM``.
    :param fault: why the bytes did not arrive, or not as they were sent; empty if they did.
    :param remedy: what to do about the fault, as the failed step says it.
    :param late: whether a deadline passed and nothing else went wrong: this proves nothing on a busy machine.
    :param absent: whether NIXL cannot be loaded.
    :param transports: the transports that carried WRITE and READ, each once.
    :param obstacle: what forbids a process of this host to copy from another one; empty if nothing does.
    :param libraries: the files of the libraries that the two workers had loaded when the bytes had arrived.
    :param culprits: the smallest set of variables without which the bytes arrive, each with its value; empty if the
        fault has nothing to do with variables, or if no search was made.
    :param together: variables that are only a fault together with those of ``culprits``.
    :param bare: why the bytes do not arrive without any variable that steers NIXL either; empty if they do, or if that
        was not tried.
    """

    backend: str
    memory: str
    fault: str = ""
    remedy: str = ""
    late: bool = False
    absent: bool = False
    transports: tuple[str, ...] = ()
    obstacle: str = ""
    libraries: tuple[str, ...] = ()
    culprits: tuple[tuple[str, str], ...] = ()
    together: tuple[tuple[str, str], ...] = ()
    bare: str = ""

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables that keep the bytes from arriving."""
        return tuple(name for name, _ in (*self.culprits, *self.together))

    @property
    def steering_fault(self) -> str:
        """That nothing can be moved with some variables, and that the bytes arrive without them; empty if unknown."""
        if not self.culprits:
            return ""
        values = " and ".join(f"{name}={value}" for name, value in (*self.culprits, *self.together))
        without = "it" if len(self.variables) == 1 else " and ".join(name for name, _ in self.culprits)
        return (
            f"with {values}{' together' if self.together else ''} nothing can be moved; "
            f"without {without} {PROOF_BYTES // KIB} KiB arrive"
        )

    @property
    def steering_remedy(self) -> str:
        """What to do about the variables without which the bytes arrive; empty if they are unknown.

        A remedy of the failed step that names all of them is the more precise one.
        """
        names = [name for name, _ in self.culprits]
        if not names or all(name in self.remedy for name in names):
            return self.remedy if names else ""
        return f"`unset {' '.join(names)}`"
