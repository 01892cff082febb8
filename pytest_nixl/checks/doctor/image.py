# SPDX-License-Identifier: Apache-2.0
"""Checks of the software that an image must contain."""

from __future__ import annotations

from dataclasses import replace

from pytest_nixl.checks.doctor.check import (
    Requirements,
    check,
    failed,
    not_applicable,
    passed,
    unknown,
    warned,
)
from pytest_nixl.checks.doctor.libraries import OF_THE_DRIVER, not_loaded
from pytest_nixl.checks.doctor.rdma import providers_of, registers_in
from pytest_nixl.core.sentences import named, plural
from pytest_nixl.host.elf import capability, dotted
from pytest_nixl.host.facts import Facts
from pytest_nixl.host.image import ImageFacts
from pytest_nixl.host.loaded_libraries import URI_PATCH
from pytest_nixl.host.plugin_files import PluginFile, plugin_name
from pytest_nixl.model.expectation import SOFTWARE
from pytest_nixl.model.nixl_releases import wheel_for
from pytest_nixl.model.verdicts import Judgement
from pytest_nixl.nixl.backends import plugin_of

_MOST = 12
#: The variable with which vLLM chooses the kernels of expert parallelism.
_ALL2ALL = "VLLM_ALL2ALL_BACKEND"


@check(
    "nixl-plugins",
    "Can every NIXL plugin that the profile wants be loaded, and which others can?",
    image=True,
    unless=not_loaded,
)
def nixl_plugins(facts: Facts, expected: Requirements) -> Judgement:
    """Every NIXL plugin that the profile wants can be loaded; the others are listed with what they lack."""
    plugins = facts.image.plugins
    if plugins.value is None:
        remedy = "set NIXL_PLUGIN_DIR to the folder of NIXL's plugins; record the tree again if it is a recorded one"
        return unknown(f"which plugins NIXL has is unknown: {plugins.why}", remedy)
    files = {plugin.name: _in_use(plugin, facts, expected) for plugin in plugins.value}
    loading = sorted(
        {
            *(name for name in facts.software.plugins if name not in files),  # part of NIXL's library
            *(name for name, file in files.items() if not file.error),
        }
    )
    # A profile's names are in capitals; Mooncake's is not.
    spelled = {name.upper(): name for name in (*files, *loading)}
    required_plugins = [spelled.get(name.upper(), name) for name in expected.profile.image.plugins]
    bad, remedies = [], dict[str, None]()
    for name in required_plugins:
        if name in loading:
            continue
        if name not in files:
            bad.append(f"{name}: there is no libplugin_{name}.so")
            remedies[f"build NIXL with {name}, or set NIXL_PLUGIN_DIR to the folder that has it"] = None
            continue
        file = files[name]
        bad.append(f"{name}: {file.words}")
        files_absent = [lack for lack in file.missing if not lack.versions]
        remedies |= dict.fromkeys(file.remedies.get(lack.soname, f"install {lack.soname}") for lack in files_absent)
        if not file.missing or any(lack.versions for lack in file.missing):
            remedies[_remedy(file)] = None
    if bad:
        listing = f"{len(bad)} of the {plural(len(required_plugins), 'plugin')} that the profile wants cannot be loaded"
        return failed(f"{listing} (folder {plugins.source}): {'; '.join(bad)}", "; ".join(remedies))
    unrequired = [
        f"{name} ({named((lack.soname for lack in file.missing), 3) or file.error})"
        for name, file in files.items()
        if file.error
    ]
    listing = f"{named(loading, _MOST) or 'none'} can be loaded"
    return passed(f"{listing}; not wanted and cannot be loaded: {named(unrequired, _MOST)}" if unrequired else listing)


def _in_use(file: PluginFile, facts: Facts, expected: Requirements) -> PluginFile:
    """Return a plugin without the error of libraries that it has when it is used."""
    tried = facts.software.backend(file.name)
    if file.error and tried is not None and not tried.error and tried.plugin == file.path:
        return replace(file, error="", missing=())  # the worker had loaded the libraries
    return file.without(OF_THE_DRIVER) if expected.image else file


