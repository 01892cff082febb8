# SPDX-License-Identifier: Apache-2.0
"""Planted differences between a prefill and a decode engine are named, alone and together; equal ones say so."""

from __future__ import annotations

import copy
import json
import re
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.cli_run import ROOT

from pytest_nixl import cli
from pytest_nixl.checks.connector.command_line import Launch, is_resolved, script_launches
from pytest_nixl.checks.connector.comparison import ConnectorComparison, compare_connectors
from pytest_nixl.checks.connector.containers import ConfiguredEngine, PodResources, read_engine
from pytest_nixl.checks.connector.engine_fields import named_releases, release_of
from pytest_nixl.checks.connector.rules import RULES, ConfigurationLayer
from pytest_nixl.checks.connector.shell_functions import called_body, take_functions
from pytest_nixl.model.verdicts import Verdict

#: A side before it is written to a file: ``options``, ``transfer``, ``env``, ``image`` and ``command``.
Side = dict[str, Any]


def vllm_side(role: str) -> Side:
    """Return one side of vLLM."""
    return {
        "image": "vllm/vllm-openai:v0.14.0",
        "command": ["vllm", "serve"],
        "options": {
            "--model": "Qwen/Qwen3-32B",
            "--dtype": "bfloat16",
            "--kv-cache-dtype": "fp8",
            "--block-size": "64",
            "--tensor-parallel-size": "4",
            "--attention-backend": "FLASH_ATTN",
        },
        "transfer": {
            "kv_connector": "NixlConnector",
            "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
            "engine_id": role,
            "kv_buffer_device": "cuda",
            "kv_connector_extra_config": {"backends": ["UCX"]},
        },
        "env": {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": {"prefill": "10.0.0.1", "decode": "10.0.0.2"}[role],
            "VLLM_KV_CACHE_LAYOUT": "HND",
            "UCX_TLS": "rc,cuda_copy,cuda_ipc",
            "NIXL_ETCD_ENDPOINTS": "http://etcd:2379",
            "NIXL_ETCD_NAMESPACE": "/nixl/qwen",
        },
    }


def sglang_side(role: str) -> Side:
    """Return one side of SGLang."""
    return {
        "image": "lmsysorg/sglang:v0.5.9",
        "command": ["python3", "-m", "sglang.launch_server"],
        "options": {
            "--model-path": "Qwen/Qwen3-32B",
            "--dtype": "bfloat16",
            "--kv-cache-dtype": "fp8_e4m3",
            "--page-size": "64",
            "--tp-size": "4",
            "--host": "0.0.0.0",
            "--disaggregation-mode": role,
            "--disaggregation-transfer-backend": "nixl",
            "--disaggregation-bootstrap-port": "8998",
        },
        "env": {"SGLANG_DISAGGREGATION_NIXL_BACKEND": "UCX", "UCX_TLS": "rc,cuda_copy"},
    }


def dynamo_side(role: str) -> Side:
    """Return one side of vLLM under Dynamo."""
    side = vllm_side(role)
    side["command"] = ["python3", "-m", "dynamo.vllm"]
    side["image"] = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.0.0"
    side["options"]["--disaggregation-mode"] = role
    side["env"] |= {"DYN_NAMESPACE": "qwen", "ETCD_ENDPOINTS": "http://etcd:2379", "NATS_SERVER": "nats://nats:4222"}
    return side


SIDES = {"vLLM": vllm_side, "SGLang": sglang_side, "Dynamo": dynamo_side}


def change(part: str, name: str, value: Any, role: str = "decode") -> Callable[[dict[str, Side]], None]:
    """Return a function that plants a value on one side."""

    def plant(sides: dict[str, Side]) -> None:
        sides[role][part][name] = value

    return plant


def of_image(tag: str) -> Callable[[dict[str, Side]], None]:
    """Return a function that plants another tag of the image."""

    def plant(sides: dict[str, Side]) -> None:
        sides["decode"]["image"] = f"{sides['decode']['image'].partition(':')[0]}:{tag}"

    return plant


#: For each engine, planted differences by the field that must be named.
PLANTED: dict[str, dict[str, Callable[[dict[str, Side]], None]]] = {
    "vLLM": {
        "image": of_image("v0.13.0"),
        "UCX_TLS": change("env", "UCX_TLS", "tcp,cuda_copy"),
        "NIXL_ETCD_ENDPOINTS": change("env", "NIXL_ETCD_ENDPOINTS", "http://etcd:2379/"),
        "NIXL_ETCD_NAMESPACE": change("env", "NIXL_ETCD_NAMESPACE", "/nixl/qwen/"),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": change("env", "VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost"),
        "NIXL_TELEMETRY_ENABLE": change("env", "NIXL_TELEMETRY_ENABLE", "n"),
        "NIXL_BACKEND": change("env", "NIXL_BACKEND", "LIBFABRIC", "prefill"),
        "PYTORCH_CUDA_ALLOC_CONF": change("env", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        "backends": change("transfer", "kv_connector_extra_config", {"backends": ["LIBFABRIC"]}),
        "kv_connector": change("transfer", "kv_connector", "NixlPushConnector"),
        "kv_role": change("transfer", "kv_role", "kv_reader"),
        "engine_id": change("transfer", "engine_id", "prefill"),
        "--model": change("options", "--model", "Qwen/Qwen3-8B"),
        "--dtype": change("options", "--dtype", "half"),
        "--kv-cache-dtype": change("options", "--kv-cache-dtype", "auto"),
        "--block-size": change("options", "--block-size", "16"),
        "--tensor-parallel-size": change("options", "--tensor-parallel-size", "3"),
        "--attention-backend": change("options", "--attention-backend", "FLASHINFER"),
        "VLLM_KV_CACHE_LAYOUT": change("env", "VLLM_KV_CACHE_LAYOUT", "NHD", "prefill"),
        "--disable-hybrid-kv-cache-manager": change("options", "--disable-hybrid-kv-cache-manager", ""),
        "speculative method": change("options", "--speculative-config", '{"method": "mtp"}'),
    },
    "SGLang": {
        "image": of_image("v0.5.8"),
        "UCX_TLS": change("env", "UCX_TLS", "^all"),
        "UCX_NET_DEVICES": change("env", "UCX_NET_DEVICES", "lo"),
        "--host": change("options", "--host", "127.0.0.1", "prefill"),
        "SGLANG_DISAGGREGATION_NIXL_BACKEND": change("env", "SGLANG_DISAGGREGATION_NIXL_BACKEND", "ucx"),
        "NIXL_BACKEND": change("env", "NIXL_BACKEND", "LIBFABRIC"),
        "PYTORCH_CUDA_ALLOC_CONF": change("env", "PYTORCH_ALLOC_CONF", "backend:native, expandable_segments:true"),
        "--disaggregation-mode": change("options", "--disaggregation-mode", "prefill"),
        "--disaggregation-transfer-backend": change("options", "--disaggregation-transfer-backend", "mooncake"),
        "--model-path": change("options", "--model-path", "Qwen/Qwen3-8B"),
        "--dtype": change("options", "--dtype", "float16"),
        "--kv-cache-dtype": change("options", "--kv-cache-dtype", "auto"),
        "--page-size": change("options", "--page-size", "16"),
        "--tp-size": change("options", "--tp-size", "6"),
        "--pp-size": change("options", "--pp-size", "2"),
        "--dcp-size": change("options", "--dcp-size", "2", "prefill"),
        "--attn-cp-size": change("options", "--attn-cp-size", "2"),
    },
    "Dynamo": {
        "image": of_image("0.9.0"),
        "ETCD_ENDPOINTS": change("env", "ETCD_ENDPOINTS", "http://other:2379"),
        "NIXL_ETCD_NAMESPACE": change("env", "NIXL_ETCD_NAMESPACE", "/nixl/other"),
        "NIXL_TELEMETRY_ENABLE": change("env", "NIXL_TELEMETRY_ENABLE", "0", "prefill"),
        "--namespace": change("env", "DYN_NAMESPACE", "other"),
        "--discovery-backend": change("options", "--discovery-backend", "kubernetes"),
        "--request-plane": change("env", "DYN_REQUEST_PLANE", "nats"),
        "--response-plane": change("env", "DYN_RESPONSE_PLANE", "quic"),
        "worker role": change("options", "--disaggregation-mode", "agg", "prefill"),
        "--block-size": change("options", "--block-size", "100"),
        "--kv-cache-dtype": change("options", "--kv-cache-dtype", "auto"),
        "kv_role": change("transfer", "kv_role", "producer", "prefill"),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": change("env", "VLLM_NIXL_SIDE_CHANNEL_HOST", "0.0.0.0"),
    },
}
ONE_BY_ONE = [(engine, field) for engine, planted in PLANTED.items() for field in planted]


_EFA = "vpc.amazonaws.com/efa"
_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"


def pod(side: Side, name: str = "engine") -> dict[str, Any]:
    """Return a Deployment with one container."""
    args = [word for option, value in side["options"].items() for word in (option, value) if word]
    if side.get("transfer"):
        args += ["--kv-transfer-config", json.dumps(side["transfer"])]
    container = {
        "name": "engine",
        "resources": {"limits": {"nvidia.com/gpu": side.get("gpus", 64), side.get("nic", _EFA): side.get("efa", 0)}},
        "image": side["image"],
        "command": side["command"],
        "args": args,
        "env": [{"name": key, "value": value} for key, value in side["env"].items()],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"template": {"spec": {"containers": [{"name": "proxy", "image": "envoy:1"}, container]}}},
    }


