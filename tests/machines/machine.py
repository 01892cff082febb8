# SPDX-License-Identifier: Apache-2.0
"""A machine of its own for tests: QEMU without KVM, Debian's kernel, and the host's file system below a writable layer.

The machine sees each file of the host, and what it writes stays in its memory and is gone with it. Of the host's /tmp
and /run it sees only what the tests need: the clone, the folder of QEMU and Python. What it writes to /out is in the
host's folder :attr:`Machine.out`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.needs import lack

FOLDER = Path(__file__).parent
PROJECT = FOLDER.parent.parent
#: The time that a machine has to boot, in seconds: 5 to 12 on a quiet host, 72 on one whose load is 20.
BOOT_SECONDS = 900.0
#: The time that a command in a machine has, in seconds. One that takes 10 on the host takes a minute, and ten minutes
#: beside twenty other processes. Only a machine that hangs takes longer: the deadline ends it.
COMMAND_SECONDS = 3000.0
#: A busy host delays the timer's interrupts for so long that the kernel takes the timer for broken: it is not to check.
#: A program at the same addresses each time, and no mitigations: QEMU emulates both for a quarter of its time.
_KERNEL = "console=ttyS0 quiet panic=-1 no_timer_check norandmaps mitigations=off"
#: The folders of the host that a machine does not see.
HIDDEN = (Path("/tmp"), Path("/run"))
#: The time between two looks at what a machine wrote, in seconds.
_LOOK_EVERY = 0.1


class MachineError(AssertionError):
    """A machine did not boot, ended, or did not answer in time; the message has the last lines of its console."""


@dataclass(frozen=True)
class Done:
    """A command that ended in a machine.

    :param code: its exit code.
    :param output: what it wrote to stdout and stderr.
    :param seconds: the time that it took, by the host's clock.
    """

    code: int
    output: str
    seconds: float


class Job:
    """A command that runs in a machine."""

    def __init__(self, machine: Machine, name: str, command: str) -> None:
        self._machine, self._name, self._command = machine, name, command
        self._started = time.monotonic()

    @property
    def output(self) -> str:
        """What it has written so far."""
        path = self._machine.out / "said" / self._name
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return (self._machine.out / "done" / self._name).exists()

    def wait(self, seconds: float = COMMAND_SECONDS) -> Done:
        """Wait for its end.

        :raises MachineError: the machine ended before it, or the time is over.
        """
        self._machine.wait_until(lambda: self.ended, f"the end of {self._command[:200]!r}", seconds, self)
        code = int((self._machine.out / "done" / self._name).read_text())
        return Done(code, self.output, time.monotonic() - self._started)

    def wait_for(self, text: str, seconds: float = COMMAND_SECONDS) -> None:
        """Wait until its output contains some words.

        :raises MachineError: it or the machine ended without them, or the time is over.
        """
        self._machine.wait_until(lambda: text in self.output or self.ended, f"{text!r}", seconds, self)
        if text not in self.output:
            raise MachineError(f"{self._command[:200]!r} ended without {text!r}:\n{self.output[-4000:]}")


class Machine:
    """A running machine.

    :param base: the folder that ``prepare.sh`` made.
    :param out: the folder that the machine sees as /out; it is made.
    :param name: its host name.
    :param memory: its memory in MiB.
    :param processors: their number. One costs the host a fifth less: two that QEMU emulates wait for each other.
    :param arguments: further arguments of QEMU, such as a network card.
    :param prefix: what QEMU is started with, to run in a network namespace.
    """

    def __init__(
        self,
        base: Path,
        out: Path,
        *,
        name: str = "guest",
        memory: int = 3072,
        processors: int = 2,
        arguments: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ) -> None:
        self.base, self.out, self.name = base, out, name
        for folder in ("todo", "running", "said", "done"):
            (out / folder).mkdir(parents=True)
        shutil.copy(FOLDER / "agent.sh", out)
        (out / "environment").write_text("")
        self._jobs = 0
        qemu = base / "qemu"
        libraries = [str(folder) for folder in (qemu / "usr/lib/x86_64-linux-gnu", qemu / "lib/x86_64-linux-gnu")]
        self._command = [
            # It ends with this process, also if that is killed.
            "setpriv", "--pdeathsig", "KILL", *prefix, str(qemu / "usr/bin/qemu-system-x86_64"),
            "-L", str(qemu / "usr/share/qemu"), "-L", str(qemu / "usr/share/seabios"),
            "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", str(processors), "-m", str(memory),
            "-display", "none", "-monitor", "none", "-no-reboot", "-serial", f"file:{out}/console",
            "-qmp", f"unix:{out}/qmp,server=on,wait=off", "-kernel", str(base / "vmlinuz"), "-initrd",
            str(base / "initrd.gz"), "-append", f"{_KERNEL} name={name}{_shown(needed_folders(base))}",
            "-virtfs", "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap",
            "-virtfs", f"local,path={out},mount_tag=out,security_model=none", "-nic", "none", *arguments,
        ]  # fmt: skip
        self._environ = os.environ | {"LD_LIBRARY_PATH": ":".join(libraries)}
        self.power_on()

    def power_on(self) -> None:
        """Let it boot, again after :meth:`power_off`: what it wrote elsewhere than to /out is lost."""
        (self.out / "ready").unlink(missing_ok=True)
        with open(self.out / "qemu.log", "wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ,
                start_new_session=True,
            )  # fmt: skip
        # The kernel shares the processors between sessions. QEMU's gets three times the usual share, because the whole
        # of CI waits for it. Without root or such groups it is one process among others.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._process.pid}/autogroup").write_text("-5")

    def booted(self, seconds: float = BOOT_SECONDS) -> Machine:
        """Wait until it runs commands.

        :raises MachineError: it ended, or the time is over.
        """
        self.wait_until(lambda: (self.out / "ready").exists(), "the end of its boot", seconds)
        return self

    def start(self, command: str, **environ: str) -> Job:
        """Start a command of bash as root, in the folder /out, with the functions of ``rxe.sh``.

        :param environ: variables for it, beside those of :meth:`set_environment`.
        """
        self._jobs += 1
        name = f"{self._jobs:03}"
        variables = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in environ.items())
        script = self.out / "todo" / f"{name}.new"
        script.write_text(f". /out/environment\n. {FOLDER}/rxe.sh\n{variables}{command}\n")
        script.rename(script.with_suffix(".sh"))
        return Job(self, name, command)

    def run(self, command: str, seconds: float = COMMAND_SECONDS, **environ: str) -> Done:
        """Run a command of bash as root and wait for its end; parameters as for :meth:`start` and :meth:`Job.wait`."""
        return self.start(command, **environ).wait(seconds)

    def check(self, command: str, seconds: float = COMMAND_SECONDS, **environ: str) -> str:
        """Run a command that has to succeed, and return its output."""
        done = self.run(command, seconds, **environ)
        if done.code:
            raise MachineError(f"{command!r} ended with code {done.code} in {self.name}:\n{done.output[-4000:]}")
        return done.output

    def set_environment(self, environ: Mapping[str, str]) -> None:
        """Set the variables of all later commands."""
        text = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in environ.items())
        (self.out / "environment").write_text(text)

    def qmp(self, command: str, **arguments: Any) -> Any:
        """Send a command to QEMU: ``stop`` and ``cont`` freeze the machine, ``set_link`` pulls its cable.

        :return: QEMU's answer.
        """
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(self.out / "qmp"))
            with connection.makefile("rw") as file:
                file.readline()  # its greeting
                for command_document in ({"execute": "qmp_capabilities"}, {"execute": command, "arguments": arguments}):
                    file.write(json.dumps(command_document) + "\n")
                    file.flush()
                    answer = json.loads(file.readline())
                    while "event" in answer:
                        answer = json.loads(file.readline())
        if "error" in answer:
            raise MachineError(f"QEMU refused {command}: {answer['error'].get('desc')}")
        return answer.get("return")

    def power_off(self) -> None:
        """End it as a loss of power does."""
        self._process.kill()
        self._process.wait()

    close = power_off

    def reset(self) -> None:
        """Let it boot again as its reset button does: its kernel closes no connection."""
        (self.out / "ready").unlink()
        self.qmp("set-action", reboot="reset")
        self.qmp("system_reset")

    def wait_until(self, condition: Any, awaited: str, seconds: float, job: Job | None = None) -> None:
        """Wait for a condition.

        :param awaited: what is waited for, for the message.
        :raises MachineError: the machine ended, or the time is over.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            ended = self._process.poll()
            if ended is not None and not condition():
                raise MachineError(f"machine {self.name} ended (QEMU's code {ended}) before {awaited}{self._tail(job)}")
            if time.monotonic() > deadline:
                raise MachineError(f"machine {self.name}: no sign of {awaited} within {seconds:g} s{self._tail(job)}")
            time.sleep(_LOOK_EVERY)

    def _tail(self, job: Job | None) -> str:
        parts = [("its console's last lines", self.out / "console"), ("QEMU says", self.out / "qemu.log")]
        console = []
        for label, path in parts:
            with contextlib.suppress(OSError):
                lines = path.read_text(errors="replace").splitlines()[-20:]
                console += [f"\n{label}:", *lines] if lines else []
        if job is not None and job.output:
            console += ["\nthe command's last lines:", *job.output.splitlines()[-40:]]
        return "\n".join(console)


