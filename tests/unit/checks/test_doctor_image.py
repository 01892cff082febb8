# SPDX-License-Identifier: Apache-2.0
"""The doctor reports each fault of an image that is put into a healthy tree, judged by what a profile wants."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
from helpers.fake_sysfs import Tree, p5

from pytest_nixl.checks.doctor.catalogue import judge_by_id
from pytest_nixl.checks.doctor.check import Requirements
from pytest_nixl.host.facts import gather
from pytest_nixl.host.recorded_tree import NOT_RECORDED, FactsRoot
from pytest_nixl.judge.profiles import parse_profile
from pytest_nixl.model.verdicts import Judgement, Verdict

HEAD = '[profile]\nname = "image"\n'


class ChangedTree(FactsRoot):
    """A recorded tree of which a test changes answers, without changing its files."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree.folder)
        self._changed: dict[str, Any] = {}

    def ask(self, name: str, question: Callable[[], Any]) -> Any:
        return self._changed[name] if name in self._changed else super().ask(name, question)

    def change(self, name: str, how: Callable[[Any], None]) -> None:
        """Change an answer in place."""
        self._changed[name] = copy.deepcopy(self.ask(name, dict))
        how(self._changed[name])


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return p5(tmp_path_factory.mktemp("p5") / "tree")


@pytest.fixture
def tree(healthy: Tree) -> ChangedTree:
    return ChangedTree(healthy)


def judged(tree: ChangedTree, check: str, profile: str = "", *, image: bool = False) -> Judgement:
    facts = gather(tree, backends=("UCX",), environ={})
    return judge_by_id(
        check, facts, Requirements(parse_profile((HEAD + profile).encode(), "p.toml"), ("UCX",), image=image)
    )


def lacking(name: str, *words: str, versions: tuple[str, ...] = (), error: str = "not found") -> Callable[[Any], None]:
    """Return a change of the answers after which a plugin lacks libraries."""

    def change(found: Any) -> None:
        missing = [{"soname": each.split(",")[0], "versions": list(versions), "words": each} for each in words]
        remedies = {} if versions else {each["soname"]: f"install {each['soname']}" for each in missing}
        folder = found["plugin_folder"]
        file = {"name": name, "path": f"{folder}/libplugin_{name}.so", "error": error}
        found["plugins"].append({**file, "missing": missing, "remedies": remedies})

    return change


GDS = (
    "libcudart.so.12, which libplugin_GDS.so needs, was not found",
    "libcufile.so.0, which libplugin_GDS.so needs, was not found",
)


def test_plugin_that_nobody_wants_is_reported_in_one_line(tree: ChangedTree) -> None:
    tree.change("image", lacking("GDS", *GDS))
    found = judged(tree, "nixl-plugins")
    assert found.verdict is Verdict.PASS
    assert found.reason == (
        "LIBFABRIC, UCX can be loaded; not wanted and cannot be loaded: GDS (libcudart.so.12, libcufile.so.0)"
    )


def test_wanted_plugin_without_its_libraries_fails_with_the_libraries_and_who_has_them(tree: ChangedTree) -> None:
    tree.change("image", lacking("GDS", *GDS))
    found = judged(tree, "nixl-plugins", '[image]\nplugins = ["UCX", "GDS"]')
    assert found.verdict is Verdict.FAIL
    assert "1 of the 2 plugins that the profile wants" in found.reason
    assert "GDS: lacks libcudart.so.12, libcufile.so.0" in found.reason
    assert found.remedy == "install libcudart.so.12; install libcufile.so.0"


def test_wanted_plugin_is_found_whatever_the_case_of_its_name(tree: ChangedTree) -> None:
    tree.change("image", lacking("Mooncake", "libglog.so.0, which libplugin_Mooncake.so needs, was not found"))
    found = judged(tree, "nixl-plugins", '[image]\nplugins = ["Mooncake"]')
    assert found.verdict is Verdict.FAIL
    assert "Mooncake: lacks libglog.so.0" in found.reason