def sides_of(engine: str) -> dict[str, Side]:
    """Return both sides of an engine, which match."""
    return {role: SIDES[engine](role) for role in ("prefill", "decode")}


def files(folder: Path, sides: dict[str, Side]) -> tuple[str, str]:
    """Write both sides: prefill as JSON, decode as YAML."""
    prefill, decode = folder / "prefill.json", folder / "decode.yaml"
    prefill.write_text(json.dumps(pod(sides["prefill"], "prefill")))
    decode.write_text(yaml.safe_dump(pod(sides["decode"], "decode")))
    return str(prefill), str(decode)


def compared(folder: Path, sides: dict[str, Side]) -> ConnectorComparison:
    """Write both sides as JSON, which is read sooner, and compare them."""
    engines = []
    for role, side in sides.items():
        (folder / f"{role}.json").write_text(json.dumps(pod(side, role)))
        engines.append(read_engine(str(folder / f"{role}.json")))
    return compare_connectors(*engines)


def wrong(comparison: ConnectorComparison) -> set[str]:
    """Return the fields that fail."""
    return {result.rule.field for result in comparison.results if result.verdict is Verdict.FAIL}


def doubtful(comparison: ConnectorComparison) -> set[str]:
    """Return the fields that may be wrong."""
    return {
        result.rule.field
        for result in comparison.results
        if result.verdict in (Verdict.WARN, Verdict.INCONCLUSIVE)
    }  # fmt: skip


