# SPDX-License-Identifier: Apache-2.0
"""Hide secrets in texts, by the name of a variable, by the shape of the text, and by the value of a known secret.

:func:`recorded` decides what of a variable may be kept: a variable is recorded if :func:`is_recorded` has its name.
:func:`redact` hides by shape, whatever wrote the text. :func:`hider` also hides the values that a process knows.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"

#: The scheme of a URL with what follows it, as a regular expression. Its length is bounded, because a search in a long
#: word would else take time that grows with the square of its length.
URL_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{0,63}://"

# What stands before the last @ of a URL is hidden, whatever is in it; the next URL begins after a separator. A URL
# whose user is hidden already is left as it is, because the sentence around it may have an @.
_NOT_NEXT = rf"(?![,;\s]+{URL_SCHEME})"
_IN_URL = re.compile(rf"(?P<scheme>{URL_SCHEME})(?!\*\*\*@)(?:{_NOT_NEXT}[^\n])*@")
# The same where no scheme tells that it is a URL. The digest of a container image is none, nor is the seed of an order
# of requests (``2:0.1.0@3ddcb001``), nor a pair of memory types with the numbers of GPUs (``VRAM@0:VRAM@3``).
_BARE = re.compile(
    rf"(?P<before>(?:^|[,;])[\"'(]{{0,2}})(?!(?:[A-Za-z_][A-Za-z0-9_]{{0,80}}=)?[\"'(]{{0,2}}{URL_SCHEME})"
    rf"(?!\d+:[\w#.]*@[0-9a-f]{{7}}|[\"'(]{{0,2}}\*\*\*@)"
    rf"(?:[^@/,;]+|[^@/:,;]+:(?:{_NOT_NEXT}\S)*)@(?!sha(?:256|512):|DIGEST|(?<=VRAM@)\d{{1,4}}(?![\w.]))"
)
_SPACES = re.compile(r"(\s+)")
#: A value that can be no secret: a number with a unit, a range of numbers, or a switch.
_HARMLESS = re.compile(
    r"[+-]?(?:0x[0-9a-f]{1,8}|[0-9]{1,9}(?:\.[0-9]{1,6})?)(?:[kmgt]?i?b?|[mun]?s|%)|[0-9]{1,9}[-:][0-9]{1,9}|"
    r"y|n|yes|no|on|off|true|false|auto|try|inf|none|default|enabled?|disabled?",
    re.IGNORECASE,
)

#: A variable with one of these words in its name contains a secret, or the path of one. The long words also count at
#: the end of another word, as in APITOKEN; RDMA's PKEY and RKEY are not secret, nor are BYPASS and COMPASS.
_NAMES = re.compile(
    r"(?:^|_)(?:(?:PW|PWD|AUTH|AUTHORIZATION|USER|BEARER|COOKIE|SIGNATURE|SAS|PAT|SEED|CONNECTION_STRING)|"
    r"(?![LPR]KEYS?(?:_|$))[A-Z0-9]{0,40}(?:PASSWD|PASSWORD|PASSPHRASE|PASSCODE|SECRETS?|TOKENS?|JWT|KEYS?|CREDENTIALS?|"
    r"CREDS?|DSN|WEBHOOKS?|(?<!BY)(?<!COM)PASS))(?:_|$)",
    re.IGNORECASE,
)
_NOT_SECRET = frozenset({"PWD", "USER"})
_SECRET_NAME = (
    r"(?:password|passwd|passphrase|passcode|token|secret|jwt|(?:access|secret|account|private|api|storage)[_-]?key|"
    r"shared[_-]?access[_-]?signature|signature|sig|x-amz-[a-z-]{1,40}|credentials?|creds?|"
    r"webhook(?:[_-]?url)?|auth)"
)
#: Words that are also met where there is no secret, such as ``pass=3`` and ``PWD=/home``.
_SHORT_WORD = r"(?:(?<!by)(?<!com)pass(?!=\d{1,3}\b)|(?<![a-z])(?:pwd|pw|dsn)(?!=/))"
_QUOTE = r"""\\{0,2}["']"""
#: A character of a value without quotes, and what may follow a separator in it: a separator also ends the value if a
#: name follows it, as in ``token=X&format=text``.
_PLAIN = r"""[^&;,\s"'\\]"""
_FOLLOWING = rf"[&;,]{{1,8}}(?![\w.-]{{1,40}}[=:]){_PLAIN}+"
#: A value up to the quote that began it, or without quotes up to the next separator. A command in ``$(…)`` is none.
_QUOTED = r"(?:(?!(?<!\\)(?P=quote))[^\n])+"
_VALUE = rf"(?P<quote>{_QUOTE})?)(?P<value>(?(quote){_QUOTED}|(?!\$\()(?:{_PLAIN}+|{_FOLLOWING})(?:{_FOLLOWING})*))"
#: A user with a password after a flag, and not the numbers of a user and a group.
_USER_FLAG_SHAPE = (
    rf"(?P<name>(?<![\w-])(?:-u|--(?:proxy-)?user)(?:{_QUOTE},\s{{0,4}}|[\s=]{{1,4}})"
    rf"(?={_QUOTE}|[^\s:\"'\\]{{1,99}}:[^\s/])(?!\d{{1,9}}:\d{{1,9}}(?![^\s\"'])){_VALUE}"
)
_USER_FLAG = re.compile(_USER_FLAG_SHAPE)
#: How a secret follows its name: in an HTTP header; after ``=``; after ``:`` in JSON, or as the rest of a line of YAML;
#: as the second of a pair; and as the word after a flag, also in a list of words. (Of our own flags :func:`hider` knows
#: the values.)
_SHAPES = tuple(
    re.compile(shape, re.IGNORECASE | re.MULTILINE)
    for shape in (
        rf"(?P<name>(?:authorization|cookie)(?:{_QUOTE})?\s{{0,4}}[:=]\s{{0,4}}(?:{_QUOTE})?)(?P<value>[^\"'\n\\]+)",
        r"(?P<name>\bbearer\s{1,4})(?P<value>[\w.~+/=-]{8,})",
        r"(?P<name>\bbasic\s{1,4})(?-i:(?=[A-Za-z+/_-]{0,200}(?:[0-9=]|[a-z][A-Z])))(?P<value>[\w+/=-]{8,})",
        rf"(?P<name>(?:{_SECRET_NAME}|{_SHORT_WORD})(?:{_QUOTE})?\s{{0,4}}=\s{{0,4}}{_VALUE}",
        rf"(?P<name>{_QUOTE}[\w.-]{{0,40}}?{_SECRET_NAME}{_QUOTE}\s{{0,4}}:\s{{0,4}}{_VALUE}",
        rf"(?P<name>{_QUOTE}[\w.-]{{0,40}}?{_SHORT_WORD}{_QUOTE}\s{{0,4}}:\s{{0,4}}"
        rf"(?P<quote>{_QUOTE}))(?P<value>{_QUOTED})",
        rf"(?P<name>[(\[]\s{{0,4}}{_QUOTE}[\w.-]{{0,40}}?(?:{_SECRET_NAME}|pwd|[_-]pass){_QUOTE}\s{{0,4}},\s{{0,4}}"
        rf"(?P<quote>{_QUOTE}))(?P<value>{_QUOTED})(?=(?P=quote)\s{{0,4}}[)\]])",
        rf"(?P<name>{_SECRET_NAME}:(?!:){_VALUE}",
        rf"(?P<name>^[\w\s-]{{0,40}}?{_SECRET_NAME}:[ \t]{{1,4}})(?P<value>\S+)(?=\s*$)",
        rf"(?P<name>(?<![\w-])(?:-(?!-)|--(?!nixl-))[\w-]{{0,40}}?{_SECRET_NAME}(?:{_QUOTE},\s{{0,4}}|\s{{1,4}})"
        rf"(?![-\s]|{_QUOTE}-){_VALUE}",
        _USER_FLAG_SHAPE,
        rf"(?P<name>\bsshpass\s{{1,4}}-p\s{{0,4}}{_VALUE}",
    )
)
#: A text without any of these has no such shape, and need not be searched for all of them.
_STEMS = (
    "pass",
    "token",
    "secret",
    "jwt",
    "key",
    "sig",
    "x-amz-",
    "cred",
    "webhook",
    "auth",
    "bearer",
    "pw",
    "dsn",
    "cookie",
    "basic",
    "-u",
)
#: Secrets that need no name, because their issuers begin them all alike, by that beginning. A private key ends with its
#: own last line, or where its text is cut off.
_ISSUED: Mapping[str, str] = {
    "PRIVATE KEY-----": r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:(?!-----)[\s\S])*(?:-----END [A-Z ]{0,40}-----)?",
    "eyJ": r"\beyJ[\w-]{8,}(?:\.[\w-]*){2,4}",
    "hf_": r"\bhf_[A-Za-z0-9]{16,}",
    "gh": r"\bgh[opsru]_[A-Za-z0-9]{16,}",
    "github_pat_": r"\bgithub_pat_\w{16,}",
    "glpat-": r"\bglpat-[\w-]{16,}",
    "dckr_pat_": r"\bdckr_pat_[\w-]{16,}",
    "AKIA": r"\bAKIA[A-Z0-9]{16}",
    "ASIA": r"\bASIA[A-Z0-9]{16}",
    "AIza": r"\bAIza[\w-]{30,}",
    "sk-": r"(?<![\w-])sk-[\w-]{20,}",
    "nvapi-": r"\bnvapi-[\w-]{16,}",
    "npm_": r"\bnpm_[A-Za-z0-9]{30,}",
    "pypi-": r"\bpypi-[\w-]{40,}",
    "hvs.": r"\bhvs\.[\w-]{16,}",
    "xox": r"\bxox[abeprs]-[\w-]{10,}",
    "hooks.slack.com": r"(?<=hooks\.slack\.com)/\w{1,20}/[\w/-]+",
    "/api/webhooks": r"(?<=/api/webhooks)/[\w/-]+",
    "webhook.office.com": r"(?<=webhook\.office\.com)/[\w/@-]+",
}
#: The key in a connection string of Azure, which may also be met alone.
_ACCOUNT_KEY = re.compile(r"(?:AccountKey|SharedAccessSignature)=([^;]+)", re.IGNORECASE)
_CREDENTIALS = re.compile(r"//([^/\s@]*(?:/[^/\s@]*)*?)@")
#: Shorter secrets are not searched for, because they are part of too many words.
_SHORTEST = 4
#: The characters of a shell command that is taken apart.
MOST_COMMAND = 4096
#: Harmless values of variables whose name sounds like a secret.
_PLAIN_VALUES = frozenset({"true", "false", "none", "null", "auto", "root", "default", "enabled", "disabled"})


