# SPDX-License-Identifier: Apache-2.0
"""A shell script is read as a shell reads it: which engines it starts, with which options, variables and containers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pytest_nixl import cli
from pytest_nixl.checks.connector.command_line import (
    Launch,
    ScriptError,
    expand,
    is_resolved,
    launches,
    script_launches,
    split_commands,
)
from pytest_nixl.checks.connector.comparison import compare_connectors
from pytest_nixl.checks.connector.containers import read_engine
from pytest_nixl.checks.connector.engine_fields import named_releases
from pytest_nixl.checks.connector.shell_functions import called_body, take_functions
from pytest_nixl.model.verdicts import Verdict

_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
_NIXL = """--kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'"""
_START = f"vllm serve m {_NIXL}"


def script(folder: Path, name: str, text: str) -> str:
    """Write one side as a shell script."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def parts(started: Sequence[Launch], text: str) -> list[dict[str, Any]]:
    """Return what each launch has beside the usual: vLLM, started by the whole text, and nothing else."""
    usual = Launch("vLLM", False, {}, script=text)
    names = [field.name for field in fields(Launch)]
    return [{n: getattr(launch, n) for n in names if getattr(launch, n) != getattr(usual, n)} for launch in started]


#: A script, and of each engine that it starts what differs from vLLM without options and variables.
_READ: list[tuple[str, list[dict[str, Any]]]] = [
    ("vllm serve m", [{"model": "m"}]),
    ("vllm run m", []),
    ("/opt/bin/vllm serve m", [{"model": "m"}]),
    ("numactl -N 0 python3 -m vllm.entrypoints.openai.api_server --model m", [{"options": {"--model": ["m"]}}]),
    ("python -m vllm.entrypoints.cli.main serve m --port 1", [{"options": {"--port": ["1"]}, "model": "m"}]),
    *((f"{start} --tp 1; ssh x '{start} --tp 2'", [
        {**engine, "options": {"--tp": ["1"]}},
        {**engine, "options": {"--tp": ["2"]}, "script": f"{start} --tp 2", "place": 1},
    ]) for start, engine in (
        ("vllm serve", {}), ("python -m vllm.entrypoints.openai.api_server", {}),
        ("sglang serve", {"engine": "SGLang"}), ("python -m sglang.launch_server", {"engine": "SGLang"}),
        ("python3 -m dynamo.vllm.main", {"dynamo": True}),
        ("python3 -m dynamo.sglang", {"engine": "SGLang", "dynamo": True}),
        ("python3 -m dynamo.trtllm", {"engine": "TensorRT-LLM", "dynamo": True}))),
    ("nohup vllm serve m; exec vllm serve n", [{"model": "m"}, {"model": "n"}]),
    # An option that only one engine has tells which engine it is.
    ("start --kv_transfer_config={} m", [{"options": {"--kv-transfer-config": ["{}"]}}]),
    ("start --kv-transfer-config.kv_role a", []),
    # Options
    ('vllm serve --a 1 --a=2 --b_c.d_e 3 -tp 4 --f --g -1 m n --connector x y -h "" --i=j:k=l',
     [{"options": {"--a": ["1", "2"], "--b-c.d_e": ["3"], "-tp": ["4"], "--f": [""], "--g": ["-1"],
                   "--connector": ["x y"], "-h": [""], "--i": ["j:k=l"]}, "environment": {"k": "$(k)"}}]),
    ("vllm serve m --x 1 -- --y 2", [{"options": {"--x": ["1"], "--y": ["2"]}, "model": "m"}]),
    ("vllm serve m --port $(a|b) --seed `a&b` --host \"$(c \"d\" ')')\" --x 1",
     [{"options": {"--port": ["${a\u00a0b}"], "--seed": ["`a\u00a0b`"],
                   "--host": ["${c\u00a0\u00a0d\u00a0\u00a0\u00a0}\u00a0}"], "--x": ["1"]}, "model": "m"}]),
    ('vllm serve m --port=1 $A -x $B ${C[@]} "${D[*]}" $@ --y=$E $(cat f) `cat f` $A',
     [{"options": {"--port": ["1"], "-x": ["$B"], "--y": ["$E"]}, "model": "m",
       "unknown": ("$A", "$C", "$D", "$@", "$(cat f)", "`cat f`")}]),
    ("vllm serve $(cat f) --x 1", [{"options": {"--x": ["1"]}, "model": "${cat\u00a0f}"}]),
    ("cat x | xargs vllm serve m $A", [{"model": "m", "unknown": ("what xargs reads", "$A")}]),
    ('vllm serve m $A "${B[@]}" --port $PORT "$@" $A ${C[*]:1} ${@:2}',
     [{"options": {"--port": ["$PORT"]}, "model": "m", "unknown": ("$A", "$B", "$@", "$C", "${@:2}")}]),
    # Variables
    ("A=1 B=$A vllm serve m --port $B$C --host ${D:-h} --seed ${D-s} --x ${E:=e}",
     [{"options": {"--port": ["1$C"], "--host": ["h"], "--seed": ["s"], "--x": ["e"]}, "model": "m",
       "environment": {"A": "1", "B": "1", "E": "$(E)"}}]),
    ("export A=1; env B=2 numactl C=3 vllm serve m", [{"model": "m", "environment": {"A": "1", "B": "2", "C": "3"}}]),
    ("A=0; if x; then A=1; B=2; fi; C=3; vllm serve m",
     [{"model": "m", "environment": {"A": "$(A)", "B": "2", "C": "3"}}]),
    ("case x in a) A=0;; b) A=1; B=2;; esac; B=3; vllm serve m",
     [{"model": "m", "environment": {"A": "$(A)", "B": "3"}}]),
    ("A=0; if x; then A=0; fi; A=2; vllm serve m", [{"model": "m", "environment": {"A": "2"}}]),
    ("=x vllm serve m", [{"model": "m"}]),
    ("A+=1; echo NODE_IPx $NODE_IQ ${NODE_IR} --NODE_IS $(NODE_IT); read NODE_IU; [ a == b ]; x --tls=x $B=2; "
     ": ${C:=3}; vllm serve m", [{"model": "m", "environment": {"A": "$(A)", "NODE_IU": "$(NODE_IU)", "C": "$(C)"}}]),
    # Containers
    ("docker run -e A=1 --env B=2 --env=C=3 -e D --env-file e --env-file=f vllm/vllm-openai:v1 m --port 1; E=5",
     [{"options": {"--port": ["1"]}, "model": "m", "environment": {"A": "1", "B": "2", "C": "3"},
       "image": "vllm/vllm-openai:v1", "env_files": ("e", "f"), "place": 1}]),
    *((f"{program} {image} --tp 1", [{**engine, "options": {"--tp": ["1"]}, "image": image, "place": 1}])
      for program in ("docker run", "podman --remote run", "/bin/nerdctl run --entrypoint=", "docker compose run")
      for image, engine in (("vllm", {}), ("a/vllm-openai:1", {}), ("sglang@b:0", {"engine": "SGLang"}))),
    ("docker run --name vllm -h vllm --network vllm --entrypoint sglang x/vllm:1 serve --tp 1 --served-model-name vllm",
     [{"engine": "SGLang", "options": {"--tp": ["1"], "--served-model-name": ["vllm"]}, "image": "x/vllm:1",
       "place": 1}]),
    ("A=1; docker run -e B=2 own:1 vllm serve m -x vllm; docker run -e C=3 own:1 sh -c 'vllm serve n'",
     [{"options": {"-x": ["vllm"]}, "model": "m", "environment": {"A": "$(A)", "B": "2", "C": "$(C)"}, "place": 1},
      {"model": "n", "environment": {"A": "$(A)", "B": "$(B)", "C": "3"}, "place": 2}]),
    ("docker run other:1 --tp 1", []),
    ("docker pull vllm --tp 1", []),
    ("docker --debug --x run vllm --tp 1", []),
    # Programs that start others
    ("mpirun -n 1 vllm serve a : -n 2 vllm serve b", [{"model": "a"}, {"model": "b"}]),
    ("srun vllm serve a : vllm serve b", [{"model": "a"}]),
    ("ssh x vllm serve m; ssh x \"vllm serve 'm\"", [{"model": "m"}]),
    ('ssh x "cd /; vllm serve m --port 1" & ssh y "sglang serve --tp 1"',
     [{"options": {"--port": ["1"]}, "model": "m", "script": "cd /; vllm serve m --port 1", "place": 1},
      {"engine": "SGLang", "options": {"--tp": ["1"]}, "script": "sglang serve --tp 1", "place": 2}]),
    ("su -c 'vllm serve m' user", [{"model": "m", "script": "vllm serve m", "place": 1}]),
    # Servers that are not known
    ("A=1 ./run_server.sh --tp 8", [{"engine": "", "environment": {"A": "1"}, "launcher": "run_server.sh"}]),
    *((command, [{"engine": "", "launcher": launcher}]) for command, launcher in (
        ("python -m other.server --tp 8", "other.server"), ("python -m dynamo.vllmx --tp 8 --model m", "dynamo.vllmx"),
        ("torchrun launch_worker x.py --tp 8", "launch_worker"), ("other serve m", "other"),
        ("trtllm-serve m --host a", "trtllm-serve"), ("python3 -m lmdeploy serve api_server m --tp 1", "lmdeploy"),
        ("mpirun -n 8 trtllm-llmapi-launch trtllm-serve m --tp 8", "trtllm-serve"), ("tool serve --tp 1", "tool"),
        *((f"./run_{word}.sh --tp 8", f"run_{word}.sh") for word in ("serve", "Launch", "launcher", "worker")),
        ("./run_server --debug", "run_server"), ("mpirun ./run_server --debug", "run_server"),
        *((f"./start -{option}=m", "start") for option in ("model", "-served-model-name", "-checkpoint-dir")))),
    ("other serve m; vllm serve n", [{"model": "n"}]),
    ("./run_other.sh --tp 8", []),
    # Loops
    ("for p in 1 2; do vllm serve m --port $p; done; vllm serve n --port $p",
     [{"options": {"--port": [port]}, "model": model, "environment": {"p": port}}
      for model, port in (("m", "1"), ("m", "2"), ("n", "2"))]),
    ("for p in 1 2; do for q in a b; do vllm serve $q --port $p; done; done",
     [{"options": {"--port": [p]}, "model": q, "environment": {"p": p, "q": q}} for p in "12" for q in "ab"]),
    ('P="1 2"; for p in $P 3; do A=$p vllm serve m; done',
     [{"model": "m", "environment": {"P": "1 2", "A": p, "p": p}} for p in "123"]),
    ("for p in 1 $(seq 2); do vllm serve m --port $p; done", [{"options": {"--port": ["$p"]}, "model": "m"}]),
    ("while x; do for p in 1 2; do vllm serve m --port $p; done; done; vllm serve n",
     [*({"options": {"--port": [p]}, "model": "m", "environment": {"p": p}} for p in "12"),
      {"model": "n", "environment": {"p": "2"}}]),
    ("for p in 1 2; do until x; do vllm serve $p; done; vllm serve m; done",
     [{"model": model, "environment": {"p": p}} for p in "12" for model in (p, "m")]),
    # A branch is taken if its variable is set once, before it.
    *((f'export {role}\ncase "$ROLE" in\n prefill|p*) A=1 ;;\n decode) ;;\n *) A=2 ;;\nesac\nvllm serve m --x $A',
       [{"options": {"--x": [seed]}, "model": "m", "environment": {"ROLE": value, "A": assigned}}])
      for role, value, seed, assigned in (
          ("ROLE=prefill", "prefill", "1", "1"), ("ROLE=p", "p", "1", "1"), ("ROLE=decode", "decode", "$A", "$(A)"),
          ("ROLE=other", "other", "2", "2"), ("ROLE=prefill\nROLE=decode", "decode", "$(A)", "$(A)"))),
    ("A=x\nlowercase $A in case $A inside case  in\ncase $A in\n x) B='my_esac esac2' ;;\n y) B=2 ;;\nesac\n"
     "vllm serve m --x $B", [{"options": {"--x": ["my_esac esac2"]}, "model": "m",
                              "environment": {"A": "x", "B": "my_esac esac2"}}]),
    # The functions of a script that cannot be read are not followed.
    *((f"run() {{\n  vllm serve m --port {body}\n}}\nrun 8100 'a \"b'",
       [{"options": {"--port": ["8100"], **options}, "model": "m"}]) for body, options in (
           ("$1 --x '{\n  \"a\": {\n}\n}'", {"--x": ['{\n  "a": {\n}\n}']}),
           ("8100\n  cat <<END\nit's\nEND\n  cat <<END\nthat's }\nEND", {}), ('8100\n  bash -c "echo $@ now"', {}))),
    # Arrays
    *((f'{before}A=("--port" 1\n  # a comment\n \'--seed\' 2 --x a#b?)\nvllm serve m "${{A[@]}}"',
       [{"options": {"--port": ["1"], "--seed": ["2"], "--x": ["a#b?"]}, "model": "m", "environment": {"A": "$(A)"}}])
      for before in ("", "  local ", "declare -a ", "readonly ", "typeset -r  -a\t")),
    ("A=(--port 1)\nA+=(--seed 2)\nvllm serve m ${A[*]} --host $A",
     [{"options": {"--port": ["1"], "--seed": ["2"], "--host": ["$A"]}, "model": "m", "environment": {"A": "$(A)"}}]),
    *((f"{array}\nvllm serve m ${{A[@]}}", [{"model": "m", "unknown": ("$A",), "environment": {"A": "$(A)"}}])
      for array in ("A=(--port 1)\nA=(--port 2)",)),
    ("declare -A A=([x]=--port)\nvllm serve m ${A[@]}", [{"model": "m", "unknown": ("$A",), "environment": {"A": ""}}]),
    # Texts in a script: one that is copied into a file starts nothing, and one for a shell does.
    *((f"{command} <<END\nvllm serve m\nEND", [{"model": "m"}] * runs)
      for command, runs in (("ssh x", 1), ("catbox", 1), ("supertee", 1), ("cat", 0), ("tee -a f", 0))),
    *((f"cat > {name} <<END\nit's\nEND\nvllm serve m", [{"model": "m"}]) for name in ("f", "my_xargs", "xargs_b")),
    ('A=$(cat; tee g <<END\nx\nEND\n)\nvllm serve m --seed "$A"',
     [{"options": {"--seed": ["${cat\u00a0\u00a0tee\u00a0g\u00a0\u00a0}"]}, "model": "m",
       "environment": {"A": "${cat\u00a0\u00a0tee\u00a0g\u00a0\u00a0}"}}]),
    *((f'A={value}\nvllm serve m --x "$A" --y', [{"options": {"--x": ['{"a": 1}'], "--y": [""]}, "model": "m",
                                                  "environment": {"A": '{"a": 1}'}}])
      for value in ('"$(cat <<END\n{"a": 1}\nEND\n)"', "$(cat <<'END'\n{\"a\": 1}\nEND\n  )")),
    ("xargs vllm serve m --config xargs_a --seed my_xargs <<END\n--port 1\nEND",
     [{"options": {"--config": ["xargs_a"], "--seed": ["my_xargs"], "--port": ["1"]}, "model": "m"}]),
    # Comments, quotations and broken lines
    ("vllm serve m \\\n --x 'a \\\n' --y \"#\" --z a#b  # --port 1\n# vllm serve n",
     [{"options": {"--x": ["a  "], "--y": ["#"], "--z": ["a#b"]}, "model": "m"}]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "started"), _READ, ids=[text for text, _ in _READ])
def test_the_engines_of_a_script_are_read(text: str, started: list[dict[str, Any]]) -> None:
    assert parts(script_launches(text, {}), text) == started


@pytest.mark.parametrize(
    ("words", "environment", "image", "started"),
    [
        ("vllm serve m --port $(P) --x $P", {"P": "1"}, "",
         [{"options": {"--port": ["1"], "--x": ["$P"]}, "model": "m", "environment": {"P": "1"},
           "script": "vllm serve m --port 1 --x $P"}]),
        ("sh -ec 'vllm serve m --port $P'", {"P": "1"}, "",
         [{"options": {"--port": ["1"]}, "model": "m", "environment": {"P": "1"}, "script": "vllm serve m --port $P"}]),
        *((f"{shell} 'vllm serve m'", {}, "", [{"model": "m", "script": "vllm serve m"}])
          for shell in ("/bin/bash -x -c --", "sh -c", "bash -l")),
        ("sh -c", {}, "", []),
        ("tini -- sh -c 'A=1 vllm serve a & vllm serve b'", {"B": "2"}, "",
         [{"model": model, "environment": {"A": value, "B": "2"}, "script": "A=1 vllm serve a & vllm serve b"}
          for model, value in (("a", "1"), ("b", "$(A)"))]),
        # The image starts the engine.
        ("", {"A": "1"}, "vllm/vllm-openai:v1", [{"environment": {"A": "1"}}]),
        ("m --port 1", {}, "h:5000/a/vllm@sha256:0", [{"options": {"--port": ["1"]}, "model": "m"}]),
        ("--model m", {}, "sglang", [{"engine": "SGLang", "options": {"--model": ["m"]}}]),
        ("--model=m", {}, "h:5000/own:v1", [{"engine": "", "launcher": "own:v1"}]),
        *((words, {}, image, []) for words, image in (("", "own"), ("--dtype m", "own"), ("run.sh --port 1", "vllm"),
                                                      ("m port", "vllm"))),
        ("m --kv-transfer-config {}", {}, "own",
         [{"options": {"--kv-transfer-config": ["{}"]}, "script": "m --kv-transfer-config {}"}]),
        ("./serve_it --x", {"A": "1"}, "own:1", [{"engine": "", "environment": {"A": "1"}, "launcher": "serve_it"}]),
        ("tini './run vllm x' --model m", {}, "own", [{"engine": "", "launcher": "tini"}]),
    ],
)  # fmt: skip
def test_the_engines_of_a_container_are_read(
    words: str, environment: dict[str, str], image: str, started: list[dict[str, Any]]
) -> None:
    assert parts(launches(shlex.split(words), environment, image), "") == started


@pytest.mark.parametrize(
    ("text", "by_shell", "by_kubernetes"),
    [
        ("$(A)${A}$A", "111", "1${A}$A"),
        ("$(B)$B${B}", "$(B)$B${B}", "$(B)$B${B}"),
        ("${A:-x}${A=x}${B:-x}${B-y}${B:=}", "11xy", "${A:-x}${A=x}${B:-x}${B-y}${B:=}"),
        ("$ {A} $1 $@ ${1}", "$ {A} $1 $@ ${1}", "$ {A} $1 $@ ${1}"),
        ("$(A)" + "x" * 4093, "$(A)" + "x" * 4093, "$(A)" + "x" * 4093),
        ("$(A)" + "x" * 4092, "1" + "x" * 4092, "1" + "x" * 4092),
        # The values have at most 4,096 characters together.
        ("$L$L$A", "y" * 4000 + "$L$A", "$L$L$A"),
        ("$L$M", "y" * 4000 + "z" * 96, "$L$M"),
        ("$L$M1$A", "y" * 4000 + "$M1$A", "$L$M1$A"),
    ],
    ids=str.__len__,
)
def test_references_are_replaced_once(text: str, by_shell: str, by_kubernetes: str) -> None:
    environment = {"A": "1", "L": "y" * 4000, "M": "z" * 96, "M1": "z" * 97}
    assert [expand(text, environment, shell=shell) for shell in (True, False)] == [by_shell, by_kubernetes]


def test_a_script_has_bounds() -> None:
    for turns, engines in (((32,), 32), ((33,), 1), ((20, 13), 21)):
        loops = [f"for i in {'x ' * number}; do vllm serve m; done" for number in turns]
        assert len(script_launches("; ".join(loops), {})) == engines
    for calls, value in ((31, "2"), (32, "1")):
        [launch] = script_launches(f"run() {{ A=$1; }}\n{'run 1; ' * calls}run 2; vllm serve m", {})
        assert launch.environment == {"A": value}
    for count in (32, 33):
        assert len(script_launches("vllm serve m; " * count, {})) == 32
        assert len(script_launches("other serve m; " * count, {})) == 32
    branch = "A=1\ncase $A in 1) B=2;; *) B=3;; esac\nvllm serve m --seed $B\n"
    for cases, seed in ((31, "2"), (32, "$(B)")):
        assert script_launches(f"{branch}{'echo case; ' * cases}", {})[0].options == {"--seed": [seed]}
    for length, uses, unknown in ((9000, 1, ()), (9000, 20, ("$A",))):
        [launch] = script_launches(f"A=(--port {'1' * length})\nvllm serve m {'${A[@]} ' * uses}", {})
        assert (launch.unknown, "--port" in launch.options) == (unknown, not unknown)
    assert split_commands("#" * 65536) == []
    with pytest.raises(ScriptError, match=r"^has a script of 65537 characters: expected at most 65536$"):
        split_commands("#" * 65537)


#: Words that leave a command what it is.
_BEFORE = "export declare typeset local readonly if then elif else while until do { ! time exec env nohup"
#: How scripts set HOST to IP and run START, as shells read them.
_KNOWN = [
    "export HOST=IP; START",
    "declare -x HOST=IP  # don't change it\nSTART",
    "if true; then export HOST=IP; fi\n(cd / && exec START) | tee log",
    'bash -c "HOST=IP QUOTED"',
    'ssh -o "BatchMode yes" node "HOST=IP QUOTED"',
    "cat > run.txt <<END\nhow it's run\nEND\nHOST=IP START",
    "cat <<<$A; cat > run.txt <<END\nhow it's run\nEND\nHOST=IP START",
    "HOST=10.0.0.2\nif true; then :; fi\nHOST=IP\nSTART",
    "HOST=10.0.0.2\ncase $1 in\na) :;;\nesac\nHOST=IP\nSTART",
    "HOST=${A:=IP} START",
    "start() {\nSTART\n}\nexport HOST=IP\nstart",
    'one() { vllm serve "$@"; }\nHOST=IP one m OPTION',
    'function run {\n  local ip=$1; shift\n  HOST=$ip \\\n    "$@"\n}\nrun IP START',
    "at() {\nHOST=${2:-IP} $1 serve m ${3} ${4}\n}\nat vllm '' OPTION",
    "run() {  # } is no end\n  if true; then { cd /; }; fi\n  HOST=$1 START\n}\nrun IP",
    "start () {\nHOST=IP START\n}\ntrap start EXIT",
    "# as run() {\nrun() {\n  HOST=$1 START\n}\nrun IP",
    "a() { :; }\nb() {\n  c() { :; }\n  c\n  START\n}\nexport HOST=IP\nb\n",
    "HOST=IP xargs vllm serve <<'END'\nm\nOPTION\nEND",
    "export HOST=IP\ncat <<END | xargs -r vllm serve\nm OPTION\nEND",
    *(f"{word} HOST=IP\nSTART" for word in _BEFORE.split()),
]
#: The same, if the address is known only where the script runs.
_UNKNOWN = [
    "if [ $1 ]; then HOST=IP; else HOST=10.0.0.2; fi\nSTART",
    ": ${HOST:=IP}\nSTART",
    "read -r HOST _ <<< IP\nexport HOST\nSTART",
    "printf -v HOST IP; START",
    "srun --export=ALL,HOST=IP START",
    "export HOST=$(hostname -I | awk '{print $1}')\nSTART",
    "HOST=$( (cd /; hostname) | head -1 ) START",
    "HOST=$(python3 -c \"print('(', 1)\") START",
    "HOST=`ip addr | grep -oP '(?<=inet )[0-9.]+'` START",
    "HOST=`cd /; vllm serve other` START",
    'HOST="$(get "$A" \';\' | tail -1)" START',
]


@pytest.mark.parametrize(("text", "known"), [*((text, True) for text in _KNOWN), *((text, False) for text in _UNKNOWN)])
def test_a_shell_script_is_read_as_a_shell_does(text: str, known: bool) -> None:
    parts = {"HOST": _HOST, "IP": "10.0.0.1", "START": _START, "OPTION": _NIXL, "QUOTED": _START.replace('"', '\\"')}
    [launch] = script_launches(re.sub("HOST|IP|START|OPTION|QUOTED", lambda match: parts[match[0]], text), {})
    assert launch.environment[_HOST] == "10.0.0.1" if known else not is_resolved(launch.environment[_HOST])
    assert launch.options == {"--kv-transfer-config": ['{"kv_connector":"NixlConnector","kv_role":"kv_both"}']}
    assert launch.model == "m"


@pytest.mark.parametrize(
    ("definition", "body"),
    [
        ("run() {\n x\n}", "\n x\n"),
        ("  run () { x; }", " x; "),
        ("function run { x; }", " x; "),
        ("function run() { x; }", " x; "),
        ("run()\n{ { x; }; }", " { x; }; "),
        ("run() { # }\n x; }", " # }\n x; "),
        ("run() { echo a#}", " echo a#"),
        ("""run() { echo 'x}y' "}\\"}" \\}; }""", """ echo 'x}y' "}\\"}" \\}; """),
        ("run() {\n one() { x; }\n one\n}", "\n one() { x; }\n one\n"),
    ],
)
def test_the_body_of_a_function_is_taken_if_it_is_called(definition: str, body: str) -> None:
    other = "other() { y; }"
    script = f"before\n{definition}\n{other}\n"
    for call in ("run", "A=1 B= run 2", "true && run|tee", "(run)", "{ run; }", "a;run&"):
        assert take_functions(f"{script}{call}\n") == (f"before\n\n{other}\n{call}\n", {"run": body})
        both = {"run": body, "other": " y; "}
        assert take_functions(f"{script}{call}\nother\n") == (f"before\n\n\n{call}\nother\n", both)
    for uncalled in (f"{script}runs -run\n", f"{script}run ( {{ x; }} )\n"):
        assert take_functions(uncalled) == (uncalled, {})