def test_wanted_plugin_without_a_symbol_version_fails(tree: ChangedTree) -> None:
    words = "/usr/lib/libfabric.so.1 lacks the symbol version FABRIC_1.10 that libplugin_X.so needs"
    tree.change("image", lacking("X", words, versions=("FABRIC_1.10",)))
    found = judged(tree, "nixl-plugins", '[image]\nplugins = ["X"]')
    assert found.verdict is Verdict.FAIL
    assert words in found.reason
    assert "linked" in found.remedy


def test_wanted_plugin_that_crashes_or_lacks_a_symbol_fails_with_the_error(tree: ChangedTree) -> None:
    tree.change("image", lacking("X", error="libplugin_X.so: undefined symbol: nixlCreate"))
    found = judged(tree, "nixl-plugins", '[image]\nplugins = ["X"]')
    assert found.verdict is Verdict.FAIL
    assert "X: libplugin_X.so: undefined symbol: nixlCreate" in found.reason
    assert "LD_DEBUG" in found.remedy


def test_wanted_plugin_without_a_file_fails_unless_it_is_part_of_nixl(tree: ChangedTree) -> None:
    found = judged(tree, "nixl-plugins", '[image]\nplugins = ["HF3FS"]')
    assert found.verdict is Verdict.FAIL
    assert "HF3FS: there is no libplugin_HF3FS.so" in found.reason
    tree.change("nixl", lambda answer: answer["plugins"].append("HF3FS"))
    assert judged(tree, "nixl-plugins", '[image]\nplugins = ["HF3FS"]').verdict is Verdict.PASS


def test_library_of_the_driver_is_not_expected_in_an_image(tree: ChangedTree) -> None:
    words = "libcuda.so.1, which libplugin_GPUNETIO.so needs, was not found"
    tree.change("image", lacking("GPUNETIO", words))
    profile = '[image]\nplugins = ["GPUNETIO"]'
    assert judged(tree, "nixl-plugins", profile).verdict is Verdict.FAIL
    assert judged(tree, "nixl-plugins", profile, image=True).verdict is Verdict.PASS


def test_plugin_that_a_worker_created_is_not_judged_by_the_loader_alone(tree: ChangedTree) -> None:
    # The worker loads libraries of LIBFABRIC first, from folders that the loader does not search.
    words = "libfabric.so.1, which libplugin_LIBFABRIC.so needs, was not found"
    tree.change("image", lambda found: found["plugins"].pop(0))
    tree.change("image", lacking("LIBFABRIC", words))
    assert judged(tree, "nixl-plugins", '[image]\nplugins = ["LIBFABRIC"]').verdict is Verdict.PASS


def test_healthy_image_has_one_nixl_for_the_cuda_of_torch_and_the_driver(tree: ChangedTree) -> None:
    found = judged(tree, "nixl-cuda")
    assert found.verdict is Verdict.PASS
    assert "nixl-cu12 1.5.0 is loaded, built for CUDA 12 (/usr/local/lib" in found.reason
    assert "torch 2.9.0+cu128 is built for CUDA 12.8; the driver supports CUDA up to 12.8" in found.reason
    assert "driver" not in judged(tree, "nixl-cuda", image=True).reason


def test_second_wheel_that_is_not_loaded_is_named_and_fails_nothing(tree: ChangedTree) -> None:
    tree.change("image", lambda found: found["packages"].update({"nixl-cu13": "1.5.0", "nixl": "1.5.0"}))
    found = judged(tree, "nixl-cuda")
    assert found.verdict is Verdict.PASS
    assert "nixl-cu12 1.5.0 is loaded" in found.reason
    assert "installed, but not loaded: nixl-cu13 1.5.0;" in found.reason


def loads_cuda_13(found: Any) -> None:
    found["nixl_package"] = "nixl-cu13"
    found["nixl_module"] = found["nixl_module"].replace("nixl_cu12", "nixl_cu13")