def redact(text: str) -> str:
    """Replace each secret that its shape shows by ``***``; if it is ambiguous, hide more.

    Secrets are users and passwords in URLs, the values of parameters, fields and headers such as ``password=…``,
    ``"token": "…"`` and ``Authorization: …``, the words after flags such as ``--password``, and what an issuer of
    secrets marks by its beginning, such as ``hf_…``.
    """
    text = _without_users(text)
    for start, issued in _ISSUED.items():
        if start in text:
            text = re.sub(issued, HIDDEN, text)
    small = text.lower()
    # A few letters beyond ASCII count as letters of a stem, too.
    if text.isascii() and not any(stem in small for stem in _STEMS):
        return text
    for shape in _SHAPES:
        text = shape.sub(lambda match: f"{match['name']}{HIDDEN}", text)
    return text


def _without_users(text: str) -> str:
    if "@" not in text:
        return text
    parts = (_to_last_at(part, _BARE, r"\g<before>***@") for part in _SPACES.split(text))
    lines = (_to_last_at(line, _IN_URL, r"\g<scheme>***@") for line in "".join(parts).split("\n"))
    return "\n".join(lines)


def _to_last_at(text: str, secret: re.Pattern[str], instead: str) -> str:
    """Replace what is secret as far as the last ``@``.

    A search that goes on behind it would read to the end from every place, in time that grows with the square.
    """
    end = text.rfind("@") + len("@sha512:")
    return secret.sub(instead, text[:end]) + text[end:] if "@" in text else text