def test_no_more_functions_are_taken_than_can_be_read() -> None:
    for text in ("run() { x\nrun\n", "run ( { x; } )\nrun\n", "function run( { x; }\nrun\n"):
        assert take_functions(text) == (text, {})
    many = "".join(f"f{number}() {{ x; }}\nf{number}\n" for number in range(100))
    assert len(take_functions(many)[1]) == 64


@pytest.mark.parametrize(
    ("body", "arguments", "called"),
    [
        ("x $1 $2", "a 'b c'", "x a 'b c'"),
        ('x "$1"y', "'a b'", "x 'a b'y"),
        ("x$1 $2y", "a b", "xa by"),
        ("x$1 $2y", "'a b' 'c d'", "x$1 $2y"),
        ('"$1 x" "x $2"', "a b", '"a x" "x b"'),
        ('"$1 x" "x $2"', "'a b' 'c d'", '"$1 x" "x $2"'),
        ("x ${1:-d} ${2-e} ${3}", "a", "x a e ''"),
        ("x ${1:-shift}", "a b", "x a"),
        ("noshift 2; shifts 2; x $1", "a b c", "noshift 2; shifts 2; x a"),
        ("x $@; y ${*}", "'a b' c", "x 'a b' c; y 'a b' c"),
        ('x "$@ now"', "a", 'x "$@ now"'),
        ("$1\nshift\n$1 $@\nshift 2\n$1", "a b c d", "a\nshift\nb b c d\nshift 2\nd"),
    ],
)
def test_a_call_puts_its_arguments_into_the_body(body: str, arguments: str, called: str) -> None:
    assert called_body(body, shlex.split(arguments)) == called


