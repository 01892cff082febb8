# SPDX-License-Identifier: Apache-2.0
"""Each difference between a prefill and a decode engine is named, alone and together; equal engines have none."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.cli_run import ROOT

from pytest_nixl import cli
from pytest_nixl.checks.connector.comparison import ConnectorComparison, compare_connectors
from pytest_nixl.checks.connector.containers import read_engine
from pytest_nixl.checks.connector.engine_fields import release_of
from pytest_nixl.checks.connector.rules import RULES, ConfigurationLayer
from pytest_nixl.model.verdicts import Verdict

#: A side before it is written to a file: ``options``, ``transfer``, ``env``, ``image`` and ``command``.
Side = dict[str, Any]
SIDE_NAMES = ("prefill", "decode")


def pairs(text: str) -> dict[str, str]:
    """Return each first of two words with the second."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def vllm_side(role: str) -> Side:
    return {
        "image": "vllm/vllm-openai:v0.14.0",
        "command": ["vllm", "serve"],
        "options": pairs(
            "--model Qwen/Qwen3-32B --dtype bfloat16 --kv-cache-dtype fp8 --block-size 64 --tensor-parallel-size 4 "
            "--attention-backend FLASH_ATTN"
        ),
        "transfer": {
            "kv_connector": "NixlConnector",
            "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
            "engine_id": role,
            "kv_buffer_device": "cuda",
            "kv_connector_extra_config": {"backends": ["UCX"]},
        },
        "env": pairs(
            f"VLLM_NIXL_SIDE_CHANNEL_HOST 10.0.0.{1 + SIDE_NAMES.index(role)} VLLM_KV_CACHE_LAYOUT HND "
            "UCX_TLS rc,cuda_copy,cuda_ipc NIXL_ETCD_ENDPOINTS http://etcd:2379 NIXL_ETCD_NAMESPACE /nixl/qwen"
        ),
    }


def sglang_side(role: str) -> Side:
    return {
        "image": "lmsysorg/sglang:v0.5.9",
        "command": ["python3", "-m", "sglang.launch_server"],
        "options": pairs(
            "--model-path Qwen/Qwen3-32B --dtype bfloat16 --kv-cache-dtype fp8_e4m3 --page-size 64 --tp-size 4 "
            f"--host 0.0.0.0 --disaggregation-mode {role} --disaggregation-transfer-backend nixl "
            "--disaggregation-bootstrap-port 8998"
        ),
        "env": pairs("SGLANG_DISAGGREGATION_NIXL_BACKEND UCX UCX_TLS rc,cuda_copy"),
    }


def dynamo_side(role: str) -> Side:
    """Return one side of vLLM under Dynamo."""
    side = vllm_side(role)
    side["command"] = ["python3", "-m", "dynamo.vllm"]
    side["image"] = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.0.0"
    side["options"]["--disaggregation-mode"] = role
    side["env"] |= pairs("DYN_NAMESPACE qwen ETCD_ENDPOINTS http://etcd:2379 NATS_SERVER nats://nats:4222")
    return side


SIDES = {"vLLM": vllm_side, "SGLang": sglang_side, "Dynamo": dynamo_side}


def pod(side: Side, name: str = "engine") -> dict[str, Any]:
    """Return a Deployment with one container."""
    args = [word for option, value in side["options"].items() for word in (option, value) if word]
    if side.get("transfer"):
        args += ["--kv-transfer-config", json.dumps(side["transfer"])]
    container = {
        "name": "engine",
        "resources": {
            "limits": {
                "nvidia.com/gpu": side.get("gpus", 64),
                side.get("nic", "vpc.amazonaws.com/efa"): side.get("efa", 0),
            }
        },
        "image": side["image"],
        "command": side["command"],
        "args": args,
        "env": [{"name": key, "value": value} for key, value in side["env"].items()],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": side.get("replicas", 1),
            "template": {"spec": {"containers": [{"name": "proxy", "image": "envoy:1"}, container]}},
        },
    }


def sides_of(engine: str) -> dict[str, Side]:
    """Return both sides of an engine, which match."""
    return {role: SIDES[engine](role) for role in SIDE_NAMES}


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