def _remedy(file: PluginFile) -> str:
    if any(lack.versions for lack in file.missing):
        return "install the library version that the plugin needs, or a NIXL that was linked with the installed one"
    return f"run `LD_DEBUG=libs python -c 'import ctypes; ctypes.CDLL(\"{file.path}\")'` and read where it stops"


def _remedy_of_driver(driver: int, cuda: int, torch: int | None) -> str:
    """Return what to install if the driver is too old for torch or, without torch, for NIXL.

    :param driver: the major version of CUDA that the driver supports.
    :param cuda: that for which the loaded NIXL is built; ``torch`` is that of torch.
    """
    newer = wheel_for(torch) if torch not in (None, cuda) else ""
    remedy = f"install a newer driver on the host{newer and f' and {newer}'}"
    if not wheel_for(driver):
        return remedy
    older = [f"a torch that is built for CUDA {driver}"] if torch is not None else []
    older += [wheel_for(driver)] if driver != cuda else []
    return f"{remedy}; or install {' and '.join(older)}"


def _remedy_of_torch(image: ImageFacts, package: str, version: str | None, cuda: int, torch: int) -> str:
    """Return what to install if NIXL and torch are built for different versions of CUDA."""
    fitting = wheel_for(torch)
    if not fitting:
        return f"install a torch that is built for CUDA {cuda}: there is no package of NIXL for CUDA {torch}"
    if fitting in image.nixl_packages:
        return (
            "import torch before nixl, because NIXL takes the CUDA version of what is imported first (torch, "
            f"cuda-python, cupy); or run `pip uninstall {package}`"
        )
    return f"run `pip install --no-deps {fitting}=={version}`"


@check(
    "nixl-cuda",
    "Is the loaded NIXL built for torch's CUDA version, and does the driver support it?",
    image=True,
    unless=not_loaded,
)
def nixl_cuda(facts: Facts, expected: Requirements) -> Judgement:
    """The NIXL that is loaded, whatever else is installed, is built for the CUDA version of torch and of the driver."""
    software, image = facts.software, facts.image
    package, version, cuda = software.nixl_package.value or "NIXL", software.nixl.value, image.nixl_cuda.value
    unloaded = [f"{name} {release}" for name, release in image.nixl_packages.items() if name not in (package, "nixl")]
    suffix = f"; installed, but not loaded: {named(unloaded)}" if unloaded else ""
    if cuda is None:
        return not_applicable(f"{package} {version} is loaded, and its CUDA version is unknown: {image.nixl_cuda.why}")
    description = f"{package} {version} is loaded, built for CUDA {cuda} ({image.nixl_cuda.source})"
    torch = None if image.torch_cuda.value is None else int(image.torch_cuda.value.partition(".")[0])
    highest = None if expected.image else facts.gpu.cuda.value
    driver = None if highest is None else int(highest.partition(".")[0])
    reason = description
    if torch is not None and torch != cuda:
        reason += (
            f", but torch {image.torch.value} is built for CUDA {image.torch_cuda.value} ({image.torch_cuda.source})"
        )
    if driver is not None and driver < (cuda if torch is None else torch):
        built = f" and torch {image.torch.value} for CUDA {image.torch_cuda.value}" if torch == cuda else ""
        return failed(
            f"{reason}{built}, {'and' if torch not in (None, cuda) else 'but'} the driver supports CUDA only up to "
            f"{highest}{suffix}",
            _remedy_of_driver(driver, cuda, torch),
        )
    if torch is not None and torch != cuda:
        return failed(f"{reason}{suffix}", _remedy_of_torch(image, package, version, cuda, torch))
    of_torch = f"torch {image.torch.value} is built for CUDA {image.torch_cuda.value}"
    if image.torch_cuda.value is None:
        of_torch = image.torch_cuda.why
    of_driver = f"; the driver supports CUDA up to {highest}" if highest else ""
    return passed(f"{description}; {of_torch}{of_driver}{suffix}")