def test_what_a_command_prints_is_not_shown_as_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("prefill", "$(hostname -I | cut -d' ' -f1)"), ("decode", "127.0.0.1")):
        (tmp_path / f"{name}.sh").write_text(f"{_HOST}={value} {_START}\n")
    assert cli.main(["connector", *(str(tmp_path / f"{name}.sh") for name in ("prefill", "decode"))]) == 1
    assert f"{_HOST}: prefill has a value that the file does not contain, decode has 127" in capsys.readouterr().out


def test_what_a_command_installs_and_names_is_a_release(tmp_path: Path) -> None:
    packages = {"nixl": "1.5.1", "nixl-cu12": "1.5.2", "nixl-cu13": "1.5.3", "vllm": "0.33.0+cu130", "sglang": "0.5.9",
                "ai-dynamo": "1.0.0rc1"}  # fmt: skip
    extras = {"nixl-cu13": "[dev]", "vllm": "[audio,flash-attn]", "ai-dynamo": "[vllm]"}
    words = " ".join(f"{name}{extras.get(name, '')}=={release}" for name, release in packages.items())
    installs = script(tmp_path, "a.sh", f"pip install {words} myvllm==1.0 sglang==\n{_START}\n")
    variables = " ".join(f"{name}_VERSION=1.2.{number}" for number, name in enumerate(("NIXL", "VLLM", "SGLANG")))
    names = script(tmp_path, "b.sh", f"pip install vllm==0.14.0\n{variables} {_START}\n")
    pair = compare_connectors(read_engine(installs), read_engine(names)).pair
    assert named_releases(pair.prefill) == packages
    assert named_releases(pair.decode) == {"nixl": "1.2.0", "vllm": "0.14.0", "sglang": "1.2.2"}


