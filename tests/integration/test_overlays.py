# SPDX-License-Identifier: Apache-2.0
"""The overlays for kustomize, built by the real one in kubectl; and the wait for a run, with the real kubectl."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.cli_run import ROOT
from helpers.kustomize import OVERLAYS, SECONDS, build, built, rank_pod
from helpers.manifests import disagreements, validate
from helpers.needs import program
from helpers.shipped_commands import Command, shipped

NAMES = sorted(path.parent.name for path in OVERLAYS.glob("*/cluster.yaml"))
WAIT = ROOT / "deploy" / "kubernetes" / "wait.sh"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the base and the overlays."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "deploy" / "overlays"


class TestOverlays:
    """Each overlay, unchanged and changed."""

    @pytest.mark.parametrize("name", NAMES)
    def test_an_overlay_is_valid_and_agrees(self, name: str) -> None:
        manifest = built(OVERLAYS / name)
        for document in manifest.documents:
            validate(document)
        assert {document["kind"] for document in manifest.documents} == {
            "Service", "Deployment", "Job", "PersistentVolumeClaim",
        }  # fmt: skip
        assert disagreements(manifest) == []

    @pytest.mark.parametrize("command", [each for each in shipped() if "overlays" in each.file], ids=str)
    def test_kustomize_makes_the_command_line_that_is_judged(self, command: Command) -> None:
        pod = rank_pod(built((ROOT / command.file).parent))
        assert pod.arguments == list(command.words)

    def test_the_overlay_for_p5_is_the_manifest_for_p5(self) -> None:
        folder = ROOT / "deploy" / "kubernetes"
        names = ("etcd.yaml", "results.yaml", "indexed-job.yaml")
        plain = [document for name in names for document in yaml.safe_load_all((folder / name).read_text()) if document]
        overlay = built(OVERLAYS / "p5.48xlarge").documents
        assert sorted(map(json.dumps, sort(overlay))) == sorted(map(json.dumps, sort(plain)))

    def test_every_value_arrives_at_all_of_its_places(self, copied: Path) -> None:
        """Other values than in the file, and no trace of the old ones."""
        path = copied / "p5.48xlarge" / "cluster.yaml"
        text = path.read_text()
        changed = {
            "image": "other.example/vllm:7", "nodes": "16", "instance-type": "p5en.48xlarge", "gpus": "4", "efa": "16",
            "cpu": "20", "memory": "99Gi", "shared-memory": "7Gi", "backend": "UCX", "profile": "mine.toml",
            "memory-types": "DRAM:VRAM", "storage-class": "efs",
        }  # fmt: skip
        values = yaml.safe_load(text)["data"]
        assert set(values) == set(changed)
        for name, value in changed.items():
            text = text.replace(f'  {name}: "{values[name]}"', f'  {name}: "{value}"')
        path.write_text(text)
        manifest = built(path.parent)
        pod = rank_pod(manifest)
        (container,) = pod.containers
        limits = {"cpu": "20", "memory": "99Gi", "nvidia.com/gpu": "4", "vpc.amazonaws.com/efa": "16",
                  "hugepages-2Mi": "5120Mi"}  # fmt: skip
        assert container["resources"] == {"requests": limits, "limits": limits}
        assert container["image"] == "other.example/vllm:7"
        assert {"name": "NIXL_IMAGE", "value": "other.example/vllm:7"} in container["env"]
        assert (pod.owner["spec"]["completions"], pod.owner["spec"]["parallelism"]) == (16, 16)
        assert pod.spec["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5en.48xlarge"}
        options = {flag: pod.option(f"--nixl-{flag}") for flag in ("ranks", "backend", "profile", "memory")}
        assert options == {"ranks": "16", "backend": "UCX", "profile": "mine.toml", "memory": "DRAM:VRAM"}
        assert {volume["name"]: volume for volume in pod.spec["volumes"]}["shm"]["emptyDir"]["sizeLimit"] == "7Gi"
        (claim,) = (document for document in manifest.documents if document["kind"] == "PersistentVolumeClaim")
        assert claim["spec"]["storageClassName"] == "efs"
        assert disagreements(manifest) == []

    def test_a_value_that_is_missing_is_refused(self, copied: Path) -> None:
        path = copied / "tcp" / "cluster.yaml"
        path.write_text(path.read_text().replace("  nodes:", "  node:"))
        done = build(path.parent)
        assert done.returncode != 0
        assert "data.nodes" in done.stderr

    def test_the_overlay_for_tcp_keeps_to_the_pod_security_level_baseline(self) -> None:
        """What the level forbids and our other manifests use: https://kubernetes.io/docs/concepts/security."""
        pod = rank_pod(built(OVERLAYS / "tcp"))
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec)
        assert not any("hostPath" in volume for volume in pod.spec["volumes"])
        assert not any("securityContext" in container for container in pod.containers)

    def test_overlays_name_no_other_file_in_their_comments(self) -> None:
        """A command at the top of a file runs from the root of a clone."""
        for name in NAMES:
            text = (OVERLAYS / name / "cluster.yaml").read_text()
            assert f"#   kubectl apply -k deploy/overlays/{name}\n" in text
            assert "#   deploy/kubernetes/wait.sh job/nixl\n" in text
            assert ("create configmap nixl-profile" in text) == ("/profile/profile.toml" in text)


