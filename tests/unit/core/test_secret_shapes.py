# SPDX-License-Identifier: Apache-2.0
"""Random secrets of each shape come out of no place of a record, and harmless values come out whole."""

from __future__ import annotations

import ast
import base64
import json
import random
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_nixl import cli
from pytest_nixl.core.alloc_conf import ALLOC_CONF
from pytest_nixl.core.redaction import HIDDEN, hide_all, hide_command, hider, recorded, redact, shown
from pytest_nixl.core.variables import is_known
from pytest_nixl.host.driver_questions import VISIBLE_DEVICES
from pytest_nixl.host.environment import read_environment
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.model.nixl_releases import TELEMETRY_VARIABLE
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
    lambda text: shown("UCX_TLS", text),
    lambda text: recorded("UCX_LOG_FILE", text),
    lambda text: hide_command(text),
    lambda text: str(read_environment(FactsRoot(), {"NIXL_IMAGE": text, "NIXL_CONFIG_FILE": text})),
    lambda text: str(gather("", {"nixl": "1"}, {"UCX_TLS": text}).plain()),
    lambda text: hider({"A": text})(f"again {text}"),
    lambda text: hider({}, text)(f"again {text}"),
)


@pytest.mark.parametrize(("around", "secret"), SHAPES, ids=[around for around, _ in SHAPES])
def test_a_random_secret_leaves_no_place_of_a_record(around: str, secret: Callable[[random.Random], str]) -> None:
    choice = random.Random(around)
    for _ in range(20):
        planted = secret(choice)
        text = around.format(planted)
        parts = [part for part in planted.replace("\n", ";").replace("&", ";").replace(",", ";").split(";") if part]
        for number, write in enumerate(PLACES):
            written = write(text)
            shown_parts = [part for part in parts if part in written and not part.startswith("-----")]
            assert not shown_parts, (number, text, written)


NAMES = ("DB_CREDS", "NIXL_CRED", "DB_PW", "UNLOCK_PASSCODE", "WALLET_SEED", "SSHPASS", "DBPASS", "SENTRY_DSN",
         "SLACK_WEBHOOK", "SLACK_WEBHOOK_URL", "PGPASSWORD")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_with_the_name_of_a_secret_is_hidden(name: str) -> None:
    secret = letters(random.Random(name), 12)
    assert shown(name, secret) == HIDDEN
    assert hider({name: secret})(f"refused: {secret}") == f"refused: {HIDDEN}"
    assert secret not in hide_command(f"env {name}={secret} vllm serve")


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
)


@pytest.mark.parametrize("text", HARMLESS)
def test_a_harmless_text_comes_out_whole(text: str) -> None:
    assert redact(text) == text
    assert hider({"RANDOM_SEED": "42", "TORCH_SEED": "2024"})(text) == text


def sentences(source: str) -> Iterator[str]:
    """Yield the texts of a module, with a number for each value that is put into them."""
    tree = ast.parse(source)
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "7" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


def test_no_sentence_of_the_package_reads_like_a_secret() -> None:
    """Else a message or a remedy would come out with a hole. A text with an @ may be a pattern or a decorator."""
    package = Path(cli.__file__).parents[1]
    files = [path for path in package.rglob("*.py") if path.name != "redaction.py"]
    texts = [text for path in files for text in sentences(path.read_text(encoding="utf-8")) if "@" not in text]
    assert len(texts) > 10_000
    assert [text for text in texts if redact(text) != text] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512"),
        ("VLLM_ALL2ALL_BACKEND", "deepep_low_latency"),
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1"),
        ("TORCH_SEED", "2024"),
    ],
)
def test_a_value_that_checks_judge_is_recorded_as_it_is(name: str, value: str) -> None:
    assert recorded(name, value) == value
    steering = read_environment(FactsRoot(), {name: value}).steering
    assert steering in ({}, {name: value})


#: What checks read of variables that are not in the table: a switch, or a number.
SWITCHES = {
    "FI_EFA_USE_DEVICE_RDMA", "FI_HMEM_DISABLE_P2P", "RDMAV_FORK_SAFE", "UCX_IB_GID_INDEX", "UCX_IB_GPU_DIRECT_RDMA",
}  # fmt: skip


def test_every_variable_that_a_check_reads_is_recorded_as_it_is() -> None:
    """A check that reads ``***`` judges nothing."""
    folder = Path(cli.__file__).parents[1] / "checks" / "doctor"
    read = set(ALLOC_CONF)
    for path in folder.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        constants = {"VISIBLE_DEVICES": VISIBLE_DEVICES, "TELEMETRY_VARIABLE": TELEMETRY_VARIABLE}
        constants |= dict(re.findall(r'^(_?[A-Z0-9_]+) = "([A-Z0-9_]+)"$', text, re.MULTILINE))
        names = re.findall(r"(?:\bget|environment\.get|steering\.get)\(([\w\"]+)", text)
        read |= {constants.get(name, name.strip('"')) for name in names if name.isupper()}
    assert {"UCX_TLS", "FI_PROVIDER", "VLLM_ALL2ALL_BACKEND", "NIXL_PLUGIN_DIR"} <= read
    assert {name for name in read if not is_known(name)} <= SWITCHES


@pytest.mark.parametrize(
    "repeated",
    [
        "-u ",
        "pass=",
        "pwd='",
        "cookie:",
        "basic ",
        "eyJ.",
        "-----BEGIN PRIVATE KEY-----",
        "['token', '",
        "token=;",
        "hf_",
    ],
)
def test_many_beginnings_of_shapes_take_time_that_grows_with_the_length(repeated: str) -> None:
    """With a search that starts again at each of them this would take minutes."""
    redact(repeated * (1 << 15))


@pytest.mark.parametrize(
    "command",
    [
        ("init", "{tmp}/new", "--image", "me:Sw0rdfish1@registry/image"),
        ("explain", "it has password=Sw0rdfish1"),
        ("report", "me:Sw0rdfish1@image", "{tmp}/page.html"),
        ("doctor", "--unknown", "Sw0rdfish1"),
        ("doctor", "--unknown=Sw0rdfish1"),
        ("init", "--nodes", "password=Sw0rdfish1"),
    ],
    ids=" ".join,
)
def test_an_error_of_the_command_shows_no_secret(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main([word.replace("{tmp}", str(tmp_path)) for word in command])
    except SystemExit as error:
        code = int(str(error.code))
    out, error_text = capsys.readouterr()
    assert (code, out) == (2, "")
    assert error_text.startswith("pytest-nixl")
    assert "Sw0rdfish1" not in error_text
    assert not list(tmp_path.iterdir())