def files(folder: Path, engine: str, changes: str = "") -> tuple[str, str]:
    """Write both sides of an engine with changes: prefill as JSON, decode as YAML."""
    sides = planted(engine, changes)
    prefill, decode = folder / "prefill.json", folder / "decode.yaml"
    prefill.write_text(json.dumps(pod(sides["prefill"], "prefill")))
    decode.write_text(yaml.safe_dump(pod(sides["decode"], "decode")))
    return str(prefill), str(decode)


def compared(folder: Path, sides: dict[str, Side], **more: Any) -> ConnectorComparison:
    """Write both sides as JSON, which is read sooner, and compare them."""
    engines = []
    for role, side in sides.items():
        path, text = folder / f"{role}.json", json.dumps(pod(side, role))
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        engines.append(read_engine(str(path)))
    return compare_connectors(*engines, **more)


def verdicts(comparison: ConnectorComparison) -> list[str]:
    """Return verdict and field of each finding."""
    return [
        f"{result.verdict} {result.rule.field}"
        for result in comparison.results
        if result.verdict not in (Verdict.PASS, Verdict.NOT_APPLICABLE)
    ]


@pytest.mark.parametrize("engine", SIDES)
def test_equal_configurations_say_so(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = files(tmp_path, engine)
    assert verdicts(compare_connectors(*map(read_engine, paths))) == []
    assert cli.main(["connector", *paths, "--gate"]) == 0
    assert "PASS: prefill and decode match in all" in capsys.readouterr().out


_DEVICES = "eth0 eno1 ens3f0 enp1s0 enx0 enP2p1s0 bond0 team0 br-ex net1 hsn0 ib0 eth0,lo"
_CARDS = "mlx4_0 mlx5_0:1 bnxt_re0 irdma0 hns_0 qedr0 rxe0 rdmap79s0 rocep1s0 ibp1s0 ionic_0 mana_0 efa_0"
_RESOURCES = "rdma/x a/hca_1 a/infiniband x/ib0 a/roce a/mlnx a/mellanox a/sriov_net a/efa a/nic"
_BETWEEN, _STORAGE = "UCX LIBFABRIC MOONCAKE UCCL GPUNETIO", "POSIX GDS GDS_MT OBJ GUSLI HF3FS INFINIA AZURE_BLOB"
_WINDOWS = "meta-llama/Llama-4-Scout openai/gpt-oss-120b XiaomiMiMo/MiMo-V2-Flash stepfun-ai/Step-3.5-Flash gemma-4-27b"
_HYBRIDS = (
    "mamba-2.8b Jamba-1.5 Nemotron-H NemotronH-8B nemotron-h-47b Nemotron-Nano-9B Nemotron-3-Super Bamba-9B Zamba2-7B "
    "Falcon-H1-7B granite-4.0-h-small Qwen3-Next-80B Qwen3.5-27B Qwen3.6-A3B Kimi-Linear-48B LFM2-8B MiniMax-Text-01"
)
_SEVERAL_HOSTS = (
    "--nnodes -n --node-rank -r --headless --data-parallel-address -dpa --data-parallel-size-local -dpl "
    "--data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-hybrid-lb --data-parallel-external-lb "
    "--data-parallel-backend --distributed-executor-backend --dist-init-addr"
)
_SIZES = {
    "vLLM": "--tensor-parallel-size --pipeline-parallel-size --decode-context-parallel-size --block-size",
    "SGLang": "--tp-size --dp-size --pp-size --dcp-size --page-size",
}
_PORTS = "--data-parallel-rpc-port -dpp --master-port --port"
_PORT_VARIABLES = (
    "DYN_SYSTEM DYN_FORWARDPASS_METRIC DYN_KVBM_METRICS DYN_KVBM_LEADER_ZMQ_PUB DYN_KVBM_LEADER_ZMQ_ACK "
    "NIXL_TELEMETRY_PROMETHEUS"
)
_RANKS = (
    "both env VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1 | decode options --port=8001 | both release {} | prefill options {}"
)
_STATES = "both release v0.33.0 | both env VLLM_SSM_CONV_STATE_LAYOUT=DS | {} env VLLM_SSM_CONV_STATE_LAYOUT=SD"

#: For a pattern or a list of the product: an engine, changes of it, and verdict and field of each finding.
ROWS: dict[str, list[tuple[str, str, str]]] = {
    # SGLang divides its TP by its DP.
    "sizes are positive numbers": [
        *((engine, f"{role} options {option}=0", f"FAIL {option.replace('--dp-size', '--tp-size')}")
          for engine, options in _SIZES.items() for option in options.split() for role in SIDE_NAMES),
        *(("vLLM", f"decode options --block-size={size}", "FAIL --block-size")
          for size in ("x", "-1", "1.5", "\u0663"))],
    "no two ports of an engine are the same": [
        *(("vLLM", f"{role} {setting}", "FAIL ports") for role in SIDE_NAMES for setting in (
            *(f"options {option}=5600" for option in _PORTS.split()),
            *(f"env {name}_PORT=5600" for name in _PORT_VARIABLES.split()),
            *(f'options --kv-events-config={{"{name}": "tcp://*:5600"}}' for name in ("endpoint", "replay_endpoint")))),
        ("vLLM", 'both options --kv-events-config={"endpoint": "tcp://*:", "replay_endpoint": "tcp://*:0"}', ""),
        *(("SGLang", f"{role} options --nccl-port=30000", "FAIL ports") for role in SIDE_NAMES)],
    "each rank of a side channel has a port": [
        ("vLLM", f"{_RANKS.format(release, option)} | decode env VLLM_NIXL_SIDE_CHANNEL_PORT={port}", finding)
        for release, option, port, finding in (
            ("v0.11.2", "-- x", 5603, "FAIL ports"), ("v0.11.2", "-- x", 5604, ""), ("v0.12.0", "-- x", 5601, ""),
            ("v0.14.0", "--data-parallel-size=3", 5602, "FAIL ports"), ("v0.14.0", "--data-parallel-size=3", 5603, ""),
            ("v0.14.0", "-dp=3 | prefill options -dpl=2", 5602, ""),
            ("v0.14.0", "-dp=3 | prefill options --data-parallel-size-local=2", 5602, ""))],
    "only a backend between agents carries the cache": [
        ("SGLang", f"both env SGLANG_DISAGGREGATION_NIXL_BACKEND={name}", finding)
        for names, finding in ((_BETWEEN, ""), (_STORAGE, "FAIL SGLANG_DISAGGREGATION_NIXL_BACKEND"))
        for name in names.split()],
    "a network interface is not an RDMA device": [
        *(("vLLM", f"decode env UCX_NET_DEVICES={name}", "FAIL UCX_NET_DEVICES") for name in _DEVICES.split()),
        ("vLLM", "decode env UCX_NET_DEVICES=eth0 | decode env UCX_TLS=tcp,rc,cuda", "WARN UCX_NET_DEVICES"),
        ("vLLM", "decode env UCX_NET_DEVICES=eth0 | both env UCX_TLS=tcp,cuda", "WARN UCX_TLS"),
        *(("vLLM", f"decode env UCX_NET_DEVICES={name} | decode env UCX_TLS=rc,tcp,cuda", "")
          for name in ("gpu0", ","))],
    "an RDMA device is of no use to TCP": [
        ("vLLM", f"decode env UCX_NET_DEVICES={name} | both env UCX_TLS=tcp,cuda",
         "WARN UCX_TLS, FAIL UCX_NET_DEVICES") for name in _CARDS.split()],
    "a resource of a pod may be an RDMA device": [
        *(("vLLM", f"decode nic {name} | decode efa 1 | decode env {variables}", finding)
          for names, finding in ((_RESOURCES, ""), ("a/disk", "WARN RDMA devices")) for name in names.split()
          for variables in ("UCX_TLS=rc,cuda", "UCX_TLS=all | decode env UCX_NET_DEVICES=mlx5_0:1")),
        ("vLLM", "decode nic a/disk | decode efa 1 | both env UCX_TLS=all | decode env UCX_NET_DEVICES=mlx5_0:1,eth0",
         "")],
    "slow settings in any case": [
        ("vLLM", f'both transfer kv_connector_extra_config={{"backends": ["{backend}"]}} | {role} env {setting}',
         f"{verdict} slow settings") for role in SIDE_NAMES for backend, setting, verdict in (
             ("UCX", "UCX_PROTO_ENABLE=Off", "FAIL"), ("UCX", "UCX_IB_GPU_DIRECT_RDMA=N", "WARN"),
             ("UCX", "UCX_RNDV_SCHEME=PUT_ppln", "WARN"), ("LIBFABRIC", "FI_PROVIDER=TCP;ofi_rxm", "WARN"),
             ("LIBFABRIC", "FI_EFA_USE_DEVICE_RDMA=False", "WARN"), ("LIBFABRIC", "FI_HMEM_DISABLE_P2P=Yes", "WARN"))],
    "models with sliding windows": [
        ("SGLang", f"both options --model-path={model} | prefill options --tp-size=2", finding)
        for models, finding in ((_WINDOWS, "FAIL --tp-size"), ("Qwen/Qwen3-32B a/my-xgpt-oss a/gemma-42b", ""))
        for model in models.split()],
    "Mamba hybrids need their layout of states": [
        ("vLLM", f"both options --model=a/{model} | {_STATES.format(role)}", finding) for models, role, finding in (
            (_HYBRIDS, "decode", "WARN VLLM_SSM_CONV_STATE_LAYOUT"),
            ("LFM2-8B", "prefill", "WARN VLLM_SSM_CONV_STATE_LAYOUT"),
            ("Qwen3-32B Llama-3.1-Nemotron-70B Nemotron-Hx granite-4.0-small", "decode", ""))
        for model in models.split()],
    "an engine on several hosts has GPUs elsewhere": [
        *(("vLLM", f"prefill gpus 1 | prefill options {option}=1", "") for option in _SEVERAL_HOSTS.split()),
        ("vLLM", "prefill gpus 1 | prefill options --seed=1", "FAIL GPUs")],
    "texts of other forms": [
        ("vLLM", "decode env UCX_TLS=rc,tcp:auxx,cuda", "FAIL UCX_TLS"),
        ("Dynamo", "both env DYN_REQUEST_PLANE=nats | decode env NATS_SERVER=://nats:4222", "FAIL NATS_SERVER")],
}  # fmt: skip


@pytest.mark.parametrize("group", ROWS)
def test_these_fields_have_findings(group: str, tmp_path: Path) -> None:
    results = [
        (engine, changes, ", ".join(verdicts(compared(tmp_path, planted(engine, changes)))))
        for engine, changes, _ in ROWS[group]
    ]
    assert results == ROWS[group]


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


def findings() -> list[list[str]]:
    """Return the cases of ``connector_findings.txt``: engine and changes, and then a finding a line."""
    text = re.sub(r"(?m)^#.*\n", "", Path(__file__).with_name("connector_findings.txt").read_text())
    return [case.split("\n    ") for case in re.split(r"\n(?! )", text.strip())]


@pytest.mark.parametrize("first", range(0, len(findings()), 20))
def test_two_sides_have_these_findings(first: int, tmp_path: Path) -> None:
    for case, *expected in findings()[first : first + 20]:
        engine, _, changes = case.partition(": ")
        assert (case, findings_of(compared(tmp_path, planted(engine, changes)))) == (case, expected)


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


def test_different_engines_are_named(tmp_path: Path) -> None:
    sides = {"prefill": vllm_side("prefill"), "decode": sglang_side("decode")}
    assert verdicts(compared(tmp_path, sides)) == [
        "FAIL engine", "INCONCLUSIVE image", "INCONCLUSIVE NIXL_ETCD_ENDPOINTS", "FAIL NIXL_ETCD_NAMESPACE"
    ]  # fmt: skip
    reasons = {
        "vLLM": "without --kv-transfer-config no engine transfers anything",
        "Dynamo": "prefill has no --kv-transfer-config, and Dynamo from 1.0.0 on ends at its start",
    }
    for first, second in (("vLLM", "Dynamo"), ("Dynamo", "vLLM")):
        sides = {"prefill": SIDES[first]("prefill"), "decode": SIDES[second]("decode")}
        for side in sides.values():
            side["transfer"], side["env"] = {}, {"DYN_NAMESPACE": side["image"]}
        comparison = compared(tmp_path, sides)
        assert verdicts(comparison) == [
            "FAIL engine", "INCONCLUSIVE image", "FAIL VLLM_NIXL_SIDE_CHANNEL_HOST", "FAIL kv_connector"
        ]  # fmt: skip
        assert [result.why for result in comparison.results if result.rule.field == "kv_connector"] == [reasons[first]]


@pytest.mark.parametrize(
    ("engine", "changes", "first"),
    [
        ("vLLM", "", "on decode's host: pytest-nixl doctor --side-channel 10.0.0.1:5600; then "),
        ("vLLM", "prefill env VLLM_NIXL_SIDE_CHANNEL_HOST=$(POD_IP) | prefill env VLLM_NIXL_SIDE_CHANNEL_PORT=5700",
         "on decode's host: pytest-nixl doctor --side-channel HOST:5700 (HOST: prefill's address); then "),
        ("vLLM", "both transfer kv_connector=LMCacheConnectorV1", "on both hosts: pytest-nixl doctor; then "),
        ("SGLang", "", "on both hosts: pytest-nixl doctor; then "),
    ],
)  # fmt: skip
def test_after_a_match_the_next_step_is_named(
    engine: str, changes: str, first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["connector", *files(tmp_path, engine, changes)]) == 0
    assert capsys.readouterr().out.endswith(f"\nnext: {first}on both hosts: pytest-nixl run quick\n")
    assert cli.main(["connector", *files(tmp_path, engine, f"{changes} | decode options --dtype=float32")]) == 1
    assert "next:" not in capsys.readouterr().out


def test_loopback_is_right_on_one_host(tmp_path: Path) -> None:
    paths = files(tmp_path, "SGLang", "prefill options --host=127.0.0.1 | decode options --port=30001")
    assert cli.main(["connector", *paths]) == 1
    assert cli.main(["connector", *paths, "--one-host"]) == 0


def test_a_backend_that_is_not_built_in_is_named_if_the_plugins_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = files(tmp_path, "SGLang", "both env SGLANG_DISAGGREGATION_NIXL_BACKEND=MOONCAKE")
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    assert cli.main(["connector", *paths]) == 0
    for names, listed in (((), "none"), (("libplugin_UCX.so", "libplugin_OWN.so", "libplugin_no.a"), "OWN, UCX")):
        for name in names:
            (plugins / name).touch()
        assert cli.main(["connector", *paths, "--plugin-dir", str(plugins)]) == 1
        assert f"MOONCAKE is not built in: the folder of NIXL's plugins has {listed}\n" in capsys.readouterr().out
    paths = files(tmp_path, "SGLang", "both env SGLANG_DISAGGREGATION_NIXL_BACKEND=OWN")
    assert cli.main(["connector", *paths]) == 1
    assert cli.main(["connector", *paths, "--plugin-dir", str(plugins)]) == 0


def test_no_name_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def numeric_only(*arguments: Any) -> Any:
        assert arguments[5] & socket.AI_NUMERICHOST, arguments
        return real(*arguments)

    monkeypatch.setattr(socket, "getaddrinfo", numeric_only)
    servers = "http://etcd:2379,http://10.0.0.9:2379,http://[::2]:2379"
    assert verdicts(compared(tmp_path, planted("Dynamo", f"both env NIXL_ETCD_ENDPOINTS={servers}"))) == []


@pytest.mark.parametrize(
    ("changes", "arguments", "code", "line"),
    [
        ("both env UCX_TLS=tcp,cuda_copy", (), 0,
         "PASS: all KV goes over TCP: slow; no field is wrong for sure, but 1 of 39 may be: see above ("),
        ("both env UCX_TLS=tcp,cuda_copy | decode options --model=other | decode options --block-size=128", (), 1,
         "FAIL: 1 of 39 fields do not match, and 2 may; all KV goes over TCP: slow; correct them from the top: "
         "infrastructure, NIXL, connector ("),
        ("decode options -- --block-size", (), 0, "PASS: no field is wrong for sure, but 1 of 39 may be: see above ("),
        ("decode options -- --block-size", ("--gate",), 1, "FAIL: no field is wrong for sure, but 1 of 39 may be: see"),
    ],
)  # fmt: skip
def test_the_verdict_counts_fields_and_says_what_is_slow(
    changes: str, arguments: tuple[str, ...], code: int, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["connector", *files(tmp_path, "vLLM", changes), *arguments]) == code
    assert [printed for printed in capsys.readouterr().out.splitlines() if printed.startswith(line)]


def test_options_that_no_rule_reads_are_listed_once_if_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "both options --max-model-len=4096 | both options --max-modle-len=1 | prefill options --async-scheduling"
    paths = files(tmp_path, "vLLM", f"{options} | prefill options --dtypo=half")
    unread = ["--async-scheduling", "--max-model-len", "--max-modle-len"]
    for arguments, notes in (((), []), (("-v",), [f"note:    not read: {', '.join(unread)} (no rule is about them)"])):
        assert cli.main(["connector", *paths, *arguments]) == 0
        assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("note:")] == notes
    assert cli.main(["connector", *paths, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unread_options"] == unread


def test_json_has_each_field_and_each_slow_path_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = "both transfer kv_buffer_device=cpu | both env UCX_TLS=tcp,cuda | both env UCX_IB_GPU_DIRECT_RDMA=n"
    paths = files(tmp_path, "vLLM", f"{slow} | decode options --model=other")
    assert cli.main(["connector", *paths, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], sorted(report["slow"])) == (
        "FAIL",
        ["KV goes through host memory: slow", "all KV goes over TCP: slow"],
    )
    assert {"field": "--model", "layer": "connector", "verdict": "FAIL", "requirement": "equal",
            "prefill": "Qwen/Qwen3-32B", "decode": "other", "why": "they must be equal",
            "remedy": "give both sides the same --model",
            "source": "vLLM kv_connector/v1/nixl/metadata.py (compute_nixl_compatibility_hash)",
            } in report["fields"]  # fmt: skip
    [passed] = [field for field in report["fields"] if field["field"] == "engine_id"]
    assert (passed["verdict"], passed["prefill"], passed["decode"]) == ("PASS", "prefill", "decode")


@pytest.mark.parametrize("secret_of", SIDE_NAMES)
@pytest.mark.parametrize("shown_by", SIDE_NAMES)
@pytest.mark.parametrize("variable", ["UCX_TLS", "NIXL_ETCD_NAMESPACE", "NIXL_BACKEND"])
def test_a_secret_of_either_engine_is_shown_of_neither(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], secret_of: str, shown_by: str, variable: str
) -> None:
    paths = files(tmp_path, "vLLM", f"{secret_of} env HF_TOKEN=hf_abcdef | {shown_by} env {variable}=hf_abcdef")
    for options in ([], ["--json"]):
        cli.main(["connector", *paths, *options])
        out = capsys.readouterr().out
        assert "***" in out
        assert "hf_abcdef" not in out


def test_secrets_and_control_characters_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variables = {
        "HF_TOKEN": "hf_abcdef",
        "ETCD_ENDPOINTS": "http://root:pa55word@etcd:2379",
        "NATS_SERVER": "nats://me:n4tspass@nats:4222",
        "NIXL_ETCD_ENDPOINTS": "http://root:pa55word@etcd:2379/",
        "VLLM_KV_CACHE_LAYOUT": "hf_abcdef",  # its reason quotes the value
    }
    changes = " | ".join(f"decode env {name}={value}" for name, value in variables.items())
    paths = files(tmp_path, "Dynamo", f"{changes} | decode options --model=hf_abcdef/\x1b[31mmodel\u202e")
    for arguments in ([], ["--json"]):
        assert cli.main(["connector", *paths, *arguments]) == 1
        out = capsys.readouterr().out
        assert not {secret for secret in ("hf_abcdef", "pa55word", "n4tspass", "\x1b", "\u202e") if secret in out}
        assert "***" in out
