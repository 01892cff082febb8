# SPDX-License-Identifier: Apache-2.0
"""Does the host or the container image have the software that the profile wants?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_nixl import Judgement


@pytest.mark.nixl_check("nixl-plugins", level="quick")
def test_the_wanted_plugins_can_be_loaded(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """Every NIXL plugin that the profile wants can be loaded; the others are listed with what they lack."""
    verdict(ask("nixl-plugins"))


@pytest.mark.nixl_check("nixl-cuda", level="quick")
def test_nixl_and_torch_are_built_for_one_cuda_version(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """The NIXL that is loaded, whatever else is installed, is built for the CUDA version of torch and of the driver."""
    verdict(ask("nixl-cuda"))


@pytest.mark.nixl_check("nixl-packages-agree", level="quick")
def test_the_packages_of_nixl_have_one_version(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """All installed packages of NIXL have one version, and its expert-parallel kernels fit torch if they are used."""
    verdict(ask("nixl-packages-agree"))


@pytest.mark.nixl_check("image-versions", level="quick")
def test_the_software_has_the_wanted_versions(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """NIXL, UCX, CUDA, torch and other software have the versions that the profile wants."""
    verdict(ask("image-versions"))


@pytest.mark.nixl_check("gpu-code", level="quick")
def test_plugins_have_code_for_the_gpu(ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]) -> None:
    """Every wanted plugin with CUDA code has some for the compute capability of the GPU."""
    verdict(ask("gpu-code"))


@pytest.mark.nixl_check("verbs-providers", level="quick")
def test_libibverbs_accepts_the_installed_providers(
    ask: Callable[[str], Judgement], verdict: Callable[[Judgement], None]
) -> None:
    """Each copy of libibverbs finds a provider of EFA with its interface number."""
    verdict(ask("verbs-providers"))