@check("image-versions", "Does the software have the versions that the profile wants?", image=True)
def image_versions(facts: Facts, expected: Requirements) -> Judgement:
    """NIXL, UCX, CUDA, torch and other software have the versions that the profile wants."""
    image = expected.profile.image
    good, bad, unread = list[str](), list[str](), list[str]()
    for key, accepted in image.versions.items():
        name, version = SOFTWARE[key], facts.image.versions.get(key)
        if version is None or version.value is None:
            unread.append(f"{name}: {version.why if version is not None else 'not recorded'}")
            continue
        try:
            fits = accepted.accepts(version.value)
        except ValueError as error:
            unread.append(f"{name}: {error} ({version.source})")
            continue
        description = f"{name} {version.value} ({version.source})"
        if fits:
            good.append(description)
        else:
            bad.append(f"{description}, not {accepted.text}")
    patched = facts.software.etcd_client_patched
    if image.etcd_uri_patch is not None:
        has = f"{URI_PATCH} is {'' if patched.value else 'not '}in {patched.source}"
        if patched.value is None:
            unread.append(f"the patch of etcd-cpp-apiv3: {patched.why}")
        else:
            (good if patched.value is image.etcd_uri_patch else bad).append(has)
    if bad:
        suffix = f"; cannot be read: {'; '.join(unread)}" if unread else ""
        return failed(
            f"not as the profile wants: {'; '.join(bad)}{suffix}",
            "install these versions in the image, or correct [versions] and [image] of the profile",
        )
    if unread:
        return unknown(
            f"cannot be read: {'; '.join(unread)}",
            "install what is missing, or remove it from [versions] and [image] of the profile",
        )
    if not good:
        return not_applicable("the profile wants no version: it has no [versions]")
    return passed("; ".join(good))


@check("verbs-providers", "Does libibverbs accept the providers of the RDMA devices?", image=True)
def verbs_providers(facts: Facts, expected: Requirements) -> Judgement:
    """Each copy of libibverbs finds a provider of every kind of RDMA device with its interface number."""
    kinds = {device.kind: device.kind.upper() if device.kind == "efa" else device.kind for device in facts.rdma}
    if expected.efa:
        kinds["efa"] = "EFA"
    if not kinds or (expected.image and not expected.efa):
        return not_applicable("this host has no RDMA device, and the profile expects no EFA")
    if not facts.image.verbs:
        return unknown(
            "no libibverbs is loaded with NIXL or found by the loader",
            "install rdma-core (apt: libibverbs1 ibverbs-providers) or run the EFA installer",
        )
    fits, faults = [], {}
    for kind, name in kinds.items():
        providers = providers_of(kind, facts)
        have = named(provider.path for provider in providers) or "none"
        fits.append(have)
        for copy in facts.image.verbs:
            if all(provider.abi != copy.abi or not registers_in(provider, copy) for provider in providers):
                needed = f"needs lib{kind}-rdmav{copy.abi}.so"
                if any(provider.abi == copy.abi for provider in providers):
                    needed += " linked to it"
                faults[f"{copy.path} {needed}, and the {name} providers are: {have}"] = copy.path
    if faults:
        used = facts.software.ucx_rdma.libibverbs if facts.software.ucx_rdma is not None else ""
        bad = set(faults.values())
        judgement = failed if used in bad or len(bad) == len(facts.image.verbs) else warned
        return judgement(
            f"{named(faults)}; what uses this libibverbs does not see the device, and falls back to TCP",
            "install libibverbs and its providers from one release of rdma-core (apt: libibverbs1 ibverbs-providers, "
            "or the EFA installer); with NIXL's wheel, whose libibverbs is its own, follow the remedy of ucx-uses-rdma "
            "or use a NIXL built on this image",
        )
    return passed(f"{named(verb.path for verb in facts.image.verbs)} accepts {named(fits)}")


