# SPDX-License-Identifier: Apache-2.0
"""An env file is read as its reader reads it: Docker Compose, ``docker run``, or a shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nixl.checks.connector.command_line import Launch, split_commands
from pytest_nixl.checks.connector.comparison import compare_connectors
from pytest_nixl.checks.connector.containers import ConfiguredEngine, read_engine
from pytest_nixl.checks.connector.env_files import EnvFile, read_for_compose, read_for_docker, read_for_shell

#: For each line: what Compose, docker run and a shell set NAME to. None: nothing; "refused": the file is refused.
FORMS = [
    ("NAME=VALUE", "VALUE", "VALUE", "VALUE"),
    ("NAME = VALUE", "VALUE", "refused", None),
    ("NAME =VALUE", "VALUE", "refused", None),
    ("NAME= VALUE", "VALUE", " VALUE", None),
    ("NAME=\tVALUE", "VALUE", "\tVALUE", None),
    ("  NAME=VALUE  ", "VALUE", "VALUE  ", "VALUE"),
    ("export NAME=VALUE", "VALUE", "refused", "VALUE"),
    ("export NAME = VALUE", "VALUE", "refused", None),
    ("NAME=", "", "", ""),
    ("NAME='a b'", "a b", "a b", "a b"),
    ('NAME="a b"', "a b", "a b", "a b"),
    ("NAME= 'a b'", "a b", " 'a b'", None),
    ("NAME='a\" # b' # c", 'a" # b', "'a\" # b' # c", 'a" # b'),
    (r'NAME="a\" # b"', 'a" # b', r"a\" # b", 'a" # b'),
    ("NAME=VALUE # c", "VALUE", "VALUE # c", "VALUE"),
    ("NAME=a#b", "a#b", "a#b", "a#b"),
    ("NAME=a=b", "a=b", "a=b", "a=b"),
    ("A=1\nNAME=$A${A}", "11", "$A${A}", "11"),
    ('A=1\nNAME="$A"', "1", "$A", "1"),
    ("NAME=1\nNAME=2", "2", "2", "2"),
    ("# NAME=1\n\n\t# A=1\nNAME=2\r\n# NAME=3", "2", "2", "2"),
]


@pytest.mark.parametrize(("text", "compose", "docker", "shell"), FORMS)
def test_each_reader_has_its_own_rules(text: str, compose: str, docker: str, shell: str | None) -> None:
    by_compose, by_shell = read_for_compose(text), read_for_shell(split_commands(text))
    assert by_compose is not None
    assert by_shell is not None
    blanks = ("NAME",) if "= " in text or "=\t" in text or " =" in text else ()
    assert (by_compose.variables["NAME"], by_compose.blanks) == (compose, blanks)
    assert (by_shell.variables.get("NAME"), by_shell.blanks) == (shell, blanks)
    if docker != "refused":
        assert read_for_docker(text)["NAME"] == docker
        return
    name = text.partition("=")[0]
    with pytest.raises(ValueError, match=f"^docker run refuses the name '{name}', which has a blank: write NAME=VALUE"):
        read_for_docker(text)


def test_what_only_one_reader_accepts() -> None:
    assert read_for_compose("A='1\n2' # c\nB=\"3\n4\"\nC=it's\n") == EnvFile({"A": "1\n2", "B": "3\n4", "C": "it's"})
    assert read_for_docker("A\nB='\nC=\"x'\nD=1") == {"B": "'", "C": "\"x'", "D": "1"}
    assert read_for_shell(split_commands("A=1 export_=2; export B=3 C=4")) == EnvFile(
        {"A": "1", "export_": "2", "B": "3", "C": "4"}
    )
    for text in ("just some words\n", "A=1\nmkdir a\n", "A\n", "1A=1"):
        assert read_for_compose(text) is None
        assert read_for_shell(split_commands(text)) is None
    assert read_for_shell(split_commands("A=1 mkdir a")) is None


@pytest.mark.parametrize(
    ("text", "launch"),
    [
        ("# c\nA=1\nexport VLLM_X='b'\n", Launch("vLLM", False, {}, "", {"A": "1", "VLLM_X": "b"}, has_options=False)),
        ("SGLANG_X=1\nDYN_X=2", Launch("SGLang", True, {}, "", {"SGLANG_X": "1", "DYN_X": "2"}, has_options=False)),
    ],
)
def test_an_env_file_tells_its_engine_by_its_variables(text: str, launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "variables"
    path.write_text(text)
    assert read_engine(str(path)) == ConfiguredEngine(str(path), (), launch)


_LAYOUT = "VLLM_KV_CACHE_LAYOUT"


@pytest.mark.parametrize(
    ("name", "text", "layout", "remark"),
    [
        ("a.env", "{}=NHD", "NHD", ""),
        ("a.env", "{} = NHD", "NHD", "it was left out, as Docker Compose and systemd do; docker run --env-file refuses "
         "or keeps it, and a shell runs that as a command"),
        ("variables", "export {}= 'NHD'", "NHD", "it was left out, as Docker Compose and systemd do; docker run "
         "--env-file refuses or keeps it, and a shell runs that as a command"),
        ("a.sh", "export {}='NHD'", "NHD", ""),
        ("a.sh", "{} = NHD", "HND", "a shell runs that as a command, and sets nothing"),
        ("variables", "#!/bin/sh\n{}= NHD", "HND", "a shell runs that as a command, and sets nothing"),
    ],
)  # fmt: skip
def test_blanks_that_readers_do_not_agree_on_are_told(
    name: str, text: str, layout: str, remark: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(f"{text.format(_LAYOUT)}\nVLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1\n")
    comparison = compare_connectors(*[read_engine(str(path))] * 2)
    assert [side.values[_LAYOUT].text for side in comparison.pair.sides] == [layout] * 2
    sentence = f"has a blank before or after the = of {_LAYOUT}: {remark}"
    assert comparison.unread == ((f"prefill {sentence}", f"decode {sentence}") if remark else ())


def test_the_env_files_of_docker_run_are_read_to_the_letter(tmp_path: Path) -> None:
    (tmp_path / "a.env").write_text("UCX_TLS= rc\nHF_HOME=/a\nVLLM_KV_CACHE_LAYOUT=NHD\n")
    (tmp_path / "b.env").write_text("HF_HOME=/b\n")
    path = tmp_path / "run.sh"
    run = "docker run --env-file a.env --env-file={} -e VLLM_KV_CACHE_LAYOUT=HND vllm/vllm-openai:v1 --model m\n"
    path.write_text(run.format("b.env"))
    engine = read_engine(str(path))
    assert engine.launch.environment == {"UCX_TLS": " rc", "HF_HOME": "/b", "VLLM_KV_CACHE_LAYOUT": "HND"}
    assert (engine.launch.has_environment, engine.unread) == (True, ())
    path.write_text(run.format("c.env"))
    engine = read_engine(str(path))
    assert engine.launch.environment == {"UCX_TLS": " rc", "HF_HOME": "/a", "VLLM_KV_CACHE_LAYOUT": "HND"}
    assert (engine.launch.has_environment, engine.unread) == (False, ("env file c.env",))
    path.write_text(run.replace("a.env", "c.env").format("b.env"))
    engine = read_engine(str(path))
    assert engine.launch.environment == {"HF_HOME": "/b", "VLLM_KV_CACHE_LAYOUT": "HND"}
    assert (engine.launch.has_environment, engine.unread) == (False, ("env file c.env",))
    path.write_text(run.format("b.env"))
    (tmp_path / "a.env").write_text("UCX_TLS = rc\n")
    with pytest.raises(ValueError, match=r"run\.sh: a\.env: docker run refuses the name 'UCX_TLS ', which has a blank"):
        read_engine(str(path))


def test_the_env_files_of_compose_are_read_as_compose_does(tmp_path: Path) -> None:
    (tmp_path / "a.env").write_text("UCX_TLS = rc # c\nHF_HOME='/a'\nVLLM_KV_CACHE_LAYOUT=NHD\n")
    (tmp_path / "b.env").write_text("HF_HOME= /b\n")
    path = tmp_path / "compose.yaml"
    service = "services:\n  a:\n    image: vllm/vllm-openai:v1\n    command: --model m\n    env_file: {}\n"
    path.write_text(service.format("a.env") + f"    environment: [{_LAYOUT}=HND]\n")
    engine = read_engine(str(path))
    assert engine.launch.environment == {"UCX_TLS": "rc", "HF_HOME": "/a", _LAYOUT: "HND"}
    assert (engine.launch.has_environment, engine.unread) == (True, ())
    path.write_text(service.format("[a.env, {path: b.env}, c.env]"))
    engine = read_engine(str(path))
    assert engine.launch.environment == {"UCX_TLS": "rc", "HF_HOME": "/b", _LAYOUT: "NHD"}
    assert (engine.launch.has_environment, engine.unread) == (False, ("env_file c.env",))
    path.write_text(service.format("[{path: b.env, format: raw}, {path: a.env, format: raw}]"))
    engine = read_engine(str(path))
    assert engine.launch.environment == {"HF_HOME": " /b"}
    assert engine.unread == ("env_file a.env",)
