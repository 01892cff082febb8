# SPDX-License-Identifier: Apache-2.0
"""Secrets of each shape, the texts around them, the places of a record that may show them, and harmless texts."""

from __future__ import annotations

import base64
import json
import random
import string
from collections.abc import Callable

from pytest_nixl.core.redaction import hide_all, hide_command, hider, recorded, redact, redact_value
from pytest_nixl.host.facts import read_environment
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.store.provenance import gather

_LETTERS = string.ascii_letters + string.digits


def letters(choice: random.Random, count: int, alphabet: str = _LETTERS) -> str:
    return "".join(choice.choices(alphabet, k=count))


def password(choice: random.Random) -> str:
    """Return a password whose parts are each long enough to be searched for, between the separators of other texts."""
    return choice.choice(";&,").join(letters(choice, 9) for _ in range(choice.randint(1, 3)))


def token(choice: random.Random) -> str:
    return letters(choice, 24)


def basic(choice: random.Random) -> str:
    return base64.b64encode(f"{letters(choice, 6)}:{letters(choice, 12)}".encode()).decode()


def private_key(choice: random.Random) -> str:
    lines = "\n".join(letters(choice, 64) for _ in range(3))
    kind = choice.choice(("", "RSA ", "OPENSSH ", "EC "))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{lines}\n-----END {kind}PRIVATE KEY-----"


def web_token(choice: random.Random) -> str:
    return f"eyJ{letters(choice, 20)}.eyJ{letters(choice, 30)}.{letters(choice, 43)}"


#: What stands around a secret, by the shape of the secret.
SHAPES: tuple[tuple[str, Callable[[random.Random], str]], ...] = (
    *((f"{name}={{}}", password)
      for name in ("password", "pass", "pwd", "passcode", "cred", "WEBHOOK_URL", "PGPASS", "dsn")),
    ("token:{}", token),
    ("Server=h;Uid=me;Pwd={};Port=1", password),
    ("http://h:1/metrics?token={}&format=text", token),
    ("password='{}'", password),
    ('{{"passcode": "{}"}}', password),
    ('{{"pass": "{}"}}', password),
    ('("password", "{}")', password),
    ("['db_password', '{}']", password),
    ("Authorization: Basic {}", basic),
    ("the proxy refuses Basic {} of this user", basic),
    ("Cookie: session={}", token),
    ("Set-Cookie: id={}; Secure", token),
    ("'cookie': 'id={}'", token),
    ("curl -u me:{} http://h", token),
    ("curl --user me:{} http://h", token),
    ("curl --user=me:{} http://h", token),
    ("['curl', '-u', 'me:{}']", token),
    ("sshpass -p {} ssh h", token),
    ("http://me:{}@h:1", token),
    ("pull me:{}@registry.example/image:1", token),
    ("'me:{}@registry.example/image:1' is refused", token),
    ("the key {} is refused", private_key),
    ("the file has {}", web_token),
    *((f"the server refuses {start}{{}}", token)
      for start in ("hf_", "ghp_", "github_pat_", "glpat-", "dckr_pat_", "sk-", "nvapi-", "hvs.",
                    "xoxb-")),
    *((f"the server refuses {start}{{}}", lambda choice: letters(choice, 50))
      for start in ("AIza", "npm_", "pypi-")),
    ("https://example.webhook.office.com/webhookb2/{}", token),
    *((f"the server refuses {start}{{}}", lambda choice: letters(choice, 16, string.ascii_uppercase))
      for start in ("AKIA", "ASIA")),
    ("https://hooks.slack.com/services/T0/B0/{}", token),
    ("https://discord.com/api/webhooks/1/{}", token),
)  # fmt: skip

#: What a record has around a text.
PLACES: tuple[Callable[[str], str], ...] = (
    redact,
    hider({}),
    lambda text: redact(f"error: {text}\nremedy: none"),
    lambda text: redact(repr(text)),
    lambda text: redact(json.dumps({"reason": text})),
    lambda text: json.dumps(hide_all({"results": [{"reason": text, "remedy": f"see {text}"}]}, redact)),
    lambda text: redact_value("UCX_TLS", text),
    lambda text: recorded("UCX_LOG_FILE", text),
    lambda text: hide_command(text),
    lambda text: str(read_environment(FactsRoot(), {"NIXL_IMAGE": text, "NIXL_CONFIG_FILE": text})),
    lambda text: str(gather("", {"nixl": "1"}, {"UCX_TLS": text}).plain()),
    lambda text: hider({"A": text})(f"again {text}"),
    lambda text: hider({}, text)(f"again {text}"),
)

#: Texts that checks and people need.
HARMLESS = (
    "pass=3 fail=2",
    "PWD=/home/me",
    "OLDPWD=/root",
    "bypass=yes",
    "compass=north",
    "basic functionality of an agent",
    "basic authentication is required",
    "docker run --user 1000:1000 image",
    "docker run -u 0:0 image",
    "python -u script.py",
    "a high rate of gh_actions",
    "expandable_segments:True",
    "rc_mlx5/mlx5_0:1, tcp/eth0",
    "UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1",
    "disk-0123456789012345678901234 is full",
    "the remote key (rkey) of 0x8001 is refused",
    "UCX:num_workers=4,LIBFABRIC:num_threads=2",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "https://github.com/ai-dynamo/nixl/issues/1",
    "task-01234567890123456789",
    "expected 'token', 'password' or 'none'",
    "suites/bandwidth/test_bandwidth.py::test_bandwidth[UCX-WRITE-VRAM@0:VRAM@3-64KiB]",
    "UCX WRITE DRAM:VRAM@3 64KiB, UCX READ VRAM@0:VRAM@3 of 4KiB: 2 GB/s",
    '{"PASS": 20, "REGRESSED": 1}',
    "('pass', 'fail')",
    '["PASS", "FAIL"]',
    "run `export NIXL_GROUP_TOKEN=$(openssl rand -hex 16)` on one rank",
    "expected REPOSITORY[:TAG][@DIGEST]",
    "all members have the same clock and the same option --auth-token",
    "another --nixl-group-token, or none",
    "the group has no --nixl-group-token, or none",
    "seed 42 of the requests",
    "2.5 GB/s of 10 GB/s; 12.3 us; pass",
    "quay.io/coreos/etcd:v3.5.18@sha256:0123abc",
    "no --nixl-group-token: the ranks trust everyone who can write to their etcd; set NIXL_GROUP_TOKEN",
    "the password is missing",
    "'/etc/passwd': expected a directory",
    "etcd endpoint 'http://***@h:1' has one of / @ ? # in its user or password",
    "tests/test_auth.py::TestToken::test_one",
    "design=4 max_tokens=4096",
    "  seed 2:0.1.0#1.1@3ddcb001",
    "NIXL_ETCD_ENDPOINTS=http://***@127.0.0.1:2379: 3 of 3 answer",
    "the etcd asks for a password: give --nixl-etcd-user",
)


def visible_parts(planted: str, written: str) -> list[str]:
    """Return the parts of a secret that a text shows: a separator of other texts may divide it."""
    parts = planted.replace("\n", ";").replace("&", ";").replace(",", ";").split(";")
    return [part for part in parts if part and part in written and not part.startswith("-----")]