@pytest.mark.parametrize(
    ("beside", "remedy"),
    [({}, "pip install --no-deps nixl-cu12==1.5.0"), ({"nixl-cu12": "1.5.0"}, "import torch before nixl")],
)
def test_nixl_for_another_cuda_than_torch_fails(tree: ChangedTree, beside: dict[str, str], remedy: str) -> None:
    tree.change("nixl", loads_cuda_13)
    tree.change("image", lambda found: found.update(packages={"nixl-cu13": "1.5.0", **beside}))
    found = judged(tree, "nixl-cuda", image=True)
    assert found.verdict is Verdict.FAIL
    assert "nixl-cu13 1.5.0 is loaded, built for CUDA 13" in found.reason
    assert "but torch 2.9.0+cu128 is built for CUDA 12.8 (/usr/local/lib/torch/version.py)" in found.reason
    assert remedy in found.remedy


def test_nixl_for_a_newer_cuda_than_the_driver_fails_on_a_host_and_not_in_an_image(tree: ChangedTree) -> None:
    tree.change("nixl", loads_cuda_13)
    tree.change("image", lambda found: found.update(torch={}))
    found = judged(tree, "nixl-cuda")
    assert found.verdict is Verdict.FAIL
    assert "the driver supports CUDA only up to 12.8" in found.reason
    assert "install nixl-cu12" in found.remedy
    image = judged(tree, "nixl-cuda", image=True)
    assert image.verdict is Verdict.PASS
    assert "torch is not installed" in image.reason


@pytest.mark.parametrize(
    ("torch", "loaded", "driver", "reason", "remedy"),
    [
        # torch itself needs a newer driver: another NIXL would not help.
        ("13.0", 12, "12.9", "but torch 2 is built for CUDA 13.0 (t), and the driver supports CUDA only up to 12.9",
         "install a newer driver on the host and nixl-cu13; or install a torch that is built for CUDA 12"),
        ("13.0", 13, "12.9", "built for CUDA 13 (n) and torch 2 for CUDA 13.0, but the driver supports CUDA only up to",
         "install a newer driver on the host; or install a torch that is built for CUDA 12 and nixl-cu12"),
        ("12.8", 13, "12.9", "but torch 2 is built for CUDA 12.8 (t)", "run `pip install --no-deps nixl-cu12==1.5.0`"),
        ("11.8", 12, "12.9", "but torch 2 is built for CUDA 11.8 (t)",
         "install a torch that is built for CUDA 12: there is no package of NIXL for CUDA 11"),
        ("12.8", 12, "11.8", "built for CUDA 12 (n) and torch 2 for CUDA 12.8, but the driver supports CUDA only up to",
         "install a newer driver on the host"),
        (None, 12, "11.8", "but the driver supports CUDA only up to 11.8", "install a newer driver on the host"),
    ],
)  # fmt: skip
def test_torch_driver_and_nixl_are_compared_in_one_sentence(
    torch: str | None, loaded: int, driver: str, reason: str, remedy: str, tree: ChangedTree
) -> None:
    if loaded == 13:
        tree.change("nixl", loads_cuda_13)
    tree.change("nvml", lambda answer: answer.update(cuda=driver))
    packages = {f"nixl-cu{loaded}": "1.5.0"}
    version = {} if torch is None else {"version": "2", "cuda": torch, "path": "t"}
    tree.change("image", lambda answer: answer.update(torch=version, packages=packages))
    found = judged(tree, "nixl-cuda")
    module = re.search(r"built for CUDA \d+ \((\S+)\)", found.reason)
    assert module is not None
    assert found.verdict is Verdict.FAIL
    assert reason in found.reason.replace(f"({module[1]})", "(n)")
    assert found.remedy == remedy


def test_nixl_of_ones_own_build_is_judged_by_its_cuda_runtime(tree: ChangedTree) -> None:
    tree.change("nixl", lambda found: found.update(nixl_package="nixl", nixl_module="/opt/nixl/nixl/_api.py"))
    assert judged(tree, "nixl-cuda").verdict is Verdict.NOT_APPLICABLE
    tree.change("nixl", lambda found: found["libraries"].append("/usr/local/cuda/lib64/libcudart.so.13"))
    assert judged(tree, "nixl-cuda").verdict is Verdict.FAIL


