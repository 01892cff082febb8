# SPDX-License-Identifier: Apache-2.0
"""Judge the samples of a row by what the profile expects of it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from types import MappingProxyType

from pytest_nixl.core import units
from pytest_nixl.core.rdma_fault import TCP_ALONE
from pytest_nixl.core.resource_limits import NO_SPACE_REMEDY, full_file_system
from pytest_nixl.judge.floors import FAR_FACTOR, decide_floor
from pytest_nixl.model.expectation import Ceiling, Expectation, Machine, row_ceiling
from pytest_nixl.model.samples import DISTURBED_CORES, Samples
from pytest_nixl.model.transports import CUDA, EFA, EMULATED, RDMA, SHARED_MEMORY, is_network, ucx_tls_allows
from pytest_nixl.model.verdicts import Judgement, Verdict

#: The share of a launch's windows that must be on the same side of the floor as their median.
AGREEING_WINDOWS = 0.75

_TOO_SLOW = (
    "Check that the machine is idle (uptime, nvidia-smi) and that the container has enough cores (cpu.max), run the "
    "row again alone, and if it is still slow compare its transports and devices with those of a healthy machine."
)

_DISTURBED = (
    "Stop other processes on the machine and run the row again, with --nixl-duration=1s. Keep the floor: on a quiet "
    "machine a row that stays undecided is as slow as the floor, and `pytest-nixl history` shows since when."
)

_NOTHING_EXPECTED = (
    "Learn a profile from good runs (pytest-nixl profile learn), or add to the profile an [[expect]] with a floor, a "
    "latency bound or the accepted transports of such rows, or choose another with --nixl-profile."
)
_BUSY_GPU = "Stop the other processes that use the GPU (`nvidia-smi` shows them), and run the row again."
#: The verdicts of rows of which lost packets may be the reason, or to which they matter.
_BY_SPEED = (Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.NO_EXPECTATION)

_LOSSY = (
    "Check the cables and transceivers of these devices, the packets that their switch ports have discarded, and that "
    "hosts and switches agree on flow control (PFC, ECN); then run the row again."
)

#: What to do if something forbids a process of this host to copy from another.
NO_CMA = (
    "Start the container with --cap-add SYS_PTRACE (Kubernetes: capabilities.add: [SYS_PTRACE]; a GitLab runner: "
    "cap_add in its config.toml), on a host set kernel.yama.ptrace_scope=0; or validate TCP instead: "
    "UCX_TLS=tcp,cuda_copy and --nixl-profile=tcp-loopback."
)

#: UCX's word for a protocol that sends messages instead of using RMA.
SOFTWARE_EMULATION = "software emulation"
#: What cuda_ipc needs.
_CUDA_NAMESPACES = (
    "one IPC and one PID namespace (docker run --ipc=host --pid=host; in one pod shareProcessNamespace: true)"
)
_CUDA_TLS = "that UCX_TLS, if it is set, names cuda_ipc and cuda_copy, "
_CUDA_REACH = "and that the GPUs reach each other (nvidia-smi topo -p2p r; NVLink: nvidia-smi nvlink -s)"


def judge(
    samples: Samples,
    expectation: Expectation | None,
    machine: Machine | None = None,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Judgement:
    """Judge what one launch, or several, measured of a row.

    The verdict is the first of these that holds: CORRUPT; NO-EXPECTATION; UNKNOWN or WRONG-TRANSPORT, whatever the
    speed; ERROR if nothing was timed; IMPLAUSIBLE above the ceiling; FAIL below the floor or above a latency bound;
    INCONCLUSIVE about the floor; WARN if a device lost packets; PASS. A latency above its bound also fails a row whose
    floor is INCONCLUSIVE. An expectation without a floor gives PASS by its transports or latency bounds, and the reason
    says so. An expectation with only a ceiling gives NO-EXPECTATION, because being below the ceiling proves nothing.

    :param expectation: what the profile expects of the row; None: nothing.
    :param machine: the hardware. A row above what its network cards can carry is IMPLAUSIBLE even if it would
        otherwise be NO-EXPECTATION or UNKNOWN.
    :param environ: the environment variables of this rank, for the remedy; empty: they are not those of the row.
    """
    return name_losses(_judge(samples, expectation, machine, environ), samples)


def name_losses(judgement: Judgement, samples: Samples) -> Judgement:
    """Return the judgement of a row, which names the devices that lost packets; a row that passed is then a WARN."""
    losing = " and ".join(str(loss) for loss in samples.lossy if loss.loses)
    if not losing or judgement.verdict not in _BY_SPEED:
        return judgement
    reason, verdict = judgement.reason, judgement.verdict
    if verdict is Verdict.PASS:
        return Judgement(Verdict.WARN, f"{reason}, but packets were lost: {losing}", _LOSSY)
    if verdict is Verdict.NO_EXPECTATION:
        return Judgement(verdict, f"{reason}; packets were lost: {losing}", f"{_LOSSY} {judgement.remedy}")
    return Judgement(verdict, f"{reason}; probably because packets were lost: {losing}", _LOSSY)


def _judge(
    samples: Samples, expectation: Expectation | None, machine: Machine | None, environ: Mapping[str, str]
) -> Judgement:
    """Judge as :func:`judge` does, whatever packets were lost."""
    row = samples.key.words
    if samples.corruption is not None:
        return _corrupt(row, samples)
    ceiling = row_ceiling(samples, expectation, machine)
    implausible = _implausible(row, samples, ceiling) if _timed(samples) else None
    if implausible is not None and (expectation is None or (not samples.transports and expectation.ceiling is None)):
        return implausible
    if expectation is None:
        return Judgement(
            Verdict.NO_EXPECTATION,
            f"{row}: the profile expects nothing of this row",
            _NOTHING_EXPECTED,
        )
    judgement = (
        _transport(row, samples, expectation, environ)
        or _contradicted(row, samples)
        or _untimed(row, samples, expectation)
    )
    if judgement is not None:
        return judgement
    slow = _slow(row, samples, expectation, machine) if implausible is None else None
    if slow is not None and samples.gpu_is_busy:
        slow = Judgement(
            Verdict.INCONCLUSIVE,
            f"{slow.reason}; but other processes used a GPU of this row: a kernel over 8 bytes took "
            f"{max(samples.gpu_waits) * 1e3:.1f} ms on it",
            _BUSY_GPU,
        )
    return implausible or slow or _passed(row, samples, expectation, ceiling)


def _slow(row: str, samples: Samples, expectation: Expectation, machine: Machine | None) -> Judgement | None:
    """Judge a row by its floor and its latency bounds; None: it holds all that the profile has."""
    speed = _speed(row, samples, expectation, machine)
    if speed is not None and speed.verdict is not Verdict.INCONCLUSIVE:
        return speed
    return _latency(row, samples, expectation) or speed


def _corrupt(row: str, samples: Samples) -> Judgement:
    return Judgement(
        Verdict.CORRUPT,
        f"{row}: {samples.corruption}",
        "Do not trust any transfer over this transport: keep the workers' logs, run this row again alone and then over "
        "another transport, such as UCX_TLS=tcp,cuda_copy with UCX, and report the transport that corrupts bytes.",
    )


def _transport(row: str, samples: Samples, expectation: Expectation, environ: Mapping[str, str]) -> Judgement | None:
    accepted = expectation.transports
    if accepted is None:
        return None
    if not samples.transports:
        if full := full_file_system(tempfile.gettempdir()):
            reason = f"{row}: the transport that carried the bytes is not known, because the worker's log ends early"
            return Judgement(Verdict.UNKNOWN, f"{reason}: {full}", NO_SPACE_REMEDY)
        return Judgement(
            Verdict.UNKNOWN,
            f"{row}: the transport that carried the bytes is not known, and the profile accepts only {_any(accepted)}",
            "Search the worker's log for the transports that the backend reports (UCX: do not unset UCX_PROTO_INFO=y "
            "and do not redirect its log with UCX_LOG_FILE).",
        )
    wrong = [name for name in samples.transports if name.partition("/")[0] not in accepted]
    if not wrong:
        return None
    went = f"went over {' and '.join(wrong)}{_emulation(samples)}{_emulation_remark(samples, wrong)}"
    reason = f"{row}: {went}, but the profile accepts only {_any(accepted)}"
    if placed := _wrong_hosts(samples, wrong, accepted):
        where, remedy = placed
        return Judgement(Verdict.WRONG_TRANSPORT, f"{reason}: {where}", remedy)
    if samples.obstacle and "cma" in accepted:
        return Judgement(Verdict.WRONG_TRANSPORT, f"{reason}: {samples.obstacle}", NO_CMA)
    return Judgement(Verdict.WRONG_TRANSPORT, reason, _transport_remedy(samples, set(accepted), environ))


def _wrong_hosts(samples: Samples, wrong: Sequence[str], accepted: tuple[str, ...]) -> tuple[str, str] | None:
    """Return where the ends are and a remedy, if the profile is for ends placed otherwise; None: it may be for these.

    :param wrong: the transports that are not accepted.
    """
    if len(samples.hosts) != 2:
        return None
    initiator, other = samples.hosts
    inside = {name.partition("/")[0] for name in wrong} <= SHARED_MEMORY | {"cuda_ipc"}
    if initiator == other and inside and not {*accepted} & (SHARED_MEMORY | {"cuda_ipc"}):
        both = "both ranks" if samples.key.pair[0] != samples.key.pair[1] else "initiator and target"
        return (
            f"{both} are on one host, {initiator}, and this profile is for rows between two hosts",
            "Start each rank on a host of its own. To rehearse on one host, give --nixl-profile=loopback.",
        )
    if initiator != other and {*accepted} <= SHARED_MEMORY:
        return (
            f"the ranks are on two hosts, {initiator} and {other}, and this profile is for rows within one",
            "Give the profile of your hosts with --nixl-profile: `pytest-nixl init` writes a first one, and "
            "`pytest-nixl profile learn` writes one from three good runs.",
        )
    return None


def _emulation(samples: Samples) -> str:
    """Return that UCX sent messages instead of using RMA, if it reports that; else an empty text."""
    return f" as {samples.protocol}, not as RMA" if samples.protocol == SOFTWARE_EMULATION else ""


def _emulation_remark(samples: Samples, wrong: Sequence[str]) -> str:
    """Return what the devices counted, if that shows that RDMA did not move the bytes; else an empty text."""
    if samples.counted is None or not any(name.partition("/")[0].endswith(EMULATED) for name in wrong):
        return ""
    return f" ({samples.counted.emulation(samples.key.op)})"


def _contradicted(row: str, samples: Samples) -> Judgement | None:
    description = samples.counted.contradiction(samples.transports) if samples.counted is not None else ""
    if not description:
        return None
    return Judgement(
        Verdict.WRONG_TRANSPORT,
        f"{row}: {samples.key.backend} {description}",
        "Check that initiator and target are on two hosts: within one host a library may use shared memory without "
        "reporting it (libfabric's efa provider does; FI_EFA_ENABLE_SHM_TRANSFER=0 forbids it); if they are, check in "
        "the workers' logs which devices they opened.",
    )


def _transport_remedy(samples: Samples, accepted: set[str], environ: Mapping[str, str]) -> str:
    key, transports = samples.key, samples.transports
    backend, steps = key.backend, []
    alone = [(rank, tls) for rank, tls in samples.ucx_tls if not ucx_tls_allows(tls, accepted)]
    if len(alone) == 1:
        rank, tls = alone[0]
        return f"Unset UCX_TLS on {rank}: UCX_TLS={tls} is set there."
    tls = environ.get("UCX_TLS", "") if backend == "UCX" else ""
    if tls and not ucx_tls_allows(tls, accepted):
        setting = f"UCX_TLS={tls} is set in this run"
        of_host = tls in TCP_ALONE and not key.memory.on_gpu
        where, name = (", on one machine only,", "=tcp-loopback") if of_host else ("", "")
        return f"Unset UCX_TLS on every rank: {setting}. Or{where} choose a profile for it: --nixl-profile{name}."
    emulated_read = key.op == "READ" and samples.protocol == SOFTWARE_EMULATION
    needs_nvlink = emulated_read and "cuda_ipc" in accepted and len({*samples.hosts}) < 2
    if needs_nvlink:
        unset = environ and not tls and not samples.ucx_tls
        steps.append(
            "UCX reads by cuda_ipc only over NVLink: between GPUs without NVLink let it read over PCIe "
            "(`export UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y` on every rank), or use WRITE, or add tcp to the profile's "
            "transports for READ"
        )
        steps.append(
            f"if WRITE does not go over cuda_ipc either, check that both processes have {_CUDA_NAMESPACES}, "
            f"{'' if unset else _CUDA_TLS}{_CUDA_REACH}"
        )
    elif backend == "UCX":
        steps.append("check UCX_TLS and UCX_NET_DEVICES in the environment of every rank")
    elif backend == "LIBFABRIC":
        steps.append("check FI_PROVIDER in the environment of every rank")
    else:
        steps.append("check the backend's own settings in the environment of every rank")
    if accepted & SHARED_MEMORY:
        steps.append(
            "for cma allow the processes to read each other's memory (in a container --cap-add SYS_PTRACE and one PID "
            "namespace; else kernel.yama.ptrace_scope=0)"
        )
        steps.append("for posix and sysv give both processes one IPC namespace and a /dev/shm that is large enough")
    if "cuda_ipc" in accepted and not needs_nvlink:
        steps.append(
            f"for cuda_ipc check that both processes are on one host with {_CUDA_NAMESPACES}, {_CUDA_TLS}{_CUDA_REACH}"
        )
        if any(is_network(name) for name in transports):
            steps.append(
                "between two hosts of one NVLink domain (NVL72) the memory needs a fabric handle (cuMemCreate with "
                "CU_MEM_HANDLE_TYPE_FABRIC), which cudaMalloc and so PyTorch do not make by default"
            )
    if accepted & (CUDA - {"cuda_ipc"}):
        steps.append(
            "for cuda_copy check that UCX has its CUDA module (ucx_info -d), and for gdr_copy that gdrdrv is loaded "
            "and /dev/gdrdrv is in the container"
        )
    if accepted & (RDMA | EFA) and key.memory.on_gpu:
        steps.append(
            "for GPU memory check that the network card can access it: nvidia_peermem is loaded (lsmod), or the NVIDIA "
            "driver has the open kernel modules with DMA-BUF; the check gpu-direct of the infrastructure suite shows it"
        )
    if accepted & RDMA:
        steps.append(
            "for RDMA check that the container has /dev/infiniband and an unlimited memlock (ulimit -l), and that "
            "ibv_devinfo shows an active port"
        )
    if any(name.partition("/")[0].endswith(EMULATED) for name in transports):
        steps.append(
            "for RDMA over EFA check that FI_EFA_USE_DEVICE_RDMA is unset or 1 on every rank, and that libfabric, "
            "rdma-core and the efa driver are from one EFA installer; if the instance's cards have no RDMA write "
            "(before Nitro v4), or the backend is UCX, which does not use RDMA over srd, add the name before the slash "
            "to the profile's transports"
        )
    elif accepted & EFA:
        steps.append(
            "for EFA check that fi_info -p efa lists a device, that the container has /dev/infiniband/uverbs*, and "
            "that the security group allows all traffic to and from itself"
        )
    text = "; ".join(steps)
    return f"{text[0].upper()}{text[1:]}."


def _timed(samples: Samples) -> bool:
    return bool(samples.windows) and all(0 < seconds < math.inf for seconds in samples.windows)


def _untimed(row: str, samples: Samples, expectation: Expectation) -> Judgement | None:
    needs_latency = expectation.p50 is not None or expectation.p99 is not None
    if not _timed(samples):
        fault = "no window of transfers was timed"
    elif needs_latency and not samples.latencies:
        fault = "no single transfer was timed, but the profile has a latency bound"
    else:
        return None
    return Judgement(
        Verdict.ERROR,
        f"{row}: {fault}",
        "Run this row again alone with a longer --nixl-duration and read the workers' logs; if the error stays, report "
        "it as a bug of pytest-nixl.",
    )


def _implausible(row: str, samples: Samples, ceiling: Ceiling | None) -> Judgement | None:
    if ceiling is None or samples.bandwidth <= ceiling.value:
        return None
    over = f"{row}: {rate(samples.bandwidth)} is over the ceiling of {rate(ceiling.value)}"
    if not ceiling.why:
        return Judgement(
            Verdict.IMPLAUSIBLE,
            f"{over}, which no such machine can exceed",
            "Do not use this bandwidth: the clock stopped before the bytes were delivered, or the profile's ceiling is "
            "for another machine; compare the ceiling's source with the hardware, then run the row again with a "
            "longer --nixl-duration.",
        )
    return Judgement(
        Verdict.IMPLAUSIBLE,
        f"{over}, {ceiling.why}",
        "Do not use this bandwidth: the clock stopped before the bytes were delivered, or they did not go over these "
        "NICs, as between two ranks of one host; compare the counters of the NICs with the payload, and [machine] of "
        "the profile with the hardware.",
    )


def _speed(row: str, samples: Samples, expectation: Expectation, machine: Machine | None) -> Judgement | None:
    """Judge a row by its floor; None: the row reaches it, or there is no floor.

    One launch is judged by its windows. Whether it needs more launches is for :func:`another_launch`.
    """
    value, floor = samples.bandwidth, expectation.floor
    if floor is None:
        return None
    if len(samples.values) > 1:
        return _speed_of_launches(row, samples, floor, machine)
    windows = len(samples.rates)
    above = sum(rate >= floor for rate in samples.rates)
    below, slow = windows - above, value < floor
    if not slow and above >= AGREEING_WINDOWS * windows:
        return None
    figures = f"{row}: {rate(value)} is {percentage(value, floor)} of the floor of {rate(floor)}"
    taken = max(samples.contention, default=0.0)
    disturbed = taken > DISTURBED_CORES or value >= floor * (1 - taken)
    if slow and below >= AGREEING_WINDOWS * windows and not disturbed:
        return _fail_below_floor(f"{figures}, and {below} of {windows} windows are below it", samples, machine)
    if slow and disturbed:
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"{figures}, but other processes used {taken:.2g} of this row's cores",
            _DISTURBED,
        )
    return Judgement(
        Verdict.INCONCLUSIVE,
        f"{figures}, but only {below if slow else above} of {windows} windows are "
        f"{'below' if slow else 'at or above'} it, and three quarters of them are needed for a verdict",
        "Run the row again with a --nixl-duration ten times as long, and stop other processes on the machine.",
    )


def another_launch(samples: Samples, expectation: Expectation | None, machine: Machine | None = None) -> bool:
    """Whether one more launch could decide: only the floor is undecided, and everything else about the row is good.

    :param samples: the launches so far.
    """
    if expectation is None or expectation.floor is None:
        return False
    # Judge everything but the floor: every row is above the smallest possible floor.
    without_floor = _judge(samples, replace(expectation, floor=math.ulp(0.0)), machine, {})
    if without_floor.verdict not in (Verdict.PASS, Verdict.INCONCLUSIVE):
        return False
    if decide_floor(samples.values, expectation.floor, contention=samples.contention)[0] is None:
        return True
    # One launch that is far enough from the floor decides only if its windows agree.
    judgement = _speed("", samples, expectation, machine) if len(samples.values) == 1 else None
    return judgement is not None and judgement.verdict is Verdict.INCONCLUSIVE


def decisive_bandwidth(expectation: Expectation | None) -> float | None:
    """Return the bandwidth above which a launch whose windows agree needs no more of them, in bytes per second.

    :returns: 0 if no floor has to be decided; None if a latency bound needs all windows.
    """
    if expectation is None:
        return 0.0
    if expectation.p50 is not None or expectation.p99 is not None:
        return None
    return FAR_FACTOR * (expectation.floor or 0.0)


def _fail_below_floor(reason: str, samples: Samples, machine: Machine | None) -> Judgement:
    """Return FAIL of a row below its floor, with the network cards that it left idle if it could use more."""
    nics = sorted(item.device for item in samples.counted.carriers(samples.transports)) if samples.counted else []
    of_gpu = samples.key.memory.on_gpu
    reach = (machine.reach or 0) if machine is not None and of_gpu else 0
    by_rdma = all(name.partition("/")[0] in RDMA | EFA for name in samples.transports)
    if not by_rdma or not 0 < len(nics) < reach:
        return Judgement(Verdict.FAIL, reason, _TOO_SLOW)
    listing = (
        f"{reason}; only {len(nics)} of the {reach} network cards that a GPU reaches carried it ({', '.join(nics)})"
    )
    if samples.key.backend != "UCX":
        return Judgement(
            Verdict.FAIL, listing, f"Give every rank all {reach} cards, and unset what names some of them."
        )
    return Judgement(
        Verdict.FAIL,
        listing,
        f"Let UCX use more cards for one transfer: `export UCX_MAX_RMA_RAILS={reach}` on every rank (NIXL sets 2 if it "
        "is not set), and unset UCX_NET_DEVICES or name all cards in it. If an engine's GPUs share the cards, one card "
        "for each GPU may be what you want: then lower the floor.",
    )


def _speed_of_launches(row: str, samples: Samples, floor: float, machine: Machine | None) -> Judgement | None:
    values = samples.values
    verdict, description = decide_floor(values, floor, contention=samples.contention)
    if verdict is Verdict.PASS:
        return None
    figures = f"{row}: {rate(median(values))} is {percentage(median(values), floor)} of the floor of {rate(floor)}"
    if verdict is Verdict.FAIL:
        return _fail_below_floor(f"{figures}; {description}", samples, machine)
    return Judgement(Verdict.INCONCLUSIVE, f"{figures}; {description}", _DISTURBED)


def _latency(row: str, samples: Samples, expectation: Expectation) -> Judgement | None:
    faults = []
    for name, bound in (("p50", expectation.p50), ("p99", expectation.p99)):
        if bound is None:
            continue
        value = samples.p50 if name == "p50" else samples.p99
        if value > bound:
            faults.append(
                f"the {name} latency of {units.microseconds(value)} us is {percentage(value, bound)} of its bound of "
                f"{units.microseconds(bound)} us"
            )
    if not faults:
        return None
    return Judgement(
        Verdict.FAIL,
        f"{row}: {' and '.join(faults)}",
        "Check that the machine is idle and that there is a core for each polling process (nproc, cpu.max), then run "
        "the row again alone; if only p99 is high, the usual cause is another process on the same cores.",
    )


def _passed(row: str, samples: Samples, expectation: Expectation, ceiling: Ceiling | None) -> Judgement:
    value = samples.bandwidth
    over = f" over {' and '.join(samples.transports)}" if samples.transports else ""
    if expectation.floor is not None:
        share = f"{percentage(value, expectation.floor)} of the floor of {rate(expectation.floor)}"
        return Judgement(Verdict.PASS, f"{row}: {rate(value)}{over} is {share}")
    judged = [name for name in ("transports", "p50", "p99") if getattr(expectation, name) is not None]
    if not judged:
        # Without the bandwidth, so that the report merges the rows that differ only in it.
        went = f"went{over or ' over an unknown transport'}"
        limit = f" and is not over the ceiling of {units.gigabytes(ceiling.value)} GB/s" if ceiling is not None else ""
        return Judgement(
            Verdict.NO_EXPECTATION,
            f"{row}: {went}{limit}; the profile expects nothing{' else' if limit else ''} of it",
            _NOTHING_EXPECTED,
        )
    return Judgement(Verdict.PASS, f"{row}: {rate(value)}{over}; no floor, judged by {' and '.join(judged)}")


def _any(names: tuple[str, ...]) -> str:
    return " or ".join(names)


def rate(value: float) -> str:
    """Return bytes per second as text: ``12.5 GB/s (100 Gb/s)``."""
    return f"{units.gigabytes(value)} GB/s ({units.gigabits(value)} Gb/s)"


def percentage(value: float, reference: float) -> str:
    """Return ``value`` as a percentage of ``reference``. A value near ``reference`` is not rounded to 100 %."""
    percent = 100 * value / reference
    if value != reference and abs(percent - 100) <= 0.5:  # 99.5 would be rounded to 100, too
        return "just under 100 %" if value < reference else "just over 100 %"
    return f"{percent:.0f} %" if percent >= 1 else f"{percent:.2g} %"