def sort(documents: Sequence[Any]) -> list[Any]:
    """The documents with sorted keys, which kustomize writes."""
    return [json.loads(json.dumps(document, sort_keys=True)) for document in documents]


@contextmanager
def api_server(answers: Sequence[Sequence[str] | None]) -> Iterator[str]:
    """A stand-in for an API server, of which none can be had here: it has one Job.

    :param answers: the conditions of the Job at each request, the last one for all later ones; None: an error.
    """
    remaining = list(answers)
    version = {"groupVersion": "batch/v1", "version": "v1"}
    job = {"name": "jobs", "singularName": "job", "namespaced": True, "kind": "Job", "verbs": ["get"]}
    plain: dict[str, dict[str, Any]] = {
        "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
        "/apis": {"kind": "APIGroupList", "groups": [
            {"name": "batch", "versions": [version], "preferredVersion": version},
        ]},
        "/apis/batch/v1": {"kind": "APIResourceList", "groupVersion": "batch/v1", "resources": [job]},
    }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            body: dict[str, Any] = plain.get(path, {})
            status = 200
            if path == "/apis/batch/v1/namespaces/default/jobs/nixl":
                conditions = remaining.pop(0) if len(remaining) > 1 else remaining[0]
                body = {"kind": "Job", "apiVersion": "batch/v1", "metadata": {"name": "nixl"}, "status": {
                    "conditions": [{"type": condition, "status": "True"} for condition in conditions or ()],
                }}  # fmt: skip
                if conditions is None:
                    status, body = 500, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 500}
            text = json.dumps({"apiVersion": "v1", **body}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


class TestWait:
    """``wait.sh`` with the real kubectl."""

    @pytest.mark.parametrize(
        ("answers", "code", "message"),
        [
            ([[], ["SuccessCriteriaMet"], ["SuccessCriteriaMet", "Complete"]], 0, "job/nixl: complete"),
            ([[], ["FailureTarget"], ["FailureTarget", "Failed"]], 1, "job/nixl: failed"),
            ([None, [], None, ["Failed"]], 1, "job/nixl: failed"),
            ([None], 2, "kubectl failed 10 times in a row"),
        ],
        ids=["complete", "failed", "away for a while", "never there"],
    )
    def test_it_ends_when_the_run_has_ended(
        self, tmp_path: Path, answers: list[list[str] | None], code: int, message: str
    ) -> None:
        program("kubectl")
        variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        env = {**variables, "INTERVAL": "0", "HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "none")}
        with api_server(answers) as url:
            done = subprocess.run(
                [str(WAIT), "job/nixl", f"--server={url}"], env=env, capture_output=True, text=True, timeout=SECONDS,
                check=False,
            )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert message in done.stdout + done.stderr

    def test_it_ends_after_its_time_limit(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [str(WAIT), "job/nixl"], env={**os.environ, "TIMEOUT": "0"}, cwd=tmp_path, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (124, "job/nixl: no end after 0 s\n")