VERSIONS = """
[versions]
nixl = "1.5"
ucx = ">=1.20, <2"
libfabric = ">=1.18"
etcd_cpp_api = "0.15.4"
cuda = "12"
torch = "2.9"
gdrcopy = "2"
efa_installer = ">=1.40"

[image]
etcd_uri_patch = true
"""


def test_wanted_versions_pass_with_where_each_was_read(tree: ChangedTree) -> None:
    found = judged(tree, "image-versions", VERSIONS)
    assert found.verdict is Verdict.PASS
    assert "NIXL 1.5.0 (a worker that loaded NIXL)" in found.reason
    assert "GDRCopy 2.5 (/usr/lib/x86_64-linux-gnu/libgdrapi.so.2.5)" in found.reason
    assert "is in /usr/local/lib/libetcd-cpp-api-core.so" in found.reason
    assert judged(tree, "image-versions").verdict is Verdict.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ('nixl = "1.4"', "NIXL 1.5.0 (a worker that loaded NIXL), not 1.4"),
        ('ucx = ">=1.22"', "UCX 1.21.0 (a worker that loaded NIXL), not >=1.22"),
        ('libfabric = "<2"', "libfabric 2.3 (a worker that loaded NIXL), not <2"),
        ('etcd_cpp_api = "0.15.5"', "etcd-cpp-apiv3 0.15.4 (/usr/local/lib/cmake"),
        ('cuda = "12.9"', "the CUDA runtime 12.8.90 (/usr/local/cuda/lib64/libcudart.so.12.8.90), not 12.9"),
        ('torch = "2.10"', "torch 2.9.0+cu128 (/usr/local/lib/torch/version.py), not 2.10"),
        ('gdrcopy = "2.4"', "GDRCopy 2.5 (/usr/lib/x86_64-linux-gnu/libgdrapi.so.2.5), not 2.4"),
        ('efa_installer = ">1.43.2"', "the EFA installer 1.43.2 (/opt/amazon/efa_installed_packages), not >1.43.2"),
    ],
)
def test_other_version_than_the_wanted_one_fails(tree: ChangedTree, versions: str, words: str) -> None:
    found = judged(tree, "image-versions", f"[versions]\n{versions}\n")
    assert found.verdict is Verdict.FAIL
    assert words in found.reason


def test_version_that_cannot_be_read_is_unknown_and_said_beside_a_failure(tree: ChangedTree) -> None:
    tree.change("image", lambda found: found["versions"].update(gdrcopy=["", "libgdrapi.so.2", "it is not found"]))
    found = judged(tree, "image-versions", '[versions]\ngdrcopy = "2"\n')
    assert found.verdict is Verdict.UNKNOWN
    assert "GDRCopy: it is not found" in found.reason
    found = judged(tree, "image-versions", '[versions]\ngdrcopy = "2"\nnixl = "2"\n')
    assert found.verdict is Verdict.FAIL
    assert "GDRCopy: it is not found" in found.reason


def test_patch_of_the_etcd_client_is_judged_by_the_library(tree: ChangedTree) -> None:
    wanted = "[image]\netcd_uri_patch = true"
    assert judged(tree, "image-versions", wanted).verdict is Verdict.PASS
    assert judged(tree, "image-versions", wanted.replace("true", "false")).verdict is Verdict.FAIL
    tree.change("nixl", lambda found: found["etcd_client"].update(patched=False))
    found = judged(tree, "image-versions", wanted)
    assert found.verdict is Verdict.FAIL
    assert "ETCD_CPP_API_DISABLE_URI_VALIDATION is not in /usr/local/lib/libetcd-cpp-api-core.so" in found.reason
    tree.change("nixl", lambda found: found["etcd_client"].update(path=""))
    assert judged(tree, "image-versions", wanted).verdict is Verdict.UNKNOWN