@pytest.mark.parametrize("engine", SIDES)
def test_equal_configurations_say_so(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = files(tmp_path, sides_of(engine))
    comparison = compare_connectors(*map(read_engine, paths))
    assert wrong(comparison) == doubtful(comparison) == set()
    assert cli.main(["connector", *paths, "--gate"]) == 0
    assert "PASS: prefill and decode match in all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("engine", "env", "first"),
    [
        ("vLLM", {}, "on decode's host: pytest-nixl doctor --side-channel 10.0.0.1:5600; then "),
        ("vLLM", {"VLLM_NIXL_SIDE_CHANNEL_HOST": "$(POD_IP)", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5700"},
         "on decode's host: pytest-nixl doctor --side-channel HOST:5700 (HOST: prefill's address); then "),
        ("SGLang", {}, "on both hosts: pytest-nixl doctor; then "),
    ],
)  # fmt: skip
def test_after_a_match_the_next_step_is_named(
    engine: str, env: dict[str, str], first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = sides_of(engine)
    for side in sides.values():
        side["env"] = {**side["env"], **({} if side is sides["decode"] else env)}
    paths = files(tmp_path, sides)
    assert cli.main(["connector", *paths]) == 0
    assert capsys.readouterr().out.endswith(f"\nnext: {first}on both hosts: pytest-nixl run quick\n")
    PLANTED[engine]["--dtype"](sides)
    assert cli.main(["connector", *files(tmp_path, sides)]) == 1
    assert "next:" not in capsys.readouterr().out


def test_the_next_step_has_the_address_of_a_file_of_variables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [script(tmp_path, f"{host}.env", f"VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.{host}\n") for host in (1, 2)]
    assert cli.main(["connector", *paths]) == 0
    assert "next: on decode's host: pytest-nixl doctor --side-channel 10.0.0.1:5600; then" in capsys.readouterr().out
    transfer = """--kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'"""
    lmcache = script(tmp_path, "lmcache.sh", f"PYTHONHASHSEED=0 vllm serve m {transfer}\n")
    assert cli.main(["connector", lmcache, lmcache]) == 0
    assert "next: on both hosts: pytest-nixl doctor; then" in capsys.readouterr().out


def test_both_sides_of_ray_serve_are_read_from_one_file(tmp_path: Path) -> None:
    def llm_config(source: str) -> dict[str, Any]:
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        return {
            "model_loading_config": {"model_id": "chat", "model_source": source},
            "engine_kwargs": {"kv_transfer_config": transfer, "tensor_parallel_size": 2},
        }

    document = {
        "applications": [{"name": "pd", "args": {"prefill_config": llm_config("a"), "decode_config": llm_config("b")}}]
    }
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    comparison = compare_connectors(read_engine(f"{path}#prefill_config"), read_engine(f"{path}#decode_config"))
    assert wrong(comparison) == {"--model"}
    assert doubtful(comparison) == set()
    results = {result.rule.field: result.verdict for result in comparison.results}
    assert (results["UCX_TLS"], results["--tensor-parallel-size"]) == (Verdict.NOT_APPLICABLE, Verdict.PASS)


def test_at_least_ten_differences_of_each_engine_are_planted() -> None:
    assert {engine for engine, planted in PLANTED.items() if len(planted) >= 10} == set(SIDES)


@pytest.mark.parametrize(("engine", "field"), ONE_BY_ONE)
def test_a_planted_difference_is_named_alone(engine: str, field: str, tmp_path: Path) -> None:
    sides = sides_of(engine)
    PLANTED[engine][field](sides)
    comparison = compared(tmp_path, sides)
    assert wrong(comparison) == {field}
    named = next(result for result in comparison.results if result.rule.field == field)
    assert field in named.sentence
    assert named.prefill in named.sentence
    assert named.decode in named.sentence
    assert named.remedy
    assert named.rule.source


@pytest.mark.parametrize("engine", SIDES)
def test_all_planted_differences_are_named_together(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = sides_of(engine)
    for plant in PLANTED[engine].values():
        plant(sides)
    assert wrong(compared(tmp_path, sides)) == set(PLANTED[engine])
    assert cli.main(["connector", *files(tmp_path, sides)]) == 1
    layers = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL ")]
    order = [f"{layer.value}:" for layer in ConfigurationLayer]
    assert layers == sorted(layers, key=order.index)
    assert len(layers) == len(PLANTED[engine])


def planted(engine: str, changes: str) -> dict[str, Side]:
    """Return both sides of an engine with changes in the form of ``connector_findings.txt``."""
    sides = sides_of(engine)
    for change in filter(None, changes.split(" | ")):
        role, part, *rest = change.split(" ", 2)
        text = "".join(rest)
        name, sign, value = text.partition("=")
        for side in sides.values() if role == "both" else [sides[role]]:
            if part in ("options", "env", "transfer") and text.startswith("-- "):
                side[part].pop(text.removeprefix("-- "), None)
            elif part == "transfer":
                side[part] = {**side[part], name: json_or_text(value)} if sign else {}
            elif part in ("options", "env"):
                side[part][name] = value
            elif part == "release":
                side["image"] = f"{side['image'].partition(':')[0]}:{text}"
            else:
                side[part] = int(text) if text.isdigit() else text
    return sides


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def findings_of(comparison: ConnectorComparison) -> list[str]:
    """Return the notes, the options of which no rule knows, and the sentence of each finding."""
    return [
        *(f"note: {note}" for note in comparison.unread),
        *(f"no rule about {option}" for option in comparison.unjudged_options),
        *(
            f"{result.verdict} {result.sentence}"
            + (f" -> {result.remedy}" if result.remedy != result.rule.remedy else "")
            for result in comparison.results
            if result.verdict not in (Verdict.PASS, Verdict.NOT_APPLICABLE)
        ),
    ]


def findings() -> list[tuple[str, list[str]]]:
    """Return each case of ``connector_findings.txt`` with its findings."""
    text = re.sub(r"(?m)^#.*\n", "", Path(__file__).with_name("connector_findings.txt").read_text())
    cases = [case.split("\n    ") for case in re.split(r"\n(?! )", text.strip())]
    return [(case[0], case[1:]) for case in cases]


@pytest.mark.parametrize(("case", "expected"), findings())
def test_two_sides_have_these_findings(case: str, expected: list[str], tmp_path: Path) -> None:
    engine, _, changes = case.partition(": ")
    assert findings_of(compared(tmp_path, planted(engine, changes))) == expected


def test_every_rule_is_on_its_page_and_says_what_to_do() -> None:
    page = (ROOT / "docs/reference/connector-rules.md").read_text()
    listed = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert listed == [
        [f"`{rule.field}`", str(rule.releases or rule.engine or "all"), rule.requirement, rule.source] for rule in RULES
    ]
    assert all(rule.remedy for rule in RULES)
    assert [rule.layer for rule in RULES] == sorted((rule.layer for rule in RULES), key=list(ConfigurationLayer).index)


@pytest.mark.parametrize(
    ("image", "package"),
    [
        *((name, "vllm") for name in ("vllm", "vllm-openai")),
        ("sglang", "sglang"),
        *((f"{name}-runtime", "ai-dynamo") for name in ("vllm", "sglang", "tensorrtllm")),
        ("another", ""),
    ],
)
@pytest.mark.parametrize("tag", ["v1.2.3", "1.2.3@sha256:0", "latest"])
def test_the_tag_of_an_image_is_a_release(image: str, package: str, tag: str, tmp_path: Path) -> None:
    sides = sides_of("vLLM")
    sides["prefill"]["image"] = f"host:5000/a/{image}:{tag}"
    side = compared(tmp_path, sides).pair.prefill
    releases = {name: release_of(side, name) for name in ("vllm", "sglang", "ai-dynamo", "nixl")}
    assert releases == {name: "1.2.3" if name == package and tag != "latest" else "" for name in releases}


def test_what_a_command_installs_and_names_is_a_release(tmp_path: Path) -> None:
    packages = {"nixl": "1.5.1", "nixl-cu12": "1.5.2", "nixl-cu13": "1.5.3", "vllm": "0.33.0+cu130", "sglang": "0.5.9"}
    packages["ai-dynamo"] = "1.0.0rc1"
    words = " ".join(
        f"{name}{extra}=={release}"
        for (name, release), extra in zip(
            packages.items(), ("", "", "[dev]", "[audio,flash-attn]", "", "[vllm]"), strict=True
        )
    )
    installs = script(tmp_path, "a.sh", f"pip install {words}\n{_START}\n")
    variables = " ".join(f"{name}_VERSION=1.2.{number}" for number, name in enumerate(("NIXL", "VLLM", "SGLANG")))
    names = script(tmp_path, "b.sh", f"pip install vllm==0.14.0\n{variables} {_START}\n")
    pair = compare_connectors(read_engine(installs), read_engine(names)).pair
    assert named_releases(pair.prefill) == packages
    assert named_releases(pair.decode) == {"nixl": "1.2.0", "vllm": "0.14.0", "sglang": "1.2.2"}


def test_different_engines_are_named(tmp_path: Path) -> None:
    sides = {"prefill": vllm_side("prefill"), "decode": sglang_side("decode")}
    assert wrong(compared(tmp_path, sides)) == {"engine", "NIXL_ETCD_NAMESPACE"}
    for first, second in (("vLLM", "Dynamo"), ("Dynamo", "vLLM")):
        sides = {"prefill": SIDES[first]("prefill"), "decode": SIDES[second]("decode")}
        for side in sides.values():
            side["transfer"], side["env"] = {}, {"DYN_NAMESPACE": side["image"]}
        comparison = compared(tmp_path, sides)
        assert wrong(comparison) == {"engine", "kv_connector", _HOST}
        without = {
            "vLLM": "without --kv-transfer-config no engine transfers anything",
            "Dynamo": "prefill has no --kv-",
        }
        [why] = [result.why for result in comparison.results if result.rule.field == "kv_connector"]
        assert why.startswith(without[first])


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


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("size", ["many", "0", "-1", "1.5", "\u0663", "1" * 12])
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("vLLM", "--tensor-parallel-size --pipeline-parallel-size --decode-context-parallel-size --block-size"),
        ("SGLang", "--tp-size --dp-size --pp-size --dcp-size --page-size"),
    ],
)
def test_a_size_is_a_positive_number(engine: str, options: str, size: str, role: str, tmp_path: Path) -> None:
    for option in options.split():
        sides = sides_of(engine)
        sides[role]["options"][option] = size
        field = option.replace("--dp-size", "--tp-size")  # SGLang divides its TP by it
        assert field in wrong(compared(tmp_path, sides)), option


@pytest.mark.parametrize(
    ("engine", "setting"),
    [
        *(("vLLM", f"DYN_{name}_PORT=5600") for name in ("SYSTEM", "FORWARDPASS_METRIC", "KVBM_METRICS")),
        *(("vLLM", f"DYN_KVBM_LEADER_ZMQ_{name}_PORT=5600") for name in ("PUB", "ACK")),
        ("vLLM", "NIXL_TELEMETRY_PROMETHEUS_PORT=5600"),
        *(("vLLM", f"{name}=5600") for name in ("--data-parallel-rpc-port", "-dpp", "--master-port", "--port")),
        *(("vLLM", f'--kv-events-config={{"{name}": "tcp://*:5600"}}') for name in ("endpoint", "replay_endpoint")),
        ("SGLang", "--nccl-port=30000"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_two_ports_of_an_engine_are_the_same(role: str, engine: str, setting: str, tmp_path: Path) -> None:
    name, _, value = setting.partition("=")
    sides = sides_of(engine)
    sides[role]["options" if name.startswith("-") else "env"][name] = value
    assert wrong(compared(tmp_path, sides)) == {"ports"}


@pytest.mark.parametrize(
    ("release", "options", "port", "fails"),
    [
        ("0.11.2", {}, "5603", True),
        ("0.11.2", {}, "5604", False),
        ("0.12.0", {}, "5601", False),
        ("0.14.0", {"--data-parallel-size": "3"}, "5602", True),
        ("0.14.0", {"--data-parallel-size": "3"}, "5603", False),
        *(("0.14.0", {"-dp": "3", name: "2"}, "5602", False) for name in ("-dpl", "--data-parallel-size-local")),
    ],
)
def test_each_rank_of_a_side_channel_has_a_port(
    release: str, options: dict[str, str], port: str, fails: bool, tmp_path: Path
) -> None:
    sides = sides_of("vLLM")
    for side in sides.values():
        side["image"] = f"vllm/vllm-openai:v{release}"
        side["env"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "10.0.0.1"
    sides["prefill"]["options"] |= options
    sides["decode"]["options"]["--port"] = "8001"
    sides["decode"]["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] = port
    reasons = {result.rule.field: result.why for result in compared(tmp_path, sides).results}
    assert (f"prefill's VLLM_NIXL_SIDE_CHANNEL_PORT (5600 to {port})" in reasons["ports"]) is fails


def test_loopback_is_right_on_one_host(tmp_path: Path) -> None:
    sides = sides_of("SGLang")
    sides["prefill"]["options"]["--host"] = "127.0.0.1"
    sides["decode"]["options"]["--port"] = "30001"
    paths = files(tmp_path, sides)
    assert cli.main(["connector", *paths]) == 1
    assert cli.main(["connector", *paths, "--one-host"]) == 0


def test_a_backend_that_is_not_built_in_is_named_if_the_plugins_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = files(tmp_path, planted("SGLang", "both env SGLANG_DISAGGREGATION_NIXL_BACKEND=MOONCAKE"))
    assert cli.main(["connector", *paths]) == 0
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    assert cli.main(["connector", *paths, "--plugin-dir", str(plugins)]) == 1
    assert "MOONCAKE is not built in: the folder of NIXL's plugins has none\n" in capsys.readouterr().out
    for name in ("libplugin_UCX.so", "libplugin_OWN.so", "libplugin_no.a"):
        (plugins / name).touch()
    assert cli.main(["connector", *paths, "--plugin-dir", str(plugins)]) == 1
    assert "MOONCAKE is not built in: the folder of NIXL's plugins has OWN, UCX\n" in capsys.readouterr().out
    paths = files(tmp_path, planted("SGLang", "both env SGLANG_DISAGGREGATION_NIXL_BACKEND=OWN"))
    assert cli.main(["connector", *paths]) == 1
    assert cli.main(["connector", *paths, "--plugin-dir", str(plugins)]) == 0


@pytest.mark.parametrize(
    ("backends", "works"),
    [("UCX LIBFABRIC MOONCAKE UCCL GPUNETIO", True), ("POSIX GDS GDS_MT OBJ GUSLI HF3FS INFINIA AZURE_BLOB", False)],
)
def test_only_a_backend_between_agents_carries_the_cache(backends: str, works: bool, tmp_path: Path) -> None:
    for backend in backends.split():
        sides = sides_of("SGLang")
        for side in sides.values():
            side["env"]["SGLANG_DISAGGREGATION_NIXL_BACKEND"] = backend
        sentences = [result.sentence for result in compared(tmp_path, sides).results if result.verdict is Verdict.FAIL]
        assert (sentences, works) == ([], True) or "reaches storage only" in "".join(sentences), backend


def test_no_name_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def numeric_only(*given: Any) -> Any:
        assert given[5] & socket.AI_NUMERICHOST, given
        return real(*given)

    monkeypatch.setattr(socket, "getaddrinfo", numeric_only)
    sides = sides_of("Dynamo")
    for side in sides.values():
        side["env"]["NIXL_ETCD_ENDPOINTS"] = "http://etcd:2379,http://10.0.0.9:2379,http://[::2]:2379"
    assert wrong(compared(tmp_path, sides)) == set()


# What the files may be

SCRIPT = """\
#!/bin/bash
# The {role} side.
export UCX_TLS=rc,cuda_copy
POD_IP=10.0.0.{last}
VLLM_NIXL_SIDE_CHANNEL_HOST=${{POD_IP}} \\
numactl -N 0 vllm serve Qwen/Qwen3-32B \\
  --block_size={block} -tp 4 \\
  --kv-transfer-config.kv_role kv_producer --kv-transfer-config.kv_connector NixlConnector \\
  --kv-transfer-config.kv_role kv_both \\
  --kv-transfer-config.kv_connector_extra_config.backends+ UCX > log 2>&1 &
"""


def test_a_shell_script_is_read(tmp_path: Path) -> None:
    paths = []
    for role, last, block in (("prefill", 1, 64), ("decode", 2, 48)):
        path = tmp_path / f"{role}.sh"
        path.write_text(SCRIPT.format(role=role, last=last, block=block))
        paths.append(str(path))
    comparison = compare_connectors(*map(read_engine, paths))
    assert wrong(comparison) == {"--block-size"}
    values = comparison.pair.prefill.values
    assert [values[name].text for name in ("--model", "--tensor-parallel-size", "kv_role", "backends")] == [
        "Qwen/Qwen3-32B", "4", "kv_both", "UCX",
    ]  # fmt: skip
    assert values["VLLM_NIXL_SIDE_CHANNEL_HOST"].text == "10.0.0.1"


#: How scripts set the address of an engine and start it, as shells read it; "": its value is known only where it runs.
_ADDRESS = "VLLM_NIXL_SIDE_CHANNEL_HOST"
_START = """vllm serve m --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'"""
_SCRIPTS = [
    ("10.0.0.1", f"export {_ADDRESS}=10.0.0.1; {_START}"),
    ("10.0.0.1", f"declare -x {_ADDRESS}=10.0.0.1  # don't change it\n{_START}"),
    ("10.0.0.1", f"if true; then export {_ADDRESS}=10.0.0.1; fi\n(cd / && exec {_START}) | tee log"),
    ("10.0.0.1", f'bash -c "{_ADDRESS}=10.0.0.1 {_START.replace(chr(34), chr(92) + chr(34))}"'),
    (
        "10.0.0.1",
        f'ssh -o "BatchMode yes" node "{_ADDRESS}=10.0.0.1 {_START.replace(chr(34), chr(92) + chr(34))}"',
    ),
    ("10.0.0.1", f"cat > run.txt <<END\nhow it's run\nEND\n{_ADDRESS}=10.0.0.1 {_START}"),
    ("10.0.0.1", f"cat <<<$A; cat > run.txt <<END\nhow it's run\nEND\n{_ADDRESS}=10.0.0.1 {_START}"),
    ("10.0.0.1", f"{_ADDRESS}=10.0.0.2\nif true; then :; fi\n{_ADDRESS}=10.0.0.1\n{_START}"),
    ("10.0.0.1", f"{_ADDRESS}=10.0.0.2\ncase $1 in\na) :;;\nesac\n{_ADDRESS}=10.0.0.1\n{_START}"),
    ("10.0.0.1", f"{_ADDRESS}=${{A:=10.0.0.1}} {_START}"),
    ("", f"if [ $1 ]; then {_ADDRESS}=10.0.0.1; else {_ADDRESS}=10.0.0.2; fi\n{_START}"),
    ("10.0.0.1", f"start() {{\n{_START}\n}}\nexport {_ADDRESS}=10.0.0.1\nstart"),
    ("10.0.0.1", f'one() {{ vllm serve "$@"; }}\n{_ADDRESS}=10.0.0.1 one {_START.removeprefix("vllm serve ")}'),
    ("10.0.0.1", f'function run {{\n  local ip=$1; shift\n  {_ADDRESS}=$ip \\\n    "$@"\n}}\nrun 10.0.0.1 {_START}'),
    (
        "10.0.0.1",
        f"at() {{\n{_ADDRESS}=${{2:-10.0.0.1}} $1 serve m --kv-transfer-config ${{3}}\n}}\n"
        f"at vllm '' {_START.split()[-1]}",
    ),
    (
        "10.0.0.1",
        f"run() {{  # }} is no end\n  if true; then {{ cd /; }}; fi\n  {_ADDRESS}=$1 {_START}\n}}\nrun 10.0.0.1",
    ),
    ("10.0.0.1", f"start () {{\n{_ADDRESS}=10.0.0.1 {_START}\n}}\ntrap start EXIT"),
    ("10.0.0.1", f"# as run() {{\nrun() {{\n  {_ADDRESS}=$1 {_START}\n}}\nrun 10.0.0.1"),
    (
        "10.0.0.1",
        f"a() {{ :; }}\nb() {{\n  c() {{ :; }}\n  c\n  {_START}\n}}\nexport {_ADDRESS}=10.0.0.1\nb\n",
    ),
    ("10.0.0.1", f"{_ADDRESS}=10.0.0.1 xargs vllm serve <<'END'\nm\n{_START.split(' ', 3)[3]}\nEND"),
    ("10.0.0.1", f"export {_ADDRESS}=10.0.0.1\ncat <<END | xargs -r vllm serve\n{_START.split(' ', 2)[2]}\nEND"),
    ("", f": ${{{_ADDRESS}:=10.0.0.1}}\n{_START}"),
    ("", f"read -r {_ADDRESS} _ <<< 10.0.0.1\nexport {_ADDRESS}\n{_START}"),
    ("", f"printf -v {_ADDRESS} 10.0.0.1; {_START}"),
    ("", f"srun --export=ALL,{_ADDRESS}=10.0.0.1 {_START}"),
    ("", f"export {_ADDRESS}=$(hostname -I | awk '{{print $1}}')\n{_START}"),
    ("", f"{_ADDRESS}=$( (cd /; hostname) | head -1 ) {_START}"),
    ("", f"{_ADDRESS}=$(python3 -c \"print('(', 1)\") {_START}"),
    ("", f"{_ADDRESS}=`ip addr | grep -oP '(?<=inet )[0-9.]+'` {_START}"),
    ("", f"{_ADDRESS}=`cd /; vllm serve other` {_START}"),
    ("", f'{_ADDRESS}="$(get "$A" \';\' | tail -1)" {_START}'),
]


@pytest.mark.parametrize(("address", "script"), _SCRIPTS)
def test_a_shell_script_is_read_as_a_shell_does(address: str, script: str) -> None:
    [launch] = script_launches(script, {})
    value = launch.environment[_ADDRESS]
    assert value == address if address else not is_resolved(value)
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
@pytest.mark.parametrize("call", ["run", "A=1 B= run 2", "true && run|tee", "(run)", "{ run; }", "a;run&"])
def test_the_body_of_a_function_is_taken_if_it_is_called(definition: str, body: str, call: str) -> None:
    other = "other() { y; }"
    script = f"before\n{definition}\n{other}\n"
    assert take_functions(f"{script}{call}\n") == (f"before\n\n{other}\n{call}\n", {"run": body})
    assert take_functions(f"{script}{call}\nother\n") == (
        f"before\n\n\n{call}\nother\n",
        {"run": body, "other": " y; "},
    )
    assert take_functions(f"{script}runs -run\n") == (f"{script}runs -run\n", {})


def test_no_more_functions_are_taken_than_can_be_read() -> None:
    assert take_functions("run() { x\nrun\n") == ("run() { x\nrun\n", {})
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
        ("noshift 2; x $1", "a b c", "noshift 2; x a"),
        ("x $@; y ${*}", "'a b' c", "x 'a b' c; y 'a b' c"),
        ('x "$@ now"', "a", 'x "$@ now"'),
        ("$1\nshift\n$1 $@\nshift 2\n$1", "a b c d", "a\nshift\nb b c d\nshift 2\nd"),
    ],
)
def test_a_call_puts_its_arguments_into_the_body(body: str, arguments: str, called: str) -> None:
    assert called_body(body, shlex.split(arguments)) == called


_BEFORE = "export declare typeset local readonly if then elif else while until do { ! time exec env nohup"


@pytest.mark.parametrize("word", _BEFORE.split())
def test_a_variable_is_set_after_a_word_of_the_shell(word: str) -> None:
    [launch] = script_launches(f"{word} {_ADDRESS}=10.0.0.1\n{_START}", {})
    assert launch.environment[_ADDRESS] == "10.0.0.1"


@pytest.mark.parametrize("before", ["", "  local ", "declare -a ", "readonly "])
def test_an_array_may_be_declared(before: str) -> None:
    [launch] = script_launches(f'{before}A=("--port" 1\n  # a comment\n \'--seed\' 2)\nvllm serve m "${{A[@]}}"', {})
    assert launch.options == {"--port": ["1"], "--seed": ["2"]}


@pytest.mark.parametrize("array", ["A=(--port 1)\nA=(--port 2)", f"A=(--port {'1' * 9000})"])
@pytest.mark.parametrize("uses", [1, 20])
def test_an_array_that_is_not_clear_or_too_large_is_unknown(array: str, uses: int) -> None:
    [launch] = script_launches(f"{array}\nvllm serve m {'${A[@]} ' * uses}", {})
    unknown = "A=(--port 1)\n" in array or uses > 1
    assert (launch.unknown, "--port" in launch.options) == (("$A",) if unknown else (), not unknown)


def test_words_that_may_be_any_options_are_kept() -> None:
    [launch] = script_launches('cat f | xargs vllm serve m $A "${B[@]}" --port $PORT "$@" $A ${C[*]:1} ${@:2}', {})
    assert script_launches("vllm serve", {}) == [Launch("vLLM", False, {}, script="vllm serve")]
    assert launch.unknown == ("what xargs reads", "$A", "$B", "$@", "$C", "${@:2}")
    assert launch.options == {"--port": ["$PORT"]}


@pytest.mark.parametrize("program", ["docker", "podman --remote", "/bin/nerdctl"])
@pytest.mark.parametrize(("image", "engine"), [("vllm", "vLLM"), ("a/vllm-openai:1", "vLLM"), ("sglang@b:0", "SGLang")])
def test_each_program_runs_each_engines_image(program: str, image: str, engine: str) -> None:
    [launch] = script_launches(f"{program} run -e A=1 --env B=2 --env=C=3 -e D {image} --dtype half", {"E": "5"})
    assert (launch.engine, launch.image, launch.options) == (engine, image, {"--dtype": ["half"]})
    assert launch.environment == {"A": "1", "B": "2", "C": "3"}


@pytest.mark.parametrize(
    "body",
    [
        "vllm serve m --port $1 --kv-transfer-config '{\n  \"a\": {\n}\n}'",
        "vllm serve m --port 8100\n  cat <<END\nit's\nEND\n  cat <<END\nthat's }\nEND",
        'vllm serve m --port 8100\n  bash -c "echo $@ now"',
    ],
)
def test_no_function_makes_a_script_unreadable(body: str) -> None:
    [launch] = script_launches(f"run() {{\n  {body}\n}}\nrun 8100 'a \"b'", {})
    assert (launch.model, launch.options["--port"]) == ("m", ["8100"])


def test_what_a_command_prints_is_not_shown_as_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("prefill", "$(hostname -I | cut -d' ' -f1)"), ("decode", "127.0.0.1")):
        (tmp_path / f"{name}.sh").write_text(f"{_ADDRESS}={value} {_START}\n")
    assert cli.main(["connector", *(str(tmp_path / f"{name}.sh") for name in ("prefill", "decode"))]) == 1
    assert f"{_ADDRESS}: prefill has a value that the file does not contain, decode has 127" in capsys.readouterr().out


@pytest.mark.parametrize("value", ['"$(cat <<END\n{text}\nEND\n)"', "$(cat <<'END'\n{text}\nEND\n)"])
def test_a_text_in_a_script_is_the_value_of_its_variable(value: str) -> None:
    text = '{"kv_connector": "NixlConnector"}'
    [launch] = script_launches(f'A={value.replace("{text}", text)}\nvllm serve m --kv-transfer-config "$A"', {})
    assert launch.options == {"--kv-transfer-config": [text]}


@pytest.mark.parametrize(
    ("role", "options"),
    [
        ("ROLE=prefill", {"--port", "--kv-cache-dtype"}),
        ("ROLE=decode", {"--port"}),
        ("ROLE=other", {"--port", "--seed"}),
        ("ROLE=prefill\nROLE=decode", {"--port"}),
        ("ROLE", {"--port"}),
    ],
)
def test_the_branch_of_a_role_is_taken(role: str, options: set[str], tmp_path: Path) -> None:
    path = tmp_path / "engine.sh"
    path.write_text(
        f"tee config <<E\na: {role}\nE\nexport {role}\nA=(--port 1)\n"
        'echo lowercase "$ROLE" in case "$ROLE" inside\n'
        'case "$ROLE" in\n prefill|p*) A+=(--kv-cache-dtype fp8_esac) ;;\n'
        ' decode) ;;\n *) A+=(--seed 1) ;;\nesac\nvllm serve m "${A[@]}"\n'
    )
    assert set(read_engine(str(path)).launch.options) == options


def test_a_container_that_runs_a_shell_is_read(tmp_path: Path) -> None:
    sides = sides_of("SGLang")
    for side in sides.values():
        words = [word for option, value in side["options"].items() for word in (option, value)]
        side["env"]["PAGE"] = side["options"]["--page-size"]
        text = " ".join(words).replace("--page-size 64", '--page-size "${PAGE}"')
        side["command"] = [
            "/bin/bash",
            "-ec",
            f"pip install nixl==1.5.1 && exec python3 -m sglang.launch_server {text}",
        ]
        side["options"] = {}
    assert wrong(compared(tmp_path, sides)) == set()
    sides["decode"]["env"]["PAGE"] = "16"
    sides["decode"]["command"][2] = sides["decode"]["command"][2].replace("1.5.1", "1.4.0")
    assert wrong(compared(tmp_path, sides)) == {"--page-size", "installed releases"}


def test_env_files_are_compared_by_what_they_contain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for number, layout in enumerate(("HND", "NHD"), 1):
        path = tmp_path / f"{number}.env"
        path.write_text(
            f"# a comment\nVLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.{number}\nexport VLLM_KV_CACHE_LAYOUT='{layout}'\n"
        )
        paths.append(str(path))
    comparison = compare_connectors(*map(read_engine, paths))
    assert wrong(comparison) == {"VLLM_KV_CACHE_LAYOUT"}
    skipped = {result.rule.field for result in comparison.results if result.verdict is Verdict.NOT_APPLICABLE}
    assert {"--model", "kv_connector", "image"} <= skipped
    assert cli.main(["connector", *paths]) == 1
    assert "(not in both files: " in capsys.readouterr().out


def test_what_makes_a_transfer_slow_stands_in_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = planted("vLLM", "both env UCX_TLS=tcp,cuda_copy")
    assert cli.main(["connector", *files(tmp_path, sides)]) == 0
    last = "PASS: all KV goes over TCP: slow; no field is wrong for sure, but 1 of 39 may be: see above ("
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(last)]
    sides["decode"]["options"] |= {"--model": "other", "--block-size": "128"}
    assert cli.main(["connector", *files(tmp_path, sides)]) == 1
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith(
            "FAIL: 1 of 39 fields do not match, and 2 may; all KV goes over TCP: slow; correct them from the top: "
            "infrastructure, NIXL, connector ("
        )
    )


_DEVICES = "eth0 eno1 ens3f0 enp1s0 enx0 enP2p1s0 bond0 team0 br-ex net1 hsn0 ib0"


@pytest.mark.parametrize("device", _DEVICES.split())
def test_a_network_interface_is_not_an_rdma_device(device: str, tmp_path: Path) -> None:
    sides = sides_of("vLLM")
    sides["decode"]["env"]["UCX_NET_DEVICES"] = device
    assert wrong(compared(tmp_path, sides)) == {"UCX_NET_DEVICES"}
    sides["decode"]["env"]["UCX_TLS"] = "tcp,rc,cuda"
    assert wrong(compared(tmp_path, sides)) == set()


_CARDS = "mlx4_0 mlx5_0:1 bnxt_re0 irdma0 hns_0 qedr0 rxe0 rdmap79s0 rocep1s0 ibp1s0 ionic_0 mana_0 efa_0"


@pytest.mark.parametrize("device", _CARDS.split())
def test_an_rdma_device_is_of_no_use_to_tcp(device: str, tmp_path: Path) -> None:
    sides = sides_of("vLLM")
    sides["decode"]["env"] |= {"UCX_NET_DEVICES": device, "UCX_TLS": "tcp"}
    assert "UCX_NET_DEVICES" in wrong(compared(tmp_path, sides))


_NICS = "rdma/x a/hca_1 a/infiniband x/ib0 a/roce a/mlnx a/mellanox a/sriov_net a/efa a/nic"


@pytest.mark.parametrize("resource", [*_NICS.split(), "a/disk"])
@pytest.mark.parametrize("variables", [{"UCX_TLS": "rc,cuda"}, {"UCX_TLS": "all", "UCX_NET_DEVICES": "mlx5_0:1"}])
def test_a_resource_may_be_an_rdma_device(variables: dict[str, str], resource: str, tmp_path: Path) -> None:
    sides = sides_of("vLLM")
    sides["decode"] |= {"nic": resource, "efa": 1, "env": {**sides["decode"]["env"], **variables}}
    assert ("RDMA devices" in doubtful(compared(tmp_path, sides))) is (resource == "a/disk")
    sides["decode"]["env"] |= {"UCX_TLS": "all", "UCX_NET_DEVICES": "mlx5_0:1,eth0"}
    assert "RDMA devices" not in doubtful(compared(tmp_path, sides))


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("backend", "setting"),
    [
        ("UCX", "UCX_PROTO_ENABLE=Off"),
        ("UCX", "UCX_IB_GPU_DIRECT_RDMA=N"),
        ("UCX", "UCX_RNDV_SCHEME=PUT_ppln"),
        ("LIBFABRIC", "FI_PROVIDER=TCP;ofi_rxm"),
        ("LIBFABRIC", "FI_EFA_USE_DEVICE_RDMA=False"),
        ("LIBFABRIC", "FI_HMEM_DISABLE_P2P=Yes"),
    ],
)
def test_a_slow_setting_is_read_in_any_case(backend: str, setting: str, role: str, tmp_path: Path) -> None:
    name, _, value = setting.partition("=")
    sides = sides_of("vLLM")
    for side in sides.values():
        side["transfer"]["kv_connector_extra_config"] = {"backends": [backend]}
    sides[role]["env"][name] = value
    comparison = compared(tmp_path, sides)
    assert wrong(comparison) | doubtful(comparison) == {"slow settings"}