@pytest.mark.parametrize(
    ("prefill", "decode", "one_host"),
    [
        ("CUDA_VISIBLE_DEVICES=0 vllm serve m --port 1", "CUDA_VISIBLE_DEVICES=1 vllm serve m --port 2", True),
        ("CUDA_VISIBLE_DEVICES=0 vllm serve m --port 1", "CUDA_VISIBLE_DEVICES=0 vllm serve m --port 2", False),
        ("CUDA_VISIBLE_DEVICES=0 vllm serve m --port 1", "CUDA_VISIBLE_DEVICES=1 vllm serve m --port 1", False),
        ("CUDA_VISIBLE_DEVICES=0 vllm serve m --port 1", "vllm serve m --port 2", False),
        ("H=1 python -m sglang.launch_server --port 1", "H=1 python -m sglang.launch_server --base-gpu-id 4", True),
        ("H=1 python -m sglang.launch_server --base-gpu-id 4 --port 1",
         "H=1 python -m sglang.launch_server --base-gpu-id 4", False),
        ("H=1 python -m sglang.launch_server --port 1 --host 0.0.0.0",
         "H=1 python -m sglang.launch_server --base-gpu-id 4", True),
        ("H=1 python -m sglang.launch_server --port 1 --host 10.0.0.1",
         "H=1 python -m sglang.launch_server --base-gpu-id 4", False),
        (f"{_HOST}=10.0.0.1 vllm serve m", f"{_HOST}=10.0.0.1 vllm serve m", True),
        (f"{_HOST}=$X vllm serve m", f"{_HOST}=$X vllm serve m", False),
        (f"{_HOST}=::1 vllm serve m", f"{_HOST}=::1 vllm serve m", False),
        (f"{_HOST}=0.0.0.0 vllm serve m", f"{_HOST}=0.0.0.0 vllm serve m", False),
    ],
)  # fmt: skip
def test_two_sides_share_a_host(prefill: str, decode: str, one_host: bool, tmp_path: Path) -> None:
    engines = [read_engine(script(tmp_path, f"{name}.sh", text)) for name, text in (("p", prefill), ("d", decode))]
    assert compare_connectors(*engines).pair.one_host is one_host


