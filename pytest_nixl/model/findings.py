# SPDX-License-Identifier: Apache-2.0
"""Findings: known defects of NIXL by id, their acceptance by a profile, and the verdict of a check for one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from pytest_nixl.core.errors import NixlPluginError
from pytest_nixl.model.verdicts import Judgement, Verdict


@dataclass(frozen=True)
class Finding:
    """A known defect of NIXL or its tools.

    :param title: what the defect does.
    :param remedy: what an operator can do about it.
    :param met_by: the deployments that it affects.
    :param seen: the releases in which it was seen.
    """

    id: str
    title: str
    remedy: str
    met_by: str
    seen: str = "NIXL 0.9.0 to 1.5.1: every release that was tried"


@dataclass(frozen=True)
class Acceptance:
    """A finding that a profile accepts.

    :param reason: why it is accepted.
    :param expires: the last day on which it is accepted.
    """

    id: str
    reason: str
    expires: date


_ALL = (
    Finding(
        "NIXL-ETCD-HTTPS-PLAINTEXT",
        "NIXL accepts https:// in NIXL_ETCD_ENDPOINTS and then connects in plaintext",
        "write http:// if the etcd speaks plaintext; for an etcd with TLS run `etcd grpc-proxy` beside the agent and "
        "give NIXL the proxy's address",
        "NIXL_ETCD_ENDPOINTS names an https:// member",
    ),
    Finding(
        "NIXL-ETCD-SILENT-FAILURE",
        "send_local_metadata() returns as if it had succeeded although nothing reached etcd; only stderr has an error",
        "look for the key <namespace>/<agent>/metadata in etcd after publishing, and collect the stderr of all agents",
        "agents publish while etcd cannot be reached, or NIXL cannot read NIXL_ETCD_ENDPOINTS",
    ),
    Finding(
        "NIXL-ETCD-CREDENTIALS-DROPPED",
        "NIXL never sends a user and password in NIXL_ETCD_ENDPOINTS: the endpoint with them is refused or left out",
        "remove them; let the etcd accept NIXL without a password on a separate network, or use client "
        "certificates with `etcd grpc-proxy` beside the agent",
        "NIXL_ETCD_ENDPOINTS contains a user and password",
    ),
    Finding(
        "NIXL-ETCD-MEMBER-DROPPED",
        "NIXL silently leaves out an endpoint in NIXL_ETCD_ENDPOINTS that it cannot parse or resolve",
        "check each endpoint alone: `pytest-nixl endpoint URL`",
        "NIXL_ETCD_ENDPOINTS lists several endpoints, and one cannot be parsed or resolved",
    ),
    Finding(
        "NIXL-ETCD-STALE-KEY",
        "metadata in etcd has no lease: an agent that ends without invalidate_local_metadata() stays published",
        "call invalidate_local_metadata() before every exit, and let whatever restarts agents delete "
        "<namespace>/<agent>/ of dead agents; compare the agents published in etcd with those that are alive",
        "agents are killed, or end without invalidate_local_metadata()",
    ),
    Finding(
        "NIXL-ETCD-RESTART-REFUSED",
        "after an agent restarted under its old name, agents that knew it cannot load its new metadata",
        "call remove_remote_agent(name) before each fetch_remote_metadata(name) of an agent that may have restarted, "
        "or use a new name for every start",
        "an agent restarts under its old name",
    ),
    Finding(
        "NIXL-ETCD-DUPLICATE-NAME",
        "two agents of one name silently overwrite each other's metadata, and invalidate each other's",
        "make names unique: add the host name and the process id, or a random part",
        "two agents of one namespace have the same name",
    ),
    Finding(
        "NIXL-ETCD-SERIAL-FETCH",
        "the fetch of an agent that is not published blocks every later request of the fetching agent for 5 s",
        "fetch the agents that are known to be published first, and wait for an agent's key in etcd before fetching it",
        "an agent fetches the metadata of one that is not published yet",
    ),
    Finding(
        "NIXL-ETCD-FETCH-STUCK",
        "a fetch while etcd is unreachable stops an agent's metadata exchange for good: it carries out no later "
        "request, even when etcd is back",
        "check that etcd answers before each fetch_remote_metadata, give NIXL every member of the etcd, and restart an "
        "agent whose stderr says 'failed to create a watch connection'",
        "an agent fetches while etcd cannot be reached",
    ),
    Finding(
        "NIXL-ETCD-WATCH-LOST",
        "after an agent's connection to etcd was lost once, it is never notified when known agents invalidate their "
        "metadata",
        "create the agents again after etcd was unreachable; until then call remove_remote_agent for agents that have "
        "ended (neither this call nor another fetch restores the watch)",
        "the connection of an agent to etcd is cut, and other agents invalidate their metadata later",
    ),
    Finding(
        "NIXL-ETCD-NAMESPACE-SLASH",
        "the default namespace differs from the documented one: agents without NIXL_ETCD_NAMESPACE publish under "
        "/nixl/agents//<agent>/, agents with NIXL_ETCD_NAMESPACE=/nixl/agents under /nixl/agents/<agent>/",
        "set NIXL_ETCD_NAMESPACE to the same text for every agent of a deployment, or for no agent",
        "some agents have NIXL_ETCD_NAMESPACE=/nixl/agents and others have none",
    ),
    Finding(
        "NIXL-ETCD-OVERSIZE",
        "metadata that exceeds etcd's request limit is not published; NIXL reports nothing, and peers may load a stale "
        "entry",
        "start etcd with --max-request-bytes=16777216, or register fewer, larger regions; to notice it, compare the "
        "value of the key <namespace>/<agent>/metadata in etcd with get_agent_metadata() after each publication",
        "an agent registers more regions than fit into one request of etcd: about 35,000 with UCX and etcd's default "
        "of 1.5 MiB",
        "NIXL 1.5.1: earlier releases were not tried",
    ),
    Finding(
        "NIXL-DEREGISTERED-KNOWN",
        "memory that its owner deregistered stays known to the agents that fetched it, even after the owner publishes "
        "and they fetch again",
        "let the other agents call remove_remote_agent and fetch again before the memory is reused",
        "an agent deregisters memory that others have fetched, and keeps running",
    ),
    Finding(
        "LIBFABRIC-NO-RECONNECT",
        "with LIBFABRIC, after an agent calls remove_remote_agent() and then add_remote_agent() for another one, a "
        "transfer to that one fails after a minute: it waits for a handshake, which ai-dynamo/nixl#1736 added",
        "create a new agent after the old one was withdrawn, invalidated or removed, and do not publish the old one "
        "again",
        "a LIBFABRIC agent is removed by another one, which then loads its metadata again",
        "NIXL 1.4.1 and 1.5.0 with LIBFABRIC over tcp; not NIXL 1.0.1; other releases were not tried",
    ),
    Finding(
        "NIXLBENCH-RANK-TWICE",
        "nixlbench gives the same rank to two processes if an answer of etcd is lost while they register",
        "do not use the result of a run during which etcd restarted, changed its leader or was unreachable",
        "etcd restarts, changes its leader or is unreachable while the processes of nixlbench register",
        "every build of nixlbench that was tried",
    ),
    Finding(
        "VRAM-AS-HOST-MEMORY",
        "GPU memory is treated as host memory",
        "let UCX load its CUDA modules: UCX_MODULES, UCX_TLS and UCX_MODULE_DIR must not leave cuda out (`ucx_info -d` "
        "lists cuda_copy and cuda_ipc), libuct_cuda must find libcuda.so.1 and libnvidia-ml.so.1, libucm_cuda must "
        "find libcudart.so.12, and UCX must be built with CUDA (check ucx-cuda); with memory that was not made by "
        "CUDA's own allocator set UCX_MEMTYPE_CACHE=n",
        "UCX does not load its CUDA modules, or the memory was not made by CUDA's own allocator",
        "any release of NIXL: it depends on the UCX that is loaded",
    ),
    Finding(
        "NIXL-DUPLICATE-DESCRIPTOR",
        "deregister_memory with a list that names a region twice frees the region twice, which crashes the process "
        "(ai-dynamo/nixl#1792)",
        "give register_memory and deregister_memory each region once: remove duplicates from the list, and deregister "
        "a region that was registered twice by two calls",
        "a program lists a region twice in one call, for example a tensor that two layers share",
        "NIXL 1.0.1 to 1.5.1, with UCX and LIBFABRIC: every release that was tried",
    ),
    Finding(
        "NIXL-RELEASED-HANDLE",
        "a transfer handle that is posted after release_xfer_handle() crashes the process instead of raising an error",
        "drop every reference to a handle when it is released, and let only one thread own a handle",
        "a program posts a transfer after it released the handle, for example when a request is cancelled twice",
        "NIXL 1.0.1 to 1.5.1, with UCX and LIBFABRIC: every release that was tried",
    ),
    Finding(
        "NIXL-DEREGISTERED-SOURCE",
        "with LIBFABRIC a transfer that is posted after its own region was deregistered crashes the process instead of "
        "raising an error",
        "release all transfers of a region before deregister_memory",
        "a program deregisters memory while it keeps prepared transfers of it, for example when a KV cache is resized",
        "NIXL 1.0.1 to 1.5.1 with LIBFABRIC: every release that was tried",
    ),
    Finding(
        "NIXL-CUT-METADATA",
        "after add_remote_agent() has refused the metadata of an agent because the last byte is missing, it also "
        "refuses the whole metadata of that agent (compare ai-dynamo/nixl#1159)",
        "send the length of the metadata first, and compare it with what arrived before add_remote_agent(); after such "
        "an error delete the agent that called add_remote_agent(), and create it again: remove_remote_agent() does not "
        "help",
        "a program carries metadata itself, for example through a socket or a queue, and the end may get lost",
        "NIXL 1.0.1 to 1.5.1 with UCX: every release that was tried; not with LIBFABRIC",
    ),
    Finding(
        "NIXL-RELEASED-IN-FLIGHT",
        "release_xfer_handle() of a transfer in flight returns at once, and its bytes are written after that",
        "wait until check_xfer_state() no longer returns PROC before the memory is used again; after a timeout, do not "
        "reuse the memory until the other agent's process has ended",
        "a program cancels transfers by releasing their handles, and uses the memory again",
        "NIXL 1.0.1 to 1.5.1, with UCX and LIBFABRIC over tcp: every release that was tried; 1.5.1 with UCX over ud on "
        "soft-RoCE",
    ),
    Finding(
        "LIBFABRIC-RELEASE-STALLS",
        "with LIBFABRIC, after release_xfer_handle() of a transfer in flight, the next transfer stays PROC for ever if "
        "it is prepared while the bytes of the released one are under way, although its own bytes arrive",
        "do not release a transfer before check_xfer_state() has returned DONE or raised an error; give every transfer "
        "a deadline, and post one again that missed it",
        "a program cancels transfers by releasing their handles, as after a timeout, and goes on with the same agents",
        "NIXL 1.5.0 with LIBFABRIC over tcp, in 10 of 10 runs of the script, and in none of 10 that prepared the next "
        "transfer 5 s later (one more stayed so for 60 s); in none of 3 with 1.0.1 and with 1.4.1 each; not with UCX",
    ),
    Finding(
        "NIXL-REMOVED-IN-FLIGHT",
        "after remove_remote_agent() the transfers in flight report an error, and their bytes are written after that",
        "wait until all transfers with an agent have ended before remove_remote_agent(); if that agent does not "
        "answer, do not reuse the transfers' memory until the agent's process has ended",
        "a program removes another agent while transfers with it are in flight, and uses the memory again",
        "NIXL 1.0.1 to 1.5.1, with UCX and LIBFABRIC over tcp: every release that was tried; 1.5.1 with UCX over ud on "
        "soft-RoCE",
    ),
    Finding(
        "NIXL-STOPPED-TARGET-SILENT",
        "a transfer to an agent whose process is stopped (SIGSTOP) stays PROC and reports no error",
        "give every transfer a deadline in the program that waits for it",
        "the process of an agent is stopped or hangs while its connections stay open",
        "NIXL 1.0.1 to 1.5.1, with UCX and LIBFABRIC over tcp: every release that was tried (1.5.0 was watched for "
        "120 s, the others for 3 s or more); NIXL 1.0.1, 1.4.1 and 1.5.1 with UCX over rc on soft-RoCE, where "
        "transfers went on for 1 to 17 s and then stayed so (watched for 30 s), and 1.5.1 over ud, where they stop at "
        "once; not with UCX over cma",
    ),
    Finding(
        "NIXL-DEAD-TARGET-CRASHES",
        "transfer() to a target that has just died sometimes ends the process with SIGSEGV instead of raising an error",
        "use NIXL 1.4 or newer; with 1.0, let a supervisor restart a process that ends when its peer dies",
        "the process of an agent dies while others post transfers to it",
        "NIXL 1.0.1 with UCX: in 2 of 100 rounds of the script over tcp, and once over cma; in none of 100 with NIXL "
        "1.4.1 and none of 100 with 1.5.1",
    ),
    Finding(
        "NIXL-DEAD-INITIATOR-ABORTS",
        "if an initiator dies during a READ over tcp, UCX sometimes ends the target with SIGABRT: `Fatal: unexpected "
        "error: Endpoint timeout`",
        "let a supervisor restart the target (Kubernetes: `restartPolicy: Always`)",
        "agents read from others over tcp, as the decode side of vLLM does, and one of them dies meanwhile",
        "NIXL 1.0.1 to 1.5.1 with UCX over tcp, on two cores: UCX ended the target in 3 of 100 rounds of the script "
        "with NIXL 1.0.1, 4 with 1.4.1, 2 with 1.5.0 and 5 with 1.5.1 while the cores were busy, in 13 of 200 with "
        "1.5.1 on an idle machine, and in none after a WRITE",
    ),
    Finding(
        "LIBFABRIC-DEAD-TARGET-SILENT",
        "with LIBFABRIC a transfer to a target that has died stays PROC: the error is on stderr only",
        "give every transfer a deadline in the program that waits for it, and stop using an agent after a transfer "
        "with it has missed the deadline; use NIXL 1.5 or newer, which reports transfers that are in flight",
        "the process of an agent dies while others have transfers with it in flight, or before their next one",
        "NIXL 1.0.1 and 1.4.1 with LIBFABRIC over tcp, in 10 of 10 rounds of the script each; NIXL 1.5.0 in none of "
        "10, because a transfer in flight raises nixlBackendError there, but one posted after the death stayed PROC in "
        "15 of 16 tries (watched for 10 s); with NIXL 1.0.1 a transfer() after the death once did not return within "
        "100 min",
    ),
    Finding(
        "NIXL-RESTARTED-LISTENER-LOSES-FETCH",
        "after an agent has restarted on the same address and port, the first fetch_remote_metadata() from there "
        "returns and is lost; only stderr has an error",
        "after fetch_remote_metadata() wait a few seconds for check_remote_metadata() to return True, and call "
        "fetch_remote_metadata() again if it does not",
        "agents fetch metadata from the listener of an agent that restarts with the same address and port",
        "NIXL 1.0.1 to 1.5.1, with UCX and LIBFABRIC: every release that was tried",
    ),
    Finding(
        "LIBFABRIC-NOTIFICATION-HANGS",
        "with LIBFABRIC, send_notif() to an agent whose process has died does not return; the first calls after the "
        "death may return, and their notifications are lost",
        "do not notify an agent after a transfer with it has failed, and let a supervisor restart a process that does "
        "not answer",
        "an agent notifies another one that has died",
        "NIXL 1.0.1 to 1.5.1 with LIBFABRIC over tcp: every release that was tried (1.5.0 was watched for 150 s, the "
        "others for 20 s)",
    ),
    Finding(
        "NIXL-REMOVED-AGENT-KEEPS-SOCKETS",
        "each connection to another agent leaves a socket open in both processes after remove_remote_agent(), until "
        "the agents are deleted",
        "do not remove and add the same agents again and again; raise `ulimit -n`, restart a process before it runs "
        "out of descriptors, or use NIXL 1.4.1",
        "agents come and go, or are removed and added again, while a process lives",
        "NIXL 1.5.0 and 1.5.1 with UCX over cma and tcp; not NIXL 1.4.1",
    ),
    Finding(
        "LIBFABRIC-DELETED-AGENT-KEEPS-MEMORY",
        "with LIBFABRIC over tcp each agent that is deleted leaves about 1 KB in use in its process, and almost as "
        "much in the process of each agent that it connected with",
        "keep one agent for the life of a process; restart a process that has created or met agents by the hundred "
        "thousand: 100,000 of them take about 200 MB",
        "a process creates and deletes agents again and again, or agents that come and go connect with it",
        "NIXL 1.5.0 with LIBFABRIC over tcp of libfabric 2.5.1; other releases and providers were not tried",
    ),
    Finding(
        "NIXL-LOCKED-MEMORY-HANGS",
        "if a process may lock too little memory for an RDMA device, the creation of an agent never returns: UCX tries "
        "again for ever, and writes two lines for each try",
        "raise the limit: `ulimit -l unlimited`, docker run --ulimit memlock=-1, or the capability IPC_LOCK",
        "UCX may use an RDMA device, and the process may lock 64 KiB of memory, the default of many containers",
        "NIXL 1.5.1 with UCX over rc on soft-RoCE, as a user without the capability IPC_LOCK (watched for 60 s)",
    ),
    Finding(
        "NIXL-REGISTERED-AGAIN",
        "over RDMA add_remote_agent() refuses metadata with a new registration of memory that it knows "
        "(nixlNotAllowedError), and after that all metadata of that agent (nixlInvalidParamError)",
        "call remove_remote_agent() before new metadata of an agent is loaded; after such an error delete the agent "
        "that called add_remote_agent(), and create it again: remove_remote_agent() no longer helps",
        "an agent frees memory, registers memory at the same address again, and others load its metadata again",
        "NIXL 1.5.1 with UCX over rc and ud on soft-RoCE; not over tcp, where the remote key is the same",
    ),
    Finding(
        "NIXL-TELEMETRY-DISCONNECT-UNCOUNTED",
        "telemetry counts no error for a transfer that fails because the other agent has died",
        "do not alert on agent_errors_total alone: count the exceptions of transfer() and check_xfer_state() in the "
        "program, or alert on its own metric of failed transfers (vLLM: vllm:nixl_num_failed_transfers_total)",
        "agents die while others have transfers with them, and an alert or a dashboard watches agent_errors_total",
        "NIXL 1.4.1, 1.5.0 and 1.5.1 with UCX",
    ),
    Finding(
        "NIXL-TELEMETRY-REFUSAL-UNCOUNTED",
        "telemetry counts no error for a transfer that NIXL refuses because its two sides differ in length",
        "do not read agent_errors_total as the number of errors: count the exceptions of initialize_xfer() and "
        "make_prepped_xfer() in the program",
        "a program asks for transfers whose two sides differ in length or in the number of descriptors, and an alert "
        "or a dashboard watches agent_errors_total",
        "NIXL 1.4.1, 1.5.0 and 1.5.1; a transfer of unregistered memory or to an unknown agent is counted",
    ),
    Finding(
        "NIXL-TELEMETRY-OFF-RAISES",
        "if NIXL_TELEMETRY_ENABLE turns telemetry off, get_xfer_telemetry() raises nixlNoTelemetryError after a "
        "transfer that succeeded, also for agents with capture_telemetry=True (ai-dynamo/nixl#2266)",
        "unset NIXL_TELEMETRY_ENABLE in the pods of the engine, or set NIXL_TELEMETRY_ENABLE=y",
        "NIXL_TELEMETRY_ENABLE=n is set, as Dynamo's operator does, and an engine reads the telemetry of each "
        "transfer, as vLLM does: it then fails every request",
        "NIXL 1.4.0, 1.4.1 and 1.5.1; 1.1.0, 1.2.0, 1.3.1 and 1.3.2 ignore the value n",
    ),
    Finding(
        "NIXL-TELEMETRY-PORT-SHARED",
        "with the exporter prometheus, only the first process of a port is measured: a later one runs on without "
        "telemetry (ai-dynamo/nixl#1838)",
        "give each process a NIXL_TELEMETRY_PROMETHEUS_PORT of its own; or set NIXL_TELEMETRY_EXPORTER=prometheus_mp "
        "and NIXL_TELEMETRY_MULTIPROC_DIR=DIR, a folder that all processes of the host share (NIXL 1.5)",
        "several processes of one host have NIXL_TELEMETRY_EXPORTER=prometheus and the same port, such as the ranks of "
        "one engine",
        "NIXL 1.5.0 and 1.5.1; one line of the log says so",
    ),
)  # fmt: skip

#: Every known finding by its id.
FINDINGS = {finding.id: finding for finding in _ALL}


def known_finding(text: str) -> str:
    """Return ``text`` if it is the id of a known finding. :raises ValueError: if it is not."""
    if text not in FINDINGS:
        from difflib import get_close_matches

        near = get_close_matches(text.upper(), FINDINGS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"there is no finding {text!r}{hint}: expected {', '.join(FINDINGS)}")
    return text


def judge_finding(
    finding: Finding, *, occurs: bool, reason: str, affects: bool, acceptance: Acceptance | None, today: date
) -> Judgement:
    """Return the verdict of a check that looked for a finding.

    :param occurs: whether the defect was seen.
    :param reason: what was seen, as one sentence.
    :param affects: whether the defect affects this deployment. If it was only seen on processes that the check itself
        set up, it is a known limit: the check passes, and reports show it as a known limit.
    :param acceptance: the profile's acceptance of the finding; None: the profile does not accept it.
    :param today: the day by which an acceptance may have expired.
    """
    if not occurs:
        if acceptance is None:
            return Judgement(Verdict.PASS, reason, finding=finding.id)
        gone = f"the profile accepts this finding, but it no longer occurs: {reason}"
        return Judgement(Verdict.FAIL, gone, f"remove the [[accept]] of {finding.id} from the profile", finding.id)
    said = f"{finding.title}: {reason}"
    if acceptance is None and affects:
        return Judgement(Verdict.FAIL, said, finding.remedy, finding.id)
    if acceptance is None or (not affects and today <= acceptance.expires):
        return Judgement(Verdict.PASS, said, finding.remedy, finding.id, known_limit=True)
    if today > acceptance.expires:
        said = f"the profile's acceptance of it expired on {acceptance.expires} ({acceptance.reason}): {said}"
        remedy = f"{finding.remedy}; or give the [[accept]] of {finding.id} a later date in the profile, or remove it"
        return Judgement(Verdict.FAIL, said, remedy, finding.id)
    said = f"accepted finding, until {acceptance.expires} ({acceptance.reason}): {said}"
    return Judgement(Verdict.WARN, said, finding.remedy, finding.id)


class FindingError(NixlPluginError):
    """A known defect was observed.

    :param finding: id of the finding.
    :param reason: the observation that shows it.
    :param detail: evidence, such as the last lines of a log.
    :param remedy: what to do about this cause; empty for the finding's own remedy.
    """

    def __init__(self, finding: str, reason: str, detail: str = "", remedy: str = "") -> None:

        known = FINDINGS[finding]
        super().__init__(f"{known.title}: {reason}", remedy or known.remedy, detail)
        self.finding = finding
        self.seen = reason