def is_secret(name: str) -> bool:
    """Return whether a variable of this name contains a secret."""
    return name not in _NOT_SECRET and _NAMES.search(name) is not None


def redact_value(name: str, value: str) -> str:
    """Return the value of a field or variable with its secrets hidden."""
    return HIDDEN if _has_secret(name, value) and value else redact(value)


def _has_secret(name: str, value: str) -> bool:
    """Return whether this value of a variable is secret: the seed of a wallet is, and that of random numbers is not."""
    return is_secret(name) and not (name.upper().endswith("SEED") and _HARMLESS.fullmatch(value))


def recorded(name: str, value: str) -> str:
    """Return what may be recorded of a variable: its value if its name is known, or if it is a number or a switch.

    Any other value of an unknown variable may be a secret, and is hidden.
    """
    return redact_value(name, value) if not value or is_recorded(name) or _HARMLESS.fullmatch(value) else HIDDEN


def hide_command(command: str) -> str:
    """Hide the secrets in a shell command: values of variables and flags with secrets, and what :func:`redact` hides.

    A command of more than :data:`MOST_COMMAND` characters is hidden whole, because its parts would take too long.
    """
    if len(command) > MOST_COMMAND:
        return HIDDEN
    try:
        arguments = shlex.split(redact(command))
    except ValueError:  # its quotes are not balanced, so its words are unknown
        return HIDDEN
    hidden: list[str] = []
    after_flag = False
    for argument in arguments:
        name, sign, _ = argument.partition("=")
        secret = is_secret(name.lstrip("-").replace("-", "_"))
        if after_flag and not argument.startswith("-"):
            hidden.append(HIDDEN)
        else:
            hidden.append(f"{name}={HIDDEN}" if sign and secret else redact(argument))
        after_flag = secret and not sign and argument.startswith("-")
    return shlex.join(hidden)