@check("gpu-code", "Does each plugin with CUDA code have some for the GPU of this host or of the profile?", image=True)
def gpu_code(facts: Facts, expected: Requirements) -> Judgement:
    """Every wanted plugin with CUDA code has some for the compute capability of the GPU."""
    codes = {plugin_name(code.path): code for code in facts.image.device_code}
    if not codes:
        return not_applicable("no plugin of NIXL contains CUDA code")
    host = () if expected.image else facts.gpu.gpus
    models = {gpu.name or f"GPU {gpu.index}": gpu.capability for gpu in host if gpu.name or gpu.capability is not None}
    if not models and expected.machine is not None and expected.machine.gpu:
        models = {expected.machine.gpu: None}
    capabilities = {model: capability(model) if by_nvml is None else by_nvml for model, by_nvml in models.items()}
    capabilities_by_model = {model: number for model, number in capabilities.items() if number is not None}
    listing = "; ".join(f"{name}: {code.text}" for name, code in codes.items())
    if not capabilities_by_model:
        reason = f"the compute capability of {named(models)} is not known" if models else "no GPU is known"
        return not_applicable(f"{reason}, here and from the profile; CUDA code of plugins: {listing}")
    gpus = named(f"{model} ({dotted(number)})" for model, number in capabilities_by_model.items())
    without = [name for name, code in codes.items() if not all(map(code.runs_on, capabilities_by_model.values()))]
    plugins = {*expected.profile.image.plugins, *map(plugin_of, expected.backends)}
    bad = [name for name in without if name in plugins]
    if bad:
        return failed(
            f"no CUDA code for {gpus} in {named(f'{name} (it has {codes[name].text})' for name in bad)}",
            "use a NIXL whose plugins are built for this GPU, or do not ask for the plugin",
        )
    suffix = f"; not wanted, and without code for {gpus}: {named(without)}" if without else f", which fits {gpus}"
    return passed(f"CUDA code of plugins: {listing}{suffix}")


@check("nixl-packages-agree", "Have all installed packages of NIXL one version, and do they fit torch?", image=True)
def nixl_packages_agree(facts: Facts, expected: Requirements) -> Judgement:
    """All installed packages of NIXL have one version, and its expert-parallel kernels fit torch if they are used."""
    absent = not_loaded(facts, expected)
    if absent is not None:
        return not_applicable(f"NIXL cannot be loaded: {absent.reason}")
    loaded, version = facts.software.nixl_package.value or "", facts.software.nixl.value or ""
    installed = facts.image.nixl_packages
    if not installed:
        return not_applicable("no package of NIXL is installed: this is a build of its own")
    listing = named((f"{name} {release}" for name, release in installed.items()), 6)
    if len(set(installed.values())) > 1:
        pins = " ".join(f"{name}=={version}" for name in installed)
        return failed(
            f"packages of NIXL with different versions are installed: {listing}; {loaded} {version} is loaded",
            f"run `pip install --no-deps {pins}` with the version that you want, or uninstall what is not loaded",
        )
    for backend in facts.software.backends:
        if backend.release not in ("", version):
            return warned(
                f"{loaded} {version} loads a plugin of NIXL {backend.release} for {backend.name}: {backend.plugin}",
                "unset NIXL_PLUGIN_DIR, or set it to the plugin folder of the NIXL that is loaded",
            )
    flavours = [name for name in installed if name != "nixl"]
    both = f"; {loaded} is loaded" if len(flavours) > 1 else ""
    kernels = facts.image.nixl_ep
    if kernels.value is not False:
        return passed(f"{listing}{both}")
    reason = f"nixl_ep cannot be imported from {kernels.source}: {kernels.why}"
    if "nixl" in facts.environment.get(_ALL2ALL).lower():
        return failed(
            f"{_ALL2ALL}={facts.environment.get(_ALL2ALL)}, but {reason}",
            f"install the torch for which it is built, or another {loaded}; keep one of {' and '.join(flavours)}",
        )
    return passed(f"{listing}{both}; {reason} (only expert parallelism needs it)")