def test_efa_provider_of_another_interface_than_libibverbs_fails(tree: ChangedTree) -> None:
    assert judged(tree, "verbs-providers").verdict is Verdict.PASS
    tree.change("image", lambda found: found["verbs"]["libraries"][0].update(abi=59))
    found = judged(tree, "verbs-providers")
    assert found.verdict is Verdict.FAIL
    assert "/usr/lib/x86_64-linux-gnu/libibverbs.so.1 needs libefa-rdmav59.so" in found.reason
    assert "libibverbs/libefa-rdmav34.so" in found.reason
    # NIXL's wheel brings a second copy, which fits.
    tree.change("image", lambda found: found["verbs"]["libraries"].append({"path": "/wheel/libibverbs.so", "abi": 34}))
    tree.change("image", lambda found: found["verbs"]["providers"][0].update(library="/wheel/libibverbs.so"))
    tree.change("nixl", lambda found: found["ucx_rdma"].update(libibverbs="/wheel/libibverbs.so"))
    assert judged(tree, "verbs-providers").verdict is Verdict.WARN
    # The copy that UCX uses sees no device.
    tree.change("nixl", lambda found: found["ucx_rdma"].update(libibverbs="/usr/lib/x86_64-linux-gnu/libibverbs.so.1"))
    assert judged(tree, "verbs-providers").verdict is Verdict.FAIL
    tree.change("image", lambda found: found["verbs"].update(providers=[]))
    assert "the EFA providers are: none" in judged(tree, "verbs-providers").reason


def test_efa_provider_of_another_copy_of_libibverbs_fails(tree: ChangedTree) -> None:
    tree.change("image", lambda found: found["verbs"]["providers"][0].update(library="/wheel/libibverbs.so"))
    found = judged(tree, "verbs-providers")
    assert found.verdict is Verdict.FAIL
    assert "/usr/lib/x86_64-linux-gnu/libibverbs.so.1 needs libefa-rdmav34.so linked to it" in found.reason


def test_efa_without_libibverbs_is_unknown(tree: ChangedTree) -> None:
    tree.change("image", lambda found: found["verbs"].update(libraries=[]))
    assert judged(tree, "verbs-providers").verdict is Verdict.UNKNOWN


MACHINE = '[machine]\nnics = 1\nnic_rate = "1 Gb/s"\ngpus = 8\ngpu = "A100"\nsource = "-"\n'


def test_plugin_without_code_for_the_gpu_fails_if_it_is_wanted(tree: ChangedTree) -> None:
    wanted = '[image]\nplugins = ["GPUNETIO"]\n'
    found = judged(tree, "gpu-code", wanted)
    assert found.verdict is Verdict.PASS
    assert found.reason == "CUDA code of plugins: GPUNETIO: 9.0, 10.0, which fits NVIDIA H100 80GB HBM3 (9.0)"
    # In an image the GPU is that of the profile.
    found = judged(tree, "gpu-code", wanted + MACHINE, image=True)
    assert found.verdict is Verdict.FAIL
    assert found.reason == "no CUDA code for A100 (8.0) in GPUNETIO (it has 9.0, 10.0)"
    found = judged(tree, "gpu-code", MACHINE, image=True)
    assert found.verdict is Verdict.PASS
    assert "not wanted, and without code for A100 (8.0): GPUNETIO" in found.reason

    def other_model(nvml: Any) -> None:
        for gpu in nvml["gpus"]:
            gpu["name"] = "NVIDIA L40S"

    tree.change("nvml", other_model)
    assert judged(tree, "gpu-code", wanted).verdict is Verdict.FAIL