def hider(environ: Mapping[str, str], *texts: str) -> Callable[[str], str]:
    """Return a function that hides the secrets of these environment variables in any text.

    :param texts: texts whose secrets are to be hidden too, such as the values of options.
    """
    candidates: set[str] = set()
    for name, value in environ.items():
        if _has_secret(name, value):
            candidates |= {value, value.partition(":")[2], *_ACCOUNT_KEY.findall(value)}
    for value in (*environ.values(), *texts):
        text = value[:MOST_COMMAND]
        values = {match["value"] for shape in _SHAPES for match in shape.finditer(text)}
        # That of ``--user`` has the password behind the colon.
        candidates |= values | {match["value"].partition(":")[2] for match in _USER_FLAG.finditer(text)}
        candidates |= {
            match[0] for start, shape in _ISSUED.items() if start in text for match in re.finditer(shape, text)
        }
        for part in _CREDENTIALS.findall(value):
            user, _, password = part.partition(":")
            candidates |= {part, password, unquote(password)} if password else {user, unquote(user)}
    secrets = sorted(
        (secret for secret in candidates if len(secret) >= _SHORTEST and secret not in _PLAIN_VALUES),
        key=len,
        reverse=True,
    )
    pattern = re.compile("|".join(map(re.escape, secrets))) if secrets else None

    def hide(text: str) -> str:
        return redact(text) if pattern is None else redact(pattern.sub(HIDDEN, text))

    return hide


def hide_all(value: Any, hide: Callable[[str], str]) -> Any:
    """Hide secrets in every text of JSON values.

    :param hide: the function that hides secrets in one text.
    """
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, dict):
        return {key: hide_all(part, hide) for key, part in value.items()}
    if isinstance(value, list):
        return [hide_all(part, hide) for part in value]
    return value


