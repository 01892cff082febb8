# SPDX-License-Identifier: Apache-2.0
"""Random secrets of each shape come out of no place of a record, and harmless values come out whole."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from helpers.secret_shapes import HARMLESS, PLACES, SHAPES, letters, visible_parts

from pytest_nixl import cli
from pytest_nixl.core.redaction import HIDDEN, hide_command, hider, is_recorded, recorded, redact, redact_value
from pytest_nixl.host.facts import read_environment
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.model.engine_backends import ALLOC_CONF, ENGINE_BACKENDS


@pytest.mark.parametrize(("around", "secret"), SHAPES, ids=[around for around, _ in SHAPES])
def test_a_random_secret_leaves_no_place_of_a_record(around: str, secret: Callable[[random.Random], str]) -> None:
    choice = random.Random(around)
    for _ in range(20):
        planted = secret(choice)
        text = around.format(planted)
        for number, write in enumerate(PLACES):
            written = write(text)
            assert not visible_parts(planted, written), (number, text, written)


NAMES = ("DB_CREDS", "NIXL_CRED", "DB_PW", "UNLOCK_PASSCODE", "WALLET_SEED", "SSHPASS", "DBPASS", "SENTRY_DSN",
         "SLACK_WEBHOOK", "SLACK_WEBHOOK_URL", "PGPASSWORD", "ETCDCTL_PASSWORD", "SLURM_JWT", "api_token",
         # The word of a secret counts at the end of another word.
         "NIXL_APITOKEN", "NIXL_DBPASSWORD", "NIXL_SECRETKEY", "nixl_authtokens", "UCX_AUTH", "X_SAS", "X_PAT",
         "X_COOKIE", "X_SIGNATURE", "X_BEARER", "X_AUTHORIZATION", "X_CONNECTION_STRING", "X_USER")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_with_the_name_of_a_secret_is_hidden(name: str) -> None:
    secret = letters(random.Random(name), 12)
    assert redact_value(name, secret) == HIDDEN
    assert hider({name: secret})(f"refused: {secret}") == f"refused: {HIDDEN}"
    assert secret not in hide_command(f"env {name}={secret} vllm serve")


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
    read = {*ALLOC_CONF, *(backend.variable for backend in ENGINE_BACKENDS if backend.variable)}
    for path in folder.glob("*.py"):
        module = import_module(f"pytest_nixl.checks.doctor.{path.stem}")
        names = re.findall(r"(?:\bget|environment\.get|steering\.get)\(([\w\"]+)[,)]", path.read_text(encoding="utf-8"))
        read |= {getattr(module, name, name.strip('"')) for name in names if name.isupper()}
    assert {"UCX_TLS", "FI_PROVIDER", "VLLM_ALL2ALL_BACKEND", "NIXL_PLUGIN_DIR"} <= read
    assert {name for name in read if not is_recorded(name)} <= SWITCHES


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
        code = cli.main([argument.replace("{tmp}", str(tmp_path)) for argument in command])
    except SystemExit as error:
        code = int(str(error.code))
    out, error_text = capsys.readouterr()
    assert (code, out) == (2, "")
    assert error_text.startswith("pytest-nixl")
    assert "Sw0rdfish1" not in error_text
    assert not list(tmp_path.iterdir())