@pytest.mark.parametrize(
    ("command", "launcher"),
    [("trtllm-serve m --host 0.0.0.0", "trtllm-serve"), ("python3 -m dynamo.trtllm --model m", "TensorRT-LLM")],
)
def test_a_launcher_that_is_not_known_is_inconclusive(command: str, launcher: str, tmp_path: Path) -> None:
    prefill = script(tmp_path, "prefill.sh", f"UCX_TLS=tcp,cuda {command}\n")
    decode = script(tmp_path, "decode.sh", f"vllm serve m {_NIXL}\n")
    for sides in ((prefill, decode), (decode, prefill)):
        comparison = compare_connectors(*map(read_engine, sides))
        assert not [result for result in comparison.results if result.verdict is Verdict.FAIL]
        [engine] = [result for result in comparison.results if result.rule.field == "engine"]
        assert (engine.verdict, engine.why, engine.remedy) == (
            Verdict.INCONCLUSIVE,
            f"the options of {launcher} are not known here: model, sizes, ports and backends were not read",
            f"compare them by the documentation of {launcher}",
        )
    assert [cli.main(["connector", prefill, decode, *options]) for options in ((), ("--gate",))] == [0, 1]


_BOTH = "vllm serve a --port 1 & vllm serve b --port 2 & wait"