_RECORDED_NAMES = """
LD_LIBRARY_PATH LD_PRELOAD HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY GRPC_PROXY http_proxy https_proxy all_proxy
no_proxy no_grpc_proxy grpc_proxy GRPC_DNS_RESOLVER GRPC_ENABLE_FORK_SUPPORT GRPC_POLL_STRATEGY GRPC_TRACE
GRPC_VERBOSITY
PYTEST_NIXL_DRIVER_STANDIN PYTEST_NIXL_ENDING PYTEST_NIXL_IMAGE PYTEST_NIXL_LIBCUDA PYTEST_NIXL_LIBCUDART
PYTEST_NIXL_LIBFABRIC PYTEST_NIXL_LIBHWLOC PYTEST_NIXL_RUN_DIRECTORY CONTAINER_IMAGE IMAGE ETCD_ENDPOINTS ETCDCTL_API
ETCDCTL_CACERT
ETCDCTL_CERT ETCDCTL_ENDPOINTS ETCD_CPP_API_DISABLE_URI_VALIDATION RDMAV_DRIVERS IBV_FORK_SAFE MLX5_SINGLE_THREADED
GDRCOPY_LOG_LEVEL CUDA_CACHE_PATH CUDA_DEVICE_ORDER CUDA_HOME CUDA_MODULE_LOADING CUDA_MPS_LOG_DIRECTORY
CUDA_MPS_PIPE_DIRECTORY CUDA_PATH CUDA_ROOT CUDA_VERSION CUDA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES
NVIDIA_PRODUCT_NAME NVIDIA_REQUIRE_CUDA NVIDIA_VISIBLE_DEVICES OMP_PLACES OMP_PROC_BIND OMP_SCHEDULE MALLOC_CONF
PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF VLLM_ALL2ALL_BACKEND VLLM_NIXL_SIDE_CHANNEL_HOST
LMCACHE_NIXL_BACKENDS MX_NIXL_BACKEND SGLANG_DISAGGREGATION_NIXL_BACKEND TRTLLM_NIXL_KVCACHE_BACKEND
SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_NODELIST SLURM_STEP_ID HOSTNAME KUBERNETES_SERVICE_HOST NODE_NAME POD_NAME
POD_NAMESPACE
NIXL_BACKEND NIXL_CONFIG_FILE NIXL_ETCD_ENDPOINTS NIXL_ETCD_NAMESPACE NIXL_HOME NIXL_IMAGE NIXL_IMAGE_DIGEST
NIXL_LOG_LEVEL NIXL_NODE_NAME NIXL_PLUGIN_DIR NIXL_PODINFO NIXL_PREFIX NIXL_ROOT NIXL_TARGET_SEG_TYPE
NIXL_TCPSTORE_ENDPOINT NIXL_TELEMETRY_DIR NIXL_TELEMETRY_ENABLE NIXL_TELEMETRY_ENABLED_METRICS NIXL_TELEMETRY_EXPORTER
NIXL_TELEMETRY_HISTOGRAM_BUCKETS_US NIXL_TELEMETRY_MULTIPROC_DIR NIXL_TELEMETRY_RUN_INTERVAL NIXL_UCX_EXPECTED_SONAME
NIXL_VERSION NIXL_WORKER_TYPE
UCX_TLS UCX_PROTOS UCX_NET_DEVICES UCX_SHM_DEVICES UCX_ACC_DEVICES UCX_SELF_DEVICES UCX_ALLOC_PRIO UCX_ATOMIC_MODE
UCX_BCOPY_BW UCX_BCOPY_THRESH UCX_CONFIG_DIR UCX_DISTANCE_BW UCX_DISTANCE_LAT UCX_DEBUG_SIGNO UCX_ERROR_SIGNALS
UCX_FENCE_MODE UCX_GDB_COMMAND UCX_HANDLE_ERRORS UCX_KEEPALIVE_INTERVAL UCX_LOG_FILE UCX_LOG_FILE_FILTER UCX_LOG_LEVEL
UCX_LOG_LEVEL_TRIGGER UCX_MAX_EAGER_RAILS UCX_MAX_RNDV_RAILS UCX_MEM_EVENTS UCX_MEM_LOG_LEVEL UCX_MEM_MMAP_HOOK_MODE
UCX_MEM_CUDA_HOOK_MODE UCX_MEM_MODULE_UNLOAD_PREVENT_MODE UCX_MEMTRACK_DEST UCX_MEMTYPE_CACHE
UCX_MEMTYPE_REG_WHOLE_ALLOC_TYPES UCX_MODULES UCX_MODULE_DIR UCX_MODULE_LOG_LEVEL UCX_PLUGIN_PATH UCX_PROFILE_FILE
UCX_PROFILE_MODE UCX_PROTO_INFO UCX_PROTO_INFO_DIR UCX_RCACHE_MEM_PRIO UCX_REG_NONBLOCK_MEM_TYPES
UCX_RNDV_FRAG_ALLOC_COUNT UCX_RNDV_FRAG_MEM_TYPE UCX_RNDV_FRAG_MEM_TYPES UCX_RNDV_FRAG_SIZE UCX_RNDV_SCHEME
UCX_RNDV_THRESH UCX_RX_MPOOL_SIZES UCX_SELECT_DISTANCE_MD UCX_SOCKADDR_TLS_PRIORITY UCX_TOPO_PRIO UCX_VFS_SOCK_PATH
UCX_VFS_THREAD_AFFINITY
FI_PROVIDER FI_PROVIDER_PATH FI_LOG_LEVEL FI_LOG_PROV FI_LOG_SUBSYS FI_MR_CACHE_MONITOR FI_EFA_IFACE FI_HMEM
FI_HMEM_CUDA_ENABLE_XFER FI_OFI_RXM_DEF_TCP_WAIT_OBJ FI_SOCKETS_IFACE FI_TCP_IFACE FI_VERBS_IFACE FI_VERBS_DEVICE_NAME
FI_CXI_DEVICE_NAME FI_CXI_RX_MATCH_MODE FI_UNIVERSE_SIZE
NCCL_ALGO NCCL_CROSS_NIC NCCL_DEBUG NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS NCCL_IB_HCA NCCL_NET NCCL_NET_GDR_LEVEL
NCCL_NET_PLUGIN NCCL_P2P_LEVEL NCCL_PROTO NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_TOPO_FILE NCCL_VERSION
"""
_RECORDED = frozenset(_RECORDED_NAMES.split())
#: Variables that UCX has for each transport, such as ``UCX_RC_VERBS_PATH_MTU``.
_OF_TRANSPORTS = re.compile(
    r"UCX_(?:SELF|TCP|SYSV|POSIX|CMA|KNEM|XPMEM|(?:IB|RC|DC|UD|SRD|GGA)(?:_(?:VERBS|MLX5|GDA))?|CUDA(?:_COPY|_IPC)?|GDR_COPY|"
    r"ROCM(?:_COPY|_IPC)?|ZE_COPY|EFA)_(?:ADDR_TYPE|AF_PRIO|ALLOC|AR_ENABLE|BW|DEVICE_SPECS|DIR|ERROR_HANDLING|FAILURE|FENCE|"
    r"FLUSH_MODE|GID_INDEX|HUGETLB_MODE|LID_PATH_BITS|MLX5_DEVX_OBJECTS|MMIO_MODE|ODP_MEM_TYPES|PATH_MTU|PCI_BW|PKEY|"
    r"PORT_RANGE|ROCE_REACHABILITY_MODE|ROCE_SUBNETS|SRQ_TOPO|SUBNET_PREFIX|TX_MIN_SGE|MEM_REG_GROWTH|MEM_REG_OVERHEAD)"
)


def is_recorded(name: str) -> bool:
    """Return whether values of this variable are recorded as they are."""
    return name in _RECORDED or _OF_TRANSPORTS.fullmatch(name) is not None
