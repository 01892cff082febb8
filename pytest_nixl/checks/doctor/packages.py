# SPDX-License-Identifier: Apache-2.0
"""Check of the installed packages of NIXL: one version, and kernels that fit torch."""

from __future__ import annotations

from pytest_nixl.checks.doctor.check import Requirements, check, failed, not_applicable, passed
from pytest_nixl.checks.doctor.libraries import not_loaded
from pytest_nixl.core.words import named
from pytest_nixl.host.facts import Facts
from pytest_nixl.model.verdicts import Judgement

#: The variable with which vLLM chooses the kernels of expert parallelism.
_ALL2ALL = "VLLM_ALL2ALL_BACKEND"


@check("nixl-packages-agree", "Have all installed packages of NIXL one version, and do they fit torch?", image=True)
def nixl_packages_agree(facts: Facts, wanted: Requirements) -> Judgement:
    """All installed packages of NIXL have one version, and its expert-parallel kernels fit torch if they are used.

    Judge nixl, nixl-cu12, nixl-cu13 and nixl-rocm: an upgrade of one of these packages leaves the others behind.
    """
    absent = not_loaded(facts, wanted)
    if absent is not None:
        return not_applicable(f"NIXL cannot be loaded: {absent.reason}")
    loaded, version = facts.software.nixl_package.value or "", facts.software.nixl.value or ""
    installed = facts.image.nixl_packages
    if not installed:
        return not_applicable("no package of NIXL is installed: this is a build of its own")
    told = named((f"{name} {each}" for name, each in installed.items()), 6)
    if len(set(installed.values())) > 1:
        pins = " ".join(f"{name}=={version}" for name in installed)
        return failed(
            f"packages of NIXL with different versions are installed: {told}; {loaded} {version} is loaded",
            f"run `pip install --no-deps {pins}` with the version that you want, or uninstall what is not loaded",
        )
    flavours = [name for name in installed if name != "nixl"]
    both = f"; {loaded} is loaded" if len(flavours) > 1 else ""
    kernels = facts.image.nixl_ep
    if kernels.value is not False:
        return passed(f"{told}{both}")
    reason = f"nixl_ep cannot be imported from {kernels.source}: {kernels.why}"
    if "nixl" in facts.environment.get(_ALL2ALL).lower():
        return failed(
            f"{_ALL2ALL}={facts.environment.get(_ALL2ALL)}, but {reason}",
            f"install the torch for which it is built, or another {loaded}; keep one of {' and '.join(flavours)}",
        )
    return passed(f"{told}{both}; {reason} (only expert parallelism needs it)")