def test_capability_that_nvml_says_counts_before_the_name(tree: ChangedTree) -> None:
    wanted = '[image]\nplugins = ["GPUNETIO"]\n'

    def answer(name: str, capability: int | None) -> None:
        def change(nvml: Any) -> None:
            for gpu in nvml["gpus"]:
                gpu.update(name=name, capability=capability)

        tree.change("nvml", change)

    answer("NVIDIA Voodoo", 100)
    assert judged(tree, "gpu-code", wanted).reason.endswith("which fits NVIDIA Voodoo (10.0)")
    answer("NVIDIA H100 80GB HBM3", 120)
    found = judged(tree, "gpu-code", wanted)
    assert found.verdict is Verdict.FAIL
    assert found.reason == "no CUDA code for NVIDIA H100 80GB HBM3 (12.0) in GPUNETIO (it has 9.0, 10.0)"
    answer("NVIDIA Voodoo", None)
    assert "the compute capability of NVIDIA Voodoo is not known" in judged(tree, "gpu-code", wanted).reason
    answer("NVIDIA H100 80GB HBM3", None)  # a driver whose NVML does not say
    assert judged(tree, "gpu-code", wanted).verdict is Verdict.PASS


def test_code_is_not_judged_without_a_gpu_whose_capability_is_known(tree: ChangedTree) -> None:
    assert "no GPU is known" in judged(tree, "gpu-code", image=True).reason
    found = judged(tree, "gpu-code", MACHINE.replace("A100", "Voodoo"), image=True)
    assert found.verdict is Verdict.NOT_APPLICABLE
    assert "the compute capability of Voodoo is not known" in found.reason
    tree.change("image", lambda answer: answer.update(device_code=[]))
    assert "no plugin of NIXL contains CUDA code" in judged(tree, "gpu-code").reason


def test_tree_without_the_record_is_unknown(tree: ChangedTree) -> None:
    def remove(found: Any) -> None:
        found.clear()
        found["why"] = NOT_RECORDED

    tree.change("image", remove)
    assert judged(tree, "nixl-plugins").verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("[image]\nplugins = []", "an empty list"),
        ('[image]\nplugins = "UCX"', "a text, not a list"),
        ('[image]\nplugins = ["U C X"]', "is not a backend name"),
        ('[image]\nplugin = ["UCX"]', "did you mean plugins?"),
        ("image = 3", "not a table"),
        ('[image]\netcd_uri_patch = "yes"', "not a boolean"),
        ('[versions]\nnixel = "1"', "did you mean nixl?"),
        ('[versions]\nnixl = "latest"', "'latest' is neither a version nor a bound"),
        ("[versions]\nnixl = 1.5", "the bare number 1.5, not a text"),
    ],
)
def test_table_that_is_not_valid_is_one_sentence(profile: str, words: str) -> None:
    text = profile + "\n" + HEAD if profile.startswith("image") else HEAD + profile
    with pytest.raises(ValueError) as caught:
        parse_profile(text.encode(), "p.toml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kernels_that_do_not_fit_torch_fail_only_where_they_are_used(tree: ChangedTree) -> None:
    why = {"path": "/usr/local/nixl_ep_cu12", "why": "it is built for torch 2.11, and torch is 2.9.0"}
    tree.change("image", lambda found: found.update(nixl_ep=why, packages={"nixl-cu12": "1.5.0", "nixl-cu13": "1.5.0"}))
    found = judged(tree, "nixl-packages-agree", image=True)
    assert found.verdict is Verdict.PASS
    assert found.reason.startswith("nixl-cu12 1.5.0, nixl-cu13 1.5.0; nixl-cu12 is loaded; nixl_ep cannot be imported")
    tree.change("environment", lambda found: found["steering"].update(VLLM_ALL2ALL_BACKEND="deepep_low_latency"))
    assert judged(tree, "nixl-packages-agree").verdict is Verdict.PASS
    tree.change("environment", lambda found: found["steering"].update(VLLM_ALL2ALL_BACKEND="nixl_ep"))
    assert judged(tree, "nixl-packages-agree").verdict is Verdict.FAIL


def test_a_build_without_packages_is_not_judged_by_them(tree: ChangedTree) -> None:
    tree.change("image", lambda found: found["packages"].clear())
    assert judged(tree, "nixl-packages-agree").verdict is Verdict.NOT_APPLICABLE