def test_undecided_fields_fail_only_with_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = sides_of("vLLM")
    del sides["decode"]["options"]["--block-size"]
    paths = files(tmp_path, sides)
    assert cli.main(["connector", *paths]) == 0
    assert "but 1 of 39 may be" in capsys.readouterr().out
    assert cli.main(["connector", *paths, "--gate"]) == 1


def test_options_that_no_rule_reads_are_listed_once_if_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = sides_of("vLLM")
    for side in sides.values():
        side["options"] |= {"--max-model-len": "4096", "--max-modle-len": "1"}
    sides["prefill"]["options"] |= {"--async-scheduling": "", "--dtypo": "half"}
    paths = files(tmp_path, sides)
    assert cli.main(["connector", *paths]) == 0
    assert "note:" not in capsys.readouterr().out
    assert cli.main(["connector", *paths, "-v"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note:")]
    assert notes == ["note:    not read: --async-scheduling, --max-model-len, --max-modle-len (no rule is about them)"]
    assert cli.main(["connector", *paths, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unread_options"] == [
        "--async-scheduling", "--max-model-len", "--max-modle-len"
    ]  # fmt: skip


def test_json_has_every_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = sides_of("vLLM")
    sides["decode"]["options"]["--model"] = "other"
    assert cli.main(["connector", *files(tmp_path, sides), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "FAIL"
    named = {field["field"]: field for field in told["fields"]}
    assert named["--model"]["verdict"] == "FAIL"
    assert {"requirement", "prefill", "decode", "why", "remedy", "source", "layer"} <= set(named["--model"])


def test_json_names_each_slow_path_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = sides_of("vLLM")
    for side in sides.values():
        side["transfer"]["kv_buffer_device"] = "cpu"
        side["env"] |= {"UCX_TLS": "tcp,cuda", "UCX_IB_GPU_DIRECT_RDMA": "n"}
    assert cli.main(["connector", *files(tmp_path, sides), "--json"]) == 0
    slow = json.loads(capsys.readouterr().out)["slow"]
    assert sorted(slow) == ["KV goes through host memory: slow", "all KV goes over TCP: slow"]


def test_secrets_and_control_characters_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = sides_of("Dynamo")
    sides["decode"]["env"] |= {
        "HF_TOKEN": "hf_abcdef",
        "ETCD_ENDPOINTS": "http://root:pa55word@etcd:2379",
        "NATS_SERVER": "nats://me:n4tspass@nats:4222",
        "NIXL_ETCD_ENDPOINTS": "http://root:pa55word@etcd:2379/",
    }
    sides["decode"]["options"]["--model"] = "hf_abcdef/\x1b[31mmodel\u202e"
    # The reason of this one quotes the value.
    sides["decode"]["env"]["VLLM_KV_CACHE_LAYOUT"] = "hf_abcdef"
    paths = files(tmp_path, sides)
    for options in ([], ["--json"]):
        assert cli.main(["connector", *paths, *options]) == 1
        out = capsys.readouterr().out
        assert not {secret for secret in ("hf_abcdef", "pa55word", "n4tspass", "\x1b", "\u202e") if secret in out}
        assert "***" in out


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
    path = script(tmp_path, "a.json", json.dumps([document, deployment({"name": "e"})]))
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
    reads(path, {"p": config}, model="s", environment={"A": "1"}, **ray)
    config |= {"model_loading_config": {"model_id": "i"}, "runtime_env": {}}
    reads(path, {"p": config}, model="i", has_environment=False, **ray)
    transfer = {"--kv-transfer-config": ['{"kv_connector": "X"}']}
    for key in ("kv_transfer_config", "kv-transfer-config"):
        reads(path, {key: {"kv_connector": "X"}}, options=transfer, has_options=False, has_environment=False)
        reads(path, {key: {"kv_connector": "X"}, "model": "m"}, options={**transfer, "--model": ["m"]},
              has_environment=False)  # fmt: skip
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
    path = script(tmp_path, "a.json", json.dumps({"items": [config, container]}))
    engine = read_engine(path)
    assert engine.unread == ("Secret s", "ConfigMap z")
    assert engine.launch.has_environment is False
    assert engine.launch.environment == {
        "A": "1", "k": "2", "B": "x1$A", "C": "true", "D": "", "E": "2", "F": "$(configMap n, k)",
        "G": "$(secret m, k)", "H": "$(status.podIP)", "I": "$(valueFrom)",
    }  # fmt: skip


# Bad inputs

_NONE = " starts no engine that this command reads: expected vLLM or SGLang, also under Dynamo"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGE_BOMB = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 10)
)
#: PyYAML 6.0.4 and newer add each entry once.
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
    path = tmp_path / name
    path.write_text(data, encoding="latin-1" if name == "binary.bin" else "utf-8")
    assert cli.main(["connector", str(path), str(path)]) == 2
    assert capsys.readouterr().err.removeprefix("pytest-nixl: ").removeprefix(str(path)) == f"{sentence}\n"


def test_a_file_of_100_mb_is_refused_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as stream:
        stream.truncate(100 << 20)
    assert cli.main(["connector", str(path), str(path)]) == 2
    assert "has more than 1 MiB" in capsys.readouterr().err


def test_a_missing_file_or_container_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(TWO)
    assert cli.main(["connector", f"{path}#three", f"{path}#two"]) == 2
    assert "has no 'three' that starts an engine; it has one/c or two/c" in capsys.readouterr().err
    assert cli.main(["connector", str(tmp_path / "none"), f"{path}#two"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert cli.main(["connector", str(tmp_path), f"{path}#two"]) == 2
    assert "is a directory: expected a configuration file" in capsys.readouterr().err


def test_yaml_needs_a_package_and_json_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = files(tmp_path, sides_of("vLLM"))
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert cli.main(["connector", prefill, decode]) == 2
    told = capsys.readouterr().err
    assert "needs PyYAML" in told
    assert "pip install 'PyYAML>=6.0.1'" in told
    sides = copy.deepcopy(sides_of("vLLM"))
    Path(decode).with_suffix(".json").write_text(json.dumps(pod(sides["decode"])))
    assert cli.main(["connector", prefill, str(Path(decode).with_suffix(".json"))]) == 0


@pytest.mark.parametrize(
    ("model", "fails"),
    [
        ("meta-llama/Llama-4-Scout", True),
        ("openai/gpt-oss-120b", True),
        ("XiaomiMiMo/MiMo-V2-Flash", True),
        ("stepfun-ai/Step-3.5-Flash", True),
        ("google/gemma-4-27b", True),
        ("Qwen/Qwen3-32B", False),
    ],
)
def test_sizes_of_a_model_with_sliding_windows_are_equal(model: str, fails: bool, tmp_path: Path) -> None:
    sides = sides_of("SGLang")
    for side, size in zip(sides.values(), ("2", "4"), strict=True):
        side["options"].update({"--model-path": model, "--tp-size": size})
    assert wrong(compared(tmp_path, sides)) == ({"--tp-size"} if fails else set())


_HYBRIDS = (
    "mamba-2.8b Jamba-1.5 Nemotron-H NemotronH-8B nemotron-h-47b Nemotron-Nano-9B Nemotron-3-Super Bamba-9B Zamba2-7B "
    "Falcon-H1-7B granite-4.0-h-small Qwen3-Next-80B Qwen3.5-27B Qwen3.6-A3B Kimi-Linear-48B LFM2-8B MiniMax-Text-01"
)


@pytest.mark.parametrize("model", [*_HYBRIDS.split(), "Qwen3-32B", "Llama-3.1-Nemotron-70B", "granite-4.0-small"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_mamba_hybrid_needs_its_layout_of_states(model: str, role: str, tmp_path: Path) -> None:
    sides = sides_of("vLLM")
    for name, side in sides.items():
        side["image"], side["options"]["--model"] = "vllm/vllm-openai:v0.33.0", f"a/{model}"
        side["env"]["VLLM_SSM_CONV_STATE_LAYOUT"] = "SD" if name == role else "DS"
    results = {result.rule.field: result.why for result in compared(tmp_path, sides).results}
    assert ("is a Mamba hybrid" in results["VLLM_SSM_CONV_STATE_LAYOUT"]) is (model in _HYBRIDS)


def script(folder: Path, name: str, text: str) -> str:
    """Write one side as a shell script."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


NIXL = """--kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'"""


def test_options_in_a_file_beside_the_script_are_read(tmp_path: Path) -> None:
    (tmp_path / "decode.yaml").write_text("block-size: 100\nkv-cache-dtype: fp8\ndtype: float16\n")
    prefill = script(tmp_path, "prefill.sh", f"vllm serve m --block-size 64 --kv-cache-dtype fp8 --dtype half {NIXL}\n")
    decode = script(tmp_path, "decode.sh", f"vllm serve m --config decode.yaml {NIXL}\n")
    assert wrong(compare_connectors(read_engine(prefill), read_engine(decode))) == {"--block-size"}
    (tmp_path / "decode.yaml").write_text("block-size: 64\nkv-cache-dtype: fp8\ndtype: auto\n")
    decode = script(tmp_path, "decode.sh", f"vllm serve m --config decode.yaml --dtype float16 {NIXL}\n")
    comparison = compare_connectors(read_engine(prefill), read_engine(decode))
    assert wrong(comparison) == set()
    assert doubtful(comparison) == {"VLLM_NIXL_SIDE_CHANNEL_HOST"}


@pytest.mark.parametrize("name", ["decode.sh", "start"])
@pytest.mark.parametrize("start", ['[ -z "$HF_HOME" ] || cd "$HF_HOME"', "[[ -n $TRACE ]] && set -x", "echo a: b"])
def test_a_script_that_begins_with_a_bracket_is_no_json(name: str, start: str, tmp_path: Path) -> None:
    path = script(tmp_path, name, f"{start}\nvllm serve m --block-size 64 {NIXL}\n")
    assert read_engine(path).launch.options["--block-size"] == ["64"]


def test_a_text_that_is_neither_json_nor_a_script_is_bad_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not JSON"):
        read_engine(script(tmp_path, "decode", '{"command": vllm}\n'))


def test_a_default_that_would_fail_is_doubtful_where_no_file_has_variables(tmp_path: Path) -> None:
    """Such scripts are the commonest pair whose handshake hangs: each side tells the other its own loopback address."""
    prefill, decode = (script(tmp_path, name, f"vllm serve m {NIXL}\n") for name in ("prefill.sh", "decode.sh"))
    comparison = compare_connectors(read_engine(prefill), read_engine(decode))
    assert wrong(comparison) == set()
    [result] = [result for result in comparison.results if result.verdict is Verdict.INCONCLUSIVE]
    assert result.rule.field == "VLLM_NIXL_SIDE_CHANNEL_HOST"
    assert result.why.endswith("unless the containers set VLLM_NIXL_SIDE_CHANNEL_HOST")
    together = compare_connectors(read_engine(prefill), read_engine(decode), one_host=True)
    assert doubtful(together) == set()


def test_options_in_a_file_that_is_not_here_are_said_not_to_be_read(tmp_path: Path) -> None:
    prefill = script(tmp_path, "prefill.sh", f"vllm serve m --block-size 64 --dtype half {NIXL}\n")
    for option in ("--config absent.yaml", "--engine-config-json absent.json"):
        decode = script(tmp_path, "decode.sh", f"vllm serve m {option} {NIXL}\n")
        comparison = compare_connectors(read_engine(prefill), read_engine(decode))
        assert wrong(comparison) == set()
        assert doubtful(comparison) == {"--config", "VLLM_NIXL_SIDE_CHANNEL_HOST"}
        assert comparison.unread == (f"decode has options of {option.split()[1]}, which is not in the file",)


_SEVERAL_HOSTS = (
    "--nnodes -n --node-rank -r --headless --data-parallel-address -dpa --data-parallel-size-local -dpl "
    "--data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-hybrid-lb --data-parallel-external-lb "
    "--data-parallel-backend --distributed-executor-backend --dist-init-addr"
)


@pytest.mark.parametrize("option", [*_SEVERAL_HOSTS.split(), "--seed"])
def test_a_pod_has_not_all_gpus_of_an_engine_on_several_hosts(option: str, tmp_path: Path) -> None:
    sides = sides_of("vLLM")
    sides["prefill"] |= {"gpus": 1, "options": {**sides["prefill"]["options"], option: "1"}}
    assert ("GPUs" in wrong(compared(tmp_path, sides))) is (option == "--seed")


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("trtllm-serve m --host 0.0.0.0", "trtllm-serve"),
        ("mpirun -n 8 trtllm-llmapi-launch trtllm-serve m --tp 8", "trtllm-serve"),
        ("python3 -m lmdeploy serve api_server m --tp 1", "lmdeploy"),
        ("python3 -m dynamo.trtllm --model m", "TensorRT-LLM"),
        *(
            (f"./run_{word}.sh --tp 8", f"run_{word}.sh")
            for word in ("serve", "server", "Launch", "launcher", "worker")
        ),
        ("tool serve --tp 1", "tool"),
        ("./run_server --debug", "run_server"),
        ("mpirun ./run_server --debug", "run_server"),
        *((f"./start -{option}=m", "start") for option in ("model", "-served-model-name", "-checkpoint-dir")),
    ],
)
def test_a_launcher_that_is_not_known_is_inconclusive(
    command: str, launcher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill = script(tmp_path, "prefill.sh", f"UCX_TLS=tcp,cuda {command}\n")
    decode = script(tmp_path, "decode.sh", f"vllm serve m {NIXL}\n")
    comparison = compare_connectors(read_engine(prefill), read_engine(decode))
    assert wrong(comparison) == set()
    [engine] = [result for result in comparison.results if result.rule.field == "engine"]
    assert engine.verdict is Verdict.INCONCLUSIVE
    assert f"the options of {launcher} are not known here" in engine.why
    assert cli.main(["connector", prefill, decode]) == 0
    assert cli.main(["connector", prefill, decode, "--gate"]) == 1
    capsys.readouterr()


def test_a_file_of_lmcache_is_said_not_to_be_read(tmp_path: Path) -> None:
    transfer = """--kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'"""
    prefill = script(tmp_path, "prefill.sh", f"PYTHONHASHSEED=0 vllm serve m {transfer}\n")
    decode = script(tmp_path, "decode.sh", f"PYTHONHASHSEED=0 LMCACHE_CONFIG_FILE=d.yaml vllm serve m {transfer}\n")
    comparison = compare_connectors(read_engine(prefill), read_engine(decode))
    assert comparison.unread == ("decode has options of d.yaml (LMCACHE_CONFIG_FILE), which is not read",)


_BOTH = "vllm serve a --port 1 & vllm serve b --port 2 & wait"


@pytest.mark.parametrize(
    ("text", "share_host"),
    [
        (_BOTH, True),
        (f"bash -c '{_BOTH}'", True),
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


@pytest.mark.parametrize("start", ["bash -c", "tini -- sh -ec", "sh -c --", "env A=1 sh -c"])
@pytest.mark.parametrize("kind", ["pod", "Compose", "Dynamo"])
def test_each_engine_of_a_container_is_read(kind: str, start: str, tmp_path: Path) -> None:
    container = {"name": "c", "image": "engine", "command": [*start.split(), _BOTH]}
    document = {
        "pod": {"kind": "Pod", "metadata": {"name": "o"}, "spec": {"containers": [container]}},
        "Compose": {"services": {"c": container}},
        "Dynamo": {
            "metadata": {"name": "o"},
            "spec": {"services": {"c": {"extraPodSpec": {"mainContainer": container}}}},
        },
    }[kind]
    path = script(tmp_path, "both.json", json.dumps(document))
    engines = [read_engine(f"{path}#c/{number}") for number in (1, 2)]
    assert [(engine.launch.model, engine.launch.options) for engine in engines] == [
        ("a", {"--port": ["1"]}), ("b", {"--port": ["2"]}),
    ]  # fmt: skip
    assert compare_connectors(*engines).pair.one_host
    last = {"pod": "o/c/{}", "Compose": "c/{}", "Dynamo": "o/c/{}"}[kind]
    names = " or ".join(last.format(number) for number in (1, 2))
    with pytest.raises(ValueError, match=f"starts 2 engines: choose one with FILE#NAME, NAME is {names}$"):
        read_engine(path)


def test_a_loop_with_too_many_turns_is_read_once() -> None:
    for turns, engines in ((32, 32), (33, 1)):
        words = " ".join(map(str, range(turns)))
        assert len(script_launches(f"for i in {words}; do vllm serve m; done", {})) == engines
    assert len(script_launches("for i in $(seq 2); do vllm serve m --seed $i; done; vllm serve x", {})) == 2