def needed_folders(base: Path) -> list[Path]:
    """Return the folders that the tests need in a machine, and that it would not see: none lies within another.

    The test is skipped, with one sentence, if a path cannot be told to a machine's kernel.

    :param base: the folder that ``prepare.sh`` made.
    """
    needed = sorted({path.resolve() for path in (PROJECT, base, Path(sys.prefix), Path(sys.base_prefix))})
    hidden = [path for path in needed if any(path.is_relative_to(folder) for folder in HIDDEN)]
    for path in hidden:
        if set(str(path)) & set(' ,:\\"'):
            lack(f"a path without a space, comma, colon, quote or backslash for machines: {path}")
    return [path for path in hidden if not any(path != other and path.is_relative_to(other) for other in hidden)]


def _shown(folders: Sequence[Path]) -> str:
    """Return the word of the kernel's command line that names folders for ``init.sh``."""
    return f" show={':'.join(map(str, folders))}" if folders else ""


#: Starts a machine that ends with the test file: a name, then keywords of :class:`Machine`.
MakeMachine = Callable[..., Machine]


def prepared() -> Path:
    """Return the folder that ``prepare.sh`` made; skip the test, with one sentence, if machines cannot run here.

    The variable PYTEST_NIXL_MACHINES names the folder.
    """
    if os.geteuid():
        lack("root: a machine of QEMU sees the files of this one")
    folder = os.environ.get("PYTEST_NIXL_MACHINES")
    base = Path(folder or PROJECT / ".tox" / "qemu")
    if not (base / "complete").exists():
        lack(f"QEMU and a kernel in {base}: run `sh tests/machines/prepare.sh {shlex.quote(str(base))}`")
    return base


#: The Python of these tests, which a machine sees under the same path.
PYTHON = sys.executable
