# SPDX-License-Identifier: Apache-2.0
"""Findings: known defects by their ids, what a profile accepts of them, and the verdict where one is looked for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from pytest_nixl.model.verdicts import Judgement, Verdict


@dataclass(frozen=True)
class Finding:
    """A known defect of NIXL or its tools.

    :param title: what it does.
    :param remedy: how to live with it.
    :param met_by: which deployments meet it.
    :param seen: the releases in which it was seen.
    """

    id: str
    title: str
    remedy: str
    met_by: str
    seen: str = "NIXL 0.9.0 to 1.5.1: every release that was tried"


@dataclass(frozen=True)
class Acceptance:
    """A finding that a profile accepts. ``expires`` is the last day on which it does."""

    id: str
    reason: str
    expires: date


_ALL = (
    Finding(
        "NIXL-ETCD-HTTPS-PLAINTEXT",
        "https:// in NIXL_ETCD_ENDPOINTS is read and then spoken in plaintext",
        "write http:// where the etcd speaks plaintext; for one behind TLS run `etcd grpc-proxy` beside the agent and "
        "give NIXL its address",
        "NIXL_ETCD_ENDPOINTS names an https:// member",
    ),
    Finding(
        "NIXL-ETCD-SILENT-FAILURE",
        "send_local_metadata() returns as after a success where nothing reached etcd; only stderr tells",
        "look for the key <namespace>/<agent>/metadata in etcd after publishing, and collect the stderr of every agent",
        "agents publish while etcd cannot be reached, or NIXL cannot read NIXL_ETCD_ENDPOINTS",
    ),
    Finding(
        "NIXL-ETCD-CREDENTIALS-DROPPED",
        "a user and password in NIXL_ETCD_ENDPOINTS are never sent: the member that has them is refused or left out",
        "take them out; let the etcd accept NIXL without a password on a network of its own, or use client "
        "certificates with `etcd grpc-proxy` beside the agent",
        "NIXL_ETCD_ENDPOINTS holds a user and password",
    ),
    Finding(
        "NIXL-ETCD-MEMBER-DROPPED",
        "a member of NIXL_ETCD_ENDPOINTS that cannot be read or resolved is left out without a word",
        "check each member by itself: `pytest-nixl endpoint URL`",
        "NIXL_ETCD_ENDPOINTS lists several members, and one cannot be read or resolved",
    ),
    Finding(
        "NIXL-ETCD-STALE-KEY",
        "metadata in etcd carries no lease: an agent that ends without invalidate_local_metadata() stays published",
        "withdraw before every end, and have what restarts agents delete <namespace>/<agent>/ of the dead; in etcd, "
        "compare the agents published with those alive",
        "agents are killed, or end without invalidate_local_metadata()",
    ),
    Finding(
        "NIXL-ETCD-RESTART-REFUSED",
        "who knew an agent cannot load the metadata of its successor of the same name",
        "call remove_remote_agent(name) before each fetch_remote_metadata(name) of an agent that may have restarted, "
        "or give every start a name of its own",
        "an agent restarts under its old name",
    ),
    Finding(
        "NIXL-ETCD-DUPLICATE-NAME",
        "two agents of one name overwrite each other's metadata without a word, and withdraw each other's",
        "make names unique: add the host and the process, or a random part",
        "two agents of one namespace have the same name",
    ),
    Finding(
        "NIXL-ETCD-SERIAL-FETCH",
        "the fetch of an agent that is not published holds up every later request of the same agent for 5 s",
        "fetch what is known to be published first, and wait for an agent's key in etcd before fetching it",
        "an agent fetches the metadata of one that is not published yet",
    ),
    Finding(
        "NIXL-ETCD-FETCH-STUCK",
        "a fetch while etcd is away ends an agent's exchange for good: with etcd back, nothing it is asked is done",
        "see that etcd answers before each fetch_remote_metadata, give NIXL every member of the etcd, and restart an "
        "agent whose stderr says 'failed to create a watch connection'",
        "an agent fetches while etcd cannot be reached",
    ),
    Finding(
        "NIXL-ETCD-WATCH-LOST",
        "after its connection to etcd was lost once, an agent never hears of what known agents withdraw",
        "when etcd has been away, make the agents anew, and until then call remove_remote_agent for those that have "
        "gone: neither that nor fetching again makes the watch anew",
        "the connection of an agent to etcd is cut, and other agents withdraw later",
    ),
    Finding(
        "NIXL-ETCD-NAMESPACE-SLASH",
        "the default namespace is not the documented one: agents without NIXL_ETCD_NAMESPACE publish under "
        "/nixl/agents//<agent>/, those with NIXL_ETCD_NAMESPACE=/nixl/agents under /nixl/agents/<agent>/",
        "set NIXL_ETCD_NAMESPACE to the same text for every agent of a deployment, or for none",
        "some agents have NIXL_ETCD_NAMESPACE=/nixl/agents and others have none",
    ),
    Finding(
        "NIXL-DEREGISTERED-KNOWN",
        "memory that its owner deregistered stays known to who fetched it, also after publishing and fetching again",
        "have the others call remove_remote_agent and fetch again before the memory is given away",
        "an agent deregisters memory that others have fetched, and goes on",
    ),
    Finding(
        "LIBFABRIC-NO-RECONNECT",
        "with LIBFABRIC an agent that was forgotten once cannot be reached again, though its metadata is loaded again: "
        "a transfer to it waits a minute for a handshake that the other does not send, and fails (ai-dynamo/nixl#1736)",
        "make the agent anew where it was withdrawn, invalidated or removed, and do not publish the old one again",
        "a LIBFABRIC agent is forgotten by another one, and that one loads its metadata again",
        "NIXL 1.5.0: earlier releases were not tried",
    ),
    Finding(
        "NIXLBENCH-RANK-TWICE",
        "nixlbench gives a rank twice after one answer of etcd was lost while its processes registered",
        "do not take a result of a run in which etcd was restarted, changed its leader or could not be reached",
        "etcd restarts, changes its leader or is cut off while the processes of nixlbench register",
        "every build of nixlbench that was tried",
    ),
    Finding(
        "VRAM-AS-HOST-MEMORY",
        "memory of a GPU is taken for host memory",
        "let UCX load its CUDA modules: UCX_MODULES, UCX_TLS and UCX_MODULE_DIR must not leave cuda out (`ucx_info -d` "
        "lists cuda_copy and cuda_ipc), libuct_cuda must find libcuda.so.1, and UCX must be built with CUDA; with "
        "memory that was not made by CUDA's own allocator set UCX_MEMTYPE_CACHE=n",
        "UCX does not load its CUDA modules, or the memory was not made by CUDA's own allocator",
        "any release of NIXL: it is the UCX that is loaded",
    ),
)  # fmt: skip

#: Every known finding by its id.
FINDINGS = {finding.id: finding for finding in _ALL}


def known_finding(text: str) -> str:
    """Return the id ``text`` where it is known. :raises ValueError: where there is no such finding."""
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

    :param occurs: whether the defect is there.
    :param reason: one sentence: what was seen.
    :param affects: whether the deployment meets the defect. One that was only seen on what we set up ourselves is a
        known limit, and no fault of this machine: the check passes, and reports name it as a known limit.
    :param acceptance: what the profile says of it; None: nothing.
    """
    if not occurs:
        if acceptance is None:
            return Judgement(Verdict.PASS, reason, finding=finding.id)
        gone = f"it is accepted by the profile and no longer occurs: {reason}"
        return Judgement(Verdict.FAIL, gone, f"remove the [[accept]] of {finding.id} from the profile", finding.id)
    said = f"{finding.title}: {reason}"
    if acceptance is None and affects:
        return Judgement(Verdict.FAIL, said, finding.remedy, finding.id)
    if acceptance is None or (not affects and today <= acceptance.expires):
        return Judgement(Verdict.PASS, said, finding.remedy, finding.id, known_limit=True)
    if today > acceptance.expires:
        said = f"its acceptance expired on {acceptance.expires} ({acceptance.reason}): {said}"
        remedy = f"{finding.remedy}; or give the [[accept]] of {finding.id} a later date in the profile, or remove it"
        return Judgement(Verdict.FAIL, said, remedy, finding.id)
    said = f"accepted finding, until {acceptance.expires} ({acceptance.reason}): {said}"
    return Judgement(Verdict.WARN, said, finding.remedy, finding.id)


class FindingError(NixlPluginError):
    """A known defect was observed.

    :param finding: id of the finding.
    :param reason: the observation that shows it.
    :param detail: evidence, such as the last lines of a log.
    """

    def __init__(self, finding: str, reason: str, detail: str = "") -> None:
        from pytest_nixl.model.findings import FINDINGS

        known = FINDINGS[finding]
        super().__init__(f"{known.title}: {reason}", known.remedy, detail)
        self.finding = finding
        self.seen = reason
