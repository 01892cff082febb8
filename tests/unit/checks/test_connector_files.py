# SPDX-License-Identifier: Apache-2.0
"""Each kind of file is read whole: pod specs, services, env files and options files; a bad one ends in one sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_nixl import cli
from pytest_nixl.checks.connector.command_line import Launch
from pytest_nixl.checks.connector.comparison import ConnectorComparison, compare_connectors
from pytest_nixl.checks.connector.containers import ConfiguredEngine, PodResources, read_engine
from pytest_nixl.model.verdicts import Verdict

DUMPS: dict[str, Callable[[Any], str]] = {"json": json.dumps, "yaml": yaml.safe_dump}
NIXL = """--kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'"""


def write(folder: Path, name: str, text: str) -> str:
    """Write one side."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def verdicts(comparison: ConnectorComparison) -> list[str]:
    """Return verdict and field of each finding."""
    return [
        f"{result.verdict} {result.rule.field}"
        for result in comparison.results
        if result.verdict not in (Verdict.PASS, Verdict.NOT_APPLICABLE)
    ]


_CONTAINER = {"name": "c", "image": "i:1", "command": ["vllm", "serve", "m"], "args": ["--port", 1, "--enforce-eager"]}


def deployment(container: dict[str, Any], **pod_parts: Any) -> dict[str, Any]:
    """Return a Deployment of one container, with further parts of it and of its pod."""
    template = {"spec": {"containers": [{**_CONTAINER, **container}], **pod_parts}}
    return {"metadata": {"name": "o"}, "spec": {"template": template}}


def reads(path: Path, document: Any, **parts: Any) -> None:
    """Check that the one engine of a document has these parts, of it or of its launch, and otherwise the usual ones."""
    path.write_text(json.dumps(document))
    engine = read_engine(str(path))
    usual = ConfiguredEngine(str(path), (), Launch("vLLM", False, {}))
    of_launch = {
        name: parts.pop(name) for name in set(parts) & {field.name for field in fields(Launch)} if name != "image"
    }
    assert engine == replace(usual, launch=replace(usual.launch, **of_launch), **parts)


_LAUNCH = {"options": {"--port": ["1"], "--enforce-eager": [""]}, "model": "m",
           "script": "vllm serve m --port 1 --enforce-eager"}  # fmt: skip


@pytest.mark.parametrize(
    ("document", "resources"),
    [
        (deployment({}), PodResources({})),
        (deployment({"resources": {"limits": {"nvidia.com/gpu": "2", "a/b": 1, "cpu": "500m", "x": 12345},
                                   "requests": {"nvidia.com/gpu": 4}}}), PodResources({"nvidia.com/gpu": 4, "a/b": 1})),
        (deployment({"resources": {"limits": {"nvidia.com/gpu": 4}, "requests": {"nvidia.com/gpu": 2}}}),
         PodResources({"nvidia.com/gpu": 4})),
        (deployment({"securityContext": {"privileged": True}}), PodResources({}, sees_devices=True)),
        (deployment({"securityContext": {"privileged": "no"}}), PodResources({})),
        (deployment({}, volumes=[{"name": "x"}, {"hostPath": {"path": "/dev/infiniband"}}]),
         PodResources({}, sees_devices=True)),
        (deployment({}, volumes=[{"hostPath": {"path": "/dev/shm"}}]), PodResources({})),
        (deployment({}, resourceClaims=[{"name": "a"}]), PodResources({}, sees_devices=True)),
        (deployment({"resources": {"claims": [{"name": "a"}]}}), PodResources({}, sees_devices=True)),
        *(({"metadata": {"name": "o"}, "replicas": 2, key: {"spec": {"containers": [_CONTAINER]}}}, PodResources({}, 2))
          for key in ("template", "podTemplate")),
        *(({"metadata": {"name": "o"}, "spec": {"replicas": 2, "leaderWorkerTemplate": {
              "size": size, key: {"spec": {"containers": [_CONTAINER]}}}}}, PodResources({}, 2, several_nodes=size > 1))
          for key in ("leaderTemplate", "workerTemplate") for size in (1, 2)),
        ({**deployment({}), "template": {"spec": {}}}, PodResources({})),
        # What has not the form of Kubernetes says nothing.
        ({"metadata": {"name": "o"}, "replicas": "2", "leaderWorkerTemplate": {
            "size": "2", "leaderTemplate": {"spec": {"containers": [1, _CONTAINER]}}, "workerTemplate": 1}},
         PodResources({})),
        (deployment({"securityContext": 1, "resources": {"limits": 1, "x": {"custom": "n"}}},
                    volumes=["x", {"hostPath": "/dev/infiniband"}, {"hostPath": {}}]), PodResources({})),
        (deployment({"resources": 1}, volumes=1, resourceClaims=[]), PodResources({})),
        ({"metadata": {"name": "o"}, "multinode": {"nodes": 2}, "template": {"spec": {"containers": [_CONTAINER]}}},
         PodResources({}, several_nodes=True)),
    ],
)  # fmt: skip
def test_a_pod_is_read_with_its_resources(document: Any, resources: PodResources, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document))
    place = read_engine(str(path)).pod
    assert place is not None
    assert place[0] == str(path)
    reads(path, document, names=("c", "o", "o/c"), image="i:1", resources=resources, pod=place, **_LAUNCH)


def test_two_containers_share_a_host_only_in_one_pod(tmp_path: Path) -> None:
    document = deployment({})
    document["spec"]["template"]["spec"]["containers"].append({**_CONTAINER, "name": "d"})
    path = write(tmp_path, "a.json", json.dumps([document, deployment({"name": "e"})]))
    engines = {name: read_engine(f"{path}#{name}") for name in "cde"}
    assert [compare_connectors(engines["c"], engines[name]).pair.one_host for name in "de"] == [True, False]


def test_an_object_of_each_kind_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    main = {"image": "vllm-runtime:1", "command": ["python3", "-m", "dynamo.vllm"], "args": ["--model", "m"],
            "env": [{"name": "B", "value": "2"}], "resources": {"limits": {"gpu": "1"}}}  # fmt: skip
    worker = {"replicas": 2, "dynamoNamespace": "ns", "multinode": {"nodes": 1},
              "extraPodSpec": {"mainContainer": main},
              "envs": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}],
              "resources": {"limits": {"gpu": "2", "custom": {"vpc.amazonaws.com/efa": "4"}}}}  # fmt: skip
    reads(path, {"metadata": {"name": "g"}, "services": {"W": worker}}, names=("W", "g/W"), image="vllm-runtime:1",
          resources=PodResources({"nvidia.com/gpu": 2, "vpc.amazonaws.com/efa": 4}, 2, several_nodes=True), dynamo=True,
          options={"--model": ["m"]}, environment={"A": "1", "B": "2", "DYN_NAMESPACE": "ns"},
          script="python3 -m dynamo.vllm --model m")  # fmt: skip
    named = {**worker, "extraPodSpec": {"mainContainer": {**main, "env": [{"name": "DYN_NAMESPACE", "value": "own"}]}}}
    path.write_text(json.dumps({"services": {"W": named}}))
    assert read_engine(str(path)).launch.environment == {"A": "1", "B": "1", "DYN_NAMESPACE": "own"}
    reads(path, {"services": {"s": {"image": "x/vllm:1", "entrypoint": "vllm serve", "command": "m --port 1",
                                    "environment": ["A=1=2", "B", "C="], "env_file": "none.env"}}}, names=("s",),
          image="x/vllm:1", unread=("env_file none.env",), options={"--port": ["1"]}, model="m", has_environment=False,
          environment={"A": "1=2", "B": "$(B)", "C": ""}, script="vllm serve m --port 1")  # fmt: skip
    service = {"image": "x/sglang:1", "command": ["--model-path", "m"], "environment": {"A": None, "B": True, "C": 1}}
    reads(path, {"services": {"s": service}}, names=("s",), image="x/sglang:1", engine="SGLang",
          options={"--model-path": ["m"]}, environment={"A": "$(A)", "B": "true", "C": "1"})  # fmt: skip
    config = {"model_loading_config": {"model_id": "i", "model_source": "s"}, "runtime_env": {"env_vars": {"A": 1}},
              "engine_kwargs": {"tensor_parallel_size": 2, "a": False, "b": None, "c": True, "d": {}}}  # fmt: skip
    options = {"--tensor-parallel-size": ["2"], "--c": ["true"], "--d": ["{}"]}
    ray = {"names": ("p",), "launcher": "Ray Serve", "options": options}
    reads(path, {"applications": [{"args": {"p": config}}]}, model="s", environment={"A": "1"}, **ray)
    config |= {"model_loading_config": {"model_id": "i"}, "runtime_env": {}}
    reads(path, {"p": config}, model="i", has_environment=False, **ray)
    transfer = {"--kv-transfer-config": ['{"kv_connector": "X"}']}
    for key in ("kv_transfer_config", "kv-transfer-config"):
        reads(path, {key: {"kv_connector": "X"}}, options=transfer, has_options=False, has_environment=False)
        reads(path, {key: {"kv_connector": "X"}, "model": "m"}, options={**transfer, "--model": ["m"]},
              has_environment=False)  # fmt: skip
    place = (str(path), 0)
    reads(path, {"containers": [{"image": "vllm", "args": "--a 'b c'", "env": 1, "envFrom": ["x"]}]}, image="vllm",
          pod=place, resources=PodResources({}), options={"--a": ["b c"]})  # fmt: skip
    reads(path, {"containers": [{"name": "n", "command": ["vllm", "serve"], "args": 1}]}, names=("n",), pod=place,
          resources=PodResources({}), script="vllm serve")  # fmt: skip
    reads(path, {"services": {"W": {"extraPodSpec": {"mainContainer": main}}}}, names=("W",), image="vllm-runtime:1",
          resources=PodResources({"nvidia.com/gpu": 1}), dynamo=True, options={"--model": ["m"]},
          environment={"B": "2"}, script="python3 -m dynamo.vllm --model m")  # fmt: skip
    unknown = {"apiVersion": "a.b/v1", "kind": "Thing\x1b", "metadata": {"name": "t"}, "spec": {}}
    reads(path, unknown, names=("t",), engine="", launcher="Thing\\x1b", has_options=False, has_environment=False)
    for version in ("apps/v1", "a.k8s.io/v1", "v1"):
        with pytest.raises(ValueError, match="starts no engine that this command reads: expected vLLM or SGLang, also"):
            reads(path, {**unknown, "apiVersion": version})


def test_the_variables_of_a_container_come_from_all_its_sources(tmp_path: Path) -> None:
    sources = {"E": {"configMapKeyRef": {"name": "m", "key": "k"}}, "F": {"configMapKeyRef": {"name": "n", "key": "k"}},
               "G": {"secretKeyRef": {"name": "m", "key": "k"}}, "H": {"fieldRef": {"fieldPath": "status.podIP"}},
               "I": {}}  # fmt: skip
    container = deployment({
        "envFrom": [{"configMapRef": {"name": "m"}}, {"secretRef": {"name": "s"}}, {"configMapRef": {"name": "z"}}],
        "env": [{"name": "B", "value": "x$(A)$A"}, {"name": "C", "value": True}, {"name": "D"}, {"value": "no"},
                *({"name": name, "valueFrom": source} for name, source in sources.items())],
    })  # fmt: skip
    config = {"kind": "ConfigMap", "metadata": {"name": "m"}, "data": {"A": "1", "k": 2}}
    path = write(tmp_path, "a.json", json.dumps({"items": [config, container]}))
    engine = read_engine(path)
    assert engine.unread == ("Secret s", "ConfigMap z")
    assert engine.launch.has_environment is False
    assert engine.launch.environment == {
        "A": "1", "k": "2", "B": "x1$A", "C": "true", "D": "", "E": "2", "F": "$(configMap n, k)",
        "G": "$(secret m, k)", "H": "$(status.podIP)", "I": "$(valueFrom)",
    }  # fmt: skip


_BOTH = "vllm serve a --port 1 & vllm serve b --port 2 & wait"


@pytest.mark.parametrize("kind", ["pod", "Compose", "Dynamo"])
def test_each_engine_of_a_container_is_read(kind: str, tmp_path: Path) -> None:
    container = {"name": "c", "image": "engine", "command": ["env", "A=1", "sh", "-c", _BOTH]}
    document = {
        "pod": {"kind": "Pod", "metadata": {"name": "o"}, "spec": {"containers": [container]}},
        "Compose": {"services": {"c": container}},
        "Dynamo": {
            "metadata": {"name": "o"},
            "spec": {"services": {"c": {"extraPodSpec": {"mainContainer": container}}}},
        },
    }[kind]
    path = write(tmp_path, "both.json", json.dumps(document))
    engines = [read_engine(f"{path}#c/{number}") for number in (1, 2)]
    assert [(engine.launch.model, engine.launch.options) for engine in engines] == [
        ("a", {"--port": ["1"]}),
        ("b", {"--port": ["2"]}),
    ]
    assert compare_connectors(*engines).pair.one_host
    last = {"pod": "o/c/{}", "Compose": "c/{}", "Dynamo": "o/c/{}"}[kind]
    names = " or ".join(last.format(number) for number in (1, 2))
    with pytest.raises(ValueError, match=f"starts 2 engines: choose one with FILE#NAME, NAME is {names}$"):
        read_engine(path)


@pytest.mark.parametrize(
    ("options_file", "options", "findings"),
    [
        ("block-size: 100\nkv-cache-dtype: fp8\ndtype: float16\n", "", ["FAIL --block-size"]),
        ("block-size: 64\nkv_cache_dtype: fp8\ndtype: auto\n", "--dtype float16", []),
        ("[]", "", ["INCONCLUSIVE --config"]),
        ("kv-cache-dtype: fp8\n---\nblock-size: 64", "", ["INCONCLUSIVE --config"]),
        (None, "", ["INCONCLUSIVE --config"]),
    ],
)
def test_options_in_a_file_beside_the_script_are_read(
    options_file: str | None, options: str, findings: list[str], tmp_path: Path
) -> None:
    if options_file is not None:
        write(tmp_path, "decode.yaml", options_file)
    prefill = write(tmp_path, "prefill.sh", f"vllm serve m --block-size 64 --kv-cache-dtype fp8 --dtype half {NIXL}\n")
    for option in ("--config", "--engine-config-json"):
        decode = write(tmp_path, "decode.sh", f"vllm serve m {option} decode.yaml {options} {NIXL}\n")
        comparison = compare_connectors(read_engine(prefill), read_engine(decode), one_host=True)
        assert [finding for finding in verdicts(comparison) if not finding.endswith(" ports")] == findings
        unread = ("decode has options of decode.yaml, which is not in the file",)
        assert comparison.unread == (unread if findings == ["INCONCLUSIVE --config"] else ())


@pytest.mark.parametrize(
    ("words", "sources", "options"),
    [
        ("$ARGS --port 1", ("options of $ARGS",), {"--port": ["1"]}),
        ("--port 1 $(cat args)", ("options of $(cat args)",), {"--port": ["1"]}),
        ("--kv-transfer-config $KV --port 1", ("options of $KV",), {"--port": ["1"]}),
        *((f"{option} '{{\"a\": \"$(R)\"}}' --port 1", (f"options of {option}",), {"--port": ["1"]})
          for option in ("--kv-transfer-config", "--speculative-config", "-sc", "--attention-config", "-ac")),
        ('--kv-transfer-config "$(make_config \'b\')" $X', ("options of $X", "options of $(make_config  b )"), {}),
        ("--seed '$(R)'", (), {"--seed": ["$(R)"]}),
        ('--engine-config-json \'{"a_b": 1, "c": true, "d": false, "e": null, "f": "x"}\' --c 2', (),
         {"--a-b": ["1"], "--c": ["2"], "--f": ["x"], "--engine-config-json": [
             '{"a_b": 1, "c": true, "d": false, "e": null, "f": "x"}']}),
    ],
)  # fmt: skip
def test_options_that_the_file_does_not_contain_are_named(
    words: str, sources: tuple[str, ...], options: dict[str, list[str]], tmp_path: Path
) -> None:
    engine = read_engine(write(tmp_path, "a.sh", f"vllm serve m {words}\n"))
    assert (engine.unread, engine.launch.options) == (sources, options)
    assert engine.launch.has_options is not bool(sources)


def test_a_default_that_would_fail_is_doubtful_if_no_file_has_variables(tmp_path: Path) -> None:
    """Such scripts are the commonest pair whose handshake hangs: each side tells the other its own loopback address."""
    prefill, decode = (write(tmp_path, name, f"vllm serve m {NIXL}\n") for name in ("prefill.sh", "decode.sh"))
    comparison = compare_connectors(read_engine(prefill), read_engine(decode))
    assert verdicts(comparison) == ["INCONCLUSIVE VLLM_NIXL_SIDE_CHANNEL_HOST"]
    [why] = [result.why for result in comparison.results if result.verdict is Verdict.INCONCLUSIVE]
    assert why == (
        "the sides are on different hosts, so neither may be a loopback address, unless the containers set "
        "VLLM_NIXL_SIDE_CHANNEL_HOST"
    )
    assert verdicts(compare_connectors(read_engine(prefill), read_engine(decode), one_host=True)) == ["FAIL ports"]


@pytest.mark.parametrize(
    ("names", "start"),
    [
        ("a.sh start", '[ -z "$HF_HOME" ] || cd "$HF_HOME"'),
        ("a.sh start", "[[ -n $TRACE ]] && set -x"),
        ("a.sh start", "echo a: b"),
        ("a.sh start", "a:b c"),
        ("a.sh a.bash a.sbatch a.slurm a.env", "cat > f <<E\na: b\n- c: d\nE"),
        ("start", "#!/bin/bash\ncat > f <<E\na: b\nE"),
    ],
)
def test_a_script_is_neither_json_nor_yaml(names: str, start: str, tmp_path: Path) -> None:
    for name in names.split():
        path = write(tmp_path, name, f"{start}\nvllm serve m --block-size 64 {NIXL}\n")
        assert read_engine(path).launch.options["--block-size"] == ["64"]


_NONE = " starts no engine that this command reads: expected vLLM or SGLang, also under Dynamo"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGE_BOMB = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 10)
)


_ADDED = " is YAML that cannot be read: its merge keys add more than 10000 entries"


MERGED = _ADDED if tuple(map(int, yaml.__version__.split(".")[:3])) < (6, 0, 4) else _NONE


MERGE = f"a: &a {{{', '.join(f'k{n}: 1' for n in range(11_000))}}}\nb: {{<<: *a}}\n"


TWO = "".join(
    f"---\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{containers: [{{name: c, command: [vllm, serve, m]}}]}}\n"
    for name in ("one", "two")
)


_BINARY = " is a binary file: expected YAML, JSON, KEY=VALUE lines or a command line"


_LONG = " is not JSON that can be read: a number or its nesting is too long"


_OPEN = " has a quotation that is not closed: it begins with"


_NO_OBJECT = ": the value of --kv-transfer-config is not a JSON object"


_TYPOGRAPHIC = " has the typographic quotation mark {}, which neither a shell nor JSON reads"


_GIVEN = '{"containers": [{"name": "c", "command": ["vllm", "serve"], "args": ["--kv-transfer-config", "%s"]}]}'


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("none.yaml", "kind: Pod\nspec: {containers: [{name: a, image: nginx}]}\n", _NONE),
        ("empty.txt", "", _NONE),
        ("words.txt", "just some words\n", _NONE),
        ("other.txt", "./start --debug\n", _NONE),
        ("broken.json", '{"kind": ', " is not JSON: Expecting value at line 1, column 10"),
        ("open", "{'a", " is not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        ("broken", '{"command": vllm}\n', " is not JSON: Expecting value at line 1, column 13"),
        ("deep.json", "[" * 200_000, _LONG),
        ("digits.json", f"[{'9' * 10_000}]", _LONG),
        ("broken.yaml", "kind: [\n",
         " is not YAML: expected the node content, but found '<stream end>' at line 2, column 1"),
        ("deep.yaml", f"a: {'[' * 100_000}", " is YAML that cannot be read: it is nested too deep"),
        ("tag.yaml", "kind: !!python/object/apply:os.system [id]\n", " is not YAML: could not determine a constructor "
         "for the tag 'tag:yaml.org,2002:python/object/apply:os.system' at line 1, column 7"),
        ("control.yaml", "kind: a\x07b\n", " is not YAML: it has a character that YAML does not allow"),
        ("bomb.yaml", BOMB, " has more than 100000 values: expected a configuration file"),
        ("large.yaml", "a: 1\n" * 60_000, " is YAML with more than 256 KiB: give it as JSON (kubectl get -o json)"),
        ("script.sh", "vllm serve m\n" * 6_000, " has a script of 78000 characters: expected at most 65536"),
        ("long.json", f'{{"kv_connector": "{"x" * 5000}"}}', "kv_connector has a value of 5000 characters: expected at "
         "most 4096"),
        ("a.sh", f"vllm serve m --dtype {'x' * 5000}", "--dtype has a value of 5000 characters: expected at most 4096"),
        ("many.yaml", f"a: &a 1\nb: [{'*a,' * 101}]\n", " is YAML that cannot be read: it has more than 100 aliases"),
        ("bomb-of-merges.yaml", MERGE_BOMB, MERGED),
        ("merge.yaml", MERGE, _ADDED),
        ("ordered.yml", yaml.safe_dump([{"b": deployment({}), "c": deployment({"name": "d"})}], sort_keys=False),
         " starts 2 engines: choose one with FILE#NAME, NAME is o/c or o/d"),
        ("ordered", "- a: 1\n- name: x\n  args: [{name: y, containers: [{name: z, command: vllm serve}]}]\n"
         "- containers: [{command: [vllm, serve]}]", " starts 2 engines: choose one with FILE#NAME, NAME is y/z"),
        ("two.yaml#three", TWO, " has no 'three' that starts an engine; it has one/c or two/c"),
        ("ten.sh", "vllm serve m\n" * 10,
         " starts 10 engines: choose one with FILE#NAME, NAME is 1 or 2 or 3 or 4 or 5 or 6 or 7 or 8 or one of 2 "
         "more"),
        ("eight.sh#0", "vllm serve m\n" * 8,
         " has no '0' that starts an engine; it has 1 or 2 or 3 or 4 or 5 or 6 or 7 or 8"),
        ("two.yaml", TWO, " starts 2 engines: choose one with FILE#NAME, NAME is one/c or two/c"),
        ("binary.bin", "\xff\xfe", _BINARY),
        ("zero.txt", "vllm serve\0", _BINARY),
        ("quotes.txt", "vllm serve 'm\n", f"{_OPEN} ' in line 1"),
        ("quotes-in-quotes.txt", "echo \"it's\"\nvllm serve 'm\n", f"{_OPEN} ' in line 2"),
        ("hash.txt", "vllm serve m#1 'x\n", f"{_OPEN} ' in line 1"),
        ("two-quotes.txt", "echo 'a\"b' \"a\\\"b'\"\nvllm serve \"m\n", f'{_OPEN} " in line 2'),
        ("mark.txt", "vllm serve m 'a\u2019 x\n",
         f"{_OPEN} ' in line 1; the typographic mark \u2019 (U+2019) closes nothing: write '"),
        ("shell.json", '{"containers": [{"command": ["sh", "-c", "vllm serve \'m"]}]}', f"{_OPEN} ' in line 1"),
        ("transfer.txt", "vllm serve m --kv-transfer-config '{'\n", f"{_NO_OBJECT}: expected {{\u2026}} in quotes"),
        ("a.json", _GIVEN % "'{}'", f"#c{_NO_OBJECT}: it is in quotes that no shell removes, so delete them"),
        ("a.json", _GIVEN % "{'a': 1}", f"#c{_NO_OBJECT}: write \" around names and texts, and not '"),
        ("a.json", _GIVEN % "[1]", f"#c{_NO_OBJECT}: expected {{\u2026}} in quotes"),
        ("a.json", _GIVEN % "{\u201ca\u201d: 1}",
         f"#c{_NO_OBJECT}: it has the typographic quotation mark \u201c (U+201C)"),
        ("a.json", _GIVEN % "\u201cx", f"#c{_TYPOGRAPHIC.format(chr(0x201C) + ' (U+201C)')}"),
        *(("a.txt", f"{start} \u2018b", _TYPOGRAPHIC.format("\u2018 (U+2018)"))
          for start in ("vllm serve m --a", "start --kv-transfer-config")),
        ("a.json", '{"containers": [{"image": "vllm", "args": ["--a", "b\u201d"]}]}',
         _TYPOGRAPHIC.format("\u201d (U+201D)")),
    ],
)  # fmt: skip
def test_a_bad_input_ends_in_one_sentence(
    name: str, data: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name.partition("#")[0]
    path.write_text(data, encoding="latin-1" if name == "binary.bin" else "utf-8")
    assert cli.main(["connector", str(tmp_path / name), str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.removeprefix("pytest-nixl: ").removeprefix(str(path)) == f"{sentence}\n"


def test_a_file_of_100_mb_is_refused_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as stream:
        stream.truncate(100 << 20)
    assert cli.main(["connector", str(path), str(path)]) == 2
    assert "has more than 1 MiB" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path, "a#b.json", json.dumps(deployment({})))
    for path, reason in ((tmp_path / "none", "cannot be read"), (tmp_path, "is a directory: expected a configuration")):
        assert cli.main(["connector", str(path), good]) == 2
        assert f"{path} {reason}" in capsys.readouterr().err
    assert cli.main(["connector", good, f"{good}#c"]) == 1
    assert f"prefill: {good}#o/c (vLLM)\n" in capsys.readouterr().out


def test_yaml_needs_a_package_and_json_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write(tmp_path, f"a.{ending}", dump(deployment({}))) for ending, dump in DUMPS.items()]
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert cli.main(["connector", *paths]) == 2
    assert capsys.readouterr().err == (
        f"pytest-nixl: {paths[1]} is YAML, which needs PyYAML, and that is not installed\n"
        "remedy: pip install 'PyYAML>=6.0.1', or give the file as JSON (kubectl get -o json)\n"
    )
    assert cli.main(["connector", paths[0], paths[0]]) == 1