@pytest.mark.parametrize(
    ("text", "share_host"),
    [
        (_BOTH, True),
        (f"bash -c '{_BOTH}'", True),
        (f"echo sshd mydocker\n{_BOTH}", True),
        ("start() { vllm serve a --port 1 & vllm serve b --port 2 & }\nstart", True),
        ("start() { vllm serve $1 --port $2 & }\nstart a 1\nstart b 2", True),
        ("parallel ::: 'vllm serve a --port 1' 'vllm serve b --port 2'", True),
        ("mpirun -n 1 vllm serve a --port 1 : -n 1 vllm serve b --port 2", False),
        ("mpiexec --hostfile h -n 1 vllm serve a --port 1 : -n 1 vllm serve b --port 2", False),
        ("kubectl exec one -- vllm serve a --port 1 & kubectl exec two -- vllm serve b --port 2", False),
        ("pdsh -w one 'vllm serve a --port 1' & pdsh -w two 'vllm serve b --port 2'", False),
        ("clush -w one 'vllm serve a --port 1' & clush -w two 'vllm serve b --port 2'", False),
        ("P='1 2'\nif true; then\n for p in $P; do\n  for m in 'x y'; do vllm serve $p --port $p & done\n done\nfi",
         True),
        (f"ssh one '{_BOTH}'", True),
        ("ssh one 'vllm serve a --port 1' & ssh two 'vllm serve b --port 2'", False),
        ("srun -w one vllm serve a --port 1 & srun -w two vllm serve b --port 2", False),
        (f"docker run vllm/vllm-openai:v1 bash -c '{_BOTH}'", True),
        (f"docker run --entrypoint sh vllm/vllm-openai:v1 -c '{_BOTH}'", True),
        (f"docker run --entrypoint=/bin/sh vllm/vllm-openai:v1 -c -- '{_BOTH}'", True),
        ("for m in a b; do docker run vllm/vllm-openai:v1 --model $m; done", False),
        ("for m in a b; do podman run vllm/vllm-openai:v1 --model $m; done", False),
        ("for m in a b; do nerdctl run vllm/vllm-openai:v1 --model $m; done", False),
    ],
)  # fmt: skip
def test_each_engine_of_a_script_is_read(text: str, share_host: bool, tmp_path: Path) -> None:
    path = script(tmp_path, "both.sh", f"{text}\n")
    engines = [read_engine(f"{path}#{number}") for number in (1, 2)]
    if "--port" in text:
        assert [engine.launch.options["--port"] for engine in engines] == [["1"], ["2"]]
    pods = [engine.pod for engine in engines]
    assert (pods[0] is not None and pods[0] == pods[1]) is share_host
    with pytest.raises(ValueError, match=r"starts 2 engines: choose one with FILE#NAME, NAME is 1 or 2$"):
        read_engine(path)
