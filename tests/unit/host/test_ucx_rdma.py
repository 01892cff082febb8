# SPDX-License-Identifier: Apache-2.0
"""What UCX and its libibverbs answer about RDMA devices: doubles of both, because this host has no such device."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.double_libraries import build, in_a_child

from pytest_nixl.host.ucx_rdma import ask_ucx_rdma, has_devices

#: It offers one transport for each of its settings, which is named like it, and one named like its version.
UCP = """
    #include <stdio.h>
    static char settings[256]; static int length, left; static char context;
    void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release) { *major = 1; *minor = 23; *release = 5; }
    int ucp_config_read(void *prefix, void *file, void **to) {
        *to = settings; left += !FAILS_TO_READ;
        return FAILS_TO_READ;
    }
    void ucp_config_modify(char *config, const char *name, const char *value) {
        length += sprintf(config + length, "resource 1 : md 0 dev 0 -- %s_%s/mlx5_0:1\\n", name, value);
    }
    int ucp_init_version(int major, int minor, unsigned long *parameters, void *config, void **to) {
        if (config != settings || parameters[0] != 1 || parameters[1] != 2) return 1;
        length += sprintf(settings + length, "resource 2 : md 0 dev 0 -- v%d_%d/mlx5_0:1\\n", major, minor);
        *to = &context; left += !FAILS_TO_START;
        return FAILS_TO_START;
    }
    void ucp_config_release(void *config) { left -= config == settings; }
    void ucp_context_print_info(void *from, FILE *to) { if (from == &context) fputs(settings, to); }
    void ucp_cleanup(void *from) { left -= from == &context; }
    int balance(void) { return left; }
"""
VERBS = """
    #include <errno.h>
    #include <string.h>
    static char *names[] = {"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "odd"}; static int left;
    void *ibv_get_device_list(int *count) { *count = 6; left++; return names; }
    void ibv_free_device_list(void *list) { left--; }
    char *ibv_get_device_name(char *device) { return device; }
    void *ibv_open_device(char *device) {
        if (!strcmp(device, "mlx5_1")) { errno = EACCES; return 0; }
        if (!strcmp(device, "mlx5_4")) return 0;
        left++;
        return device;
    }
    int ibv_close_device(void *context) { left--; return 0; }
    int ibv_query_device(char *context, char *attributes) {
        *(int *)(attributes + 212) = 7;
        return !strcmp(context, "mlx5_2");
    }
    void *ibv_alloc_pd(char *context) { return strcmp(context, "mlx5_3") ? (left++, context) : 0; }
    int ibv_dealloc_pd(void *domain) { left--; return 0; }
    void *ibv_reg_mr(char *domain, char *memory, unsigned long size, int access) {
        if (!strcmp(domain, "mlx5_2") || size != 1 << 20 || access != 1) { errno = ENOMEM; return 0; }
        memory[size - 1] = 1; left++;
        return domain;
    }
    int ibv_dereg_mr(void *region) { left--; return 0; }
    int balance(void) { return left; }
"""


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names in the kernel's folder of RDMA devices."""
    names = ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_9"]
    real, isdir = os.listdir, os.path.isdir
    monkeypatch.setattr(os, "listdir", lambda path: names if path == "/sys/class/infiniband" else real(path))
    monkeypatch.setattr(os.path, "isdir", lambda path: path == "/sys/class/infiniband" or isdir(path))
    return names


def answer(folder: Path, *, module: bool = True, reads: int = 0, starts: int = 0) -> tuple[Any, list[int]]:
    """Return the answer of a process with these libraries, and how much each of them has not got back.

    :param module: whether UCX has its module for RDMA.
    :param reads: what UCX returns of its configuration.
    :param starts: what it returns of its start.
    """
    ucp = UCP.replace("FAILS_TO_READ", str(reads)).replace("FAILS_TO_START", str(starts))
    sources = {"libucp.so.0": ucp, **({"libuct_ib-0a1b2c3d.so.0": VERBS} if module else {})}
    paths = build(folder, sources)

    def ask() -> Any:
        return ask_ucx_rdma(lambda: ["/a/libucpx.so", *paths]), [ctypes.CDLL(path).balance() for path in paths]

    result, balance = in_a_child(paths, ask)
    return result, balance


OFFERED = {"mlx5_0": ["TLS_all", "NET_DEVICES_all", "MAX_COMPONENT_MDS_1024", "v1_23"]}


def test_each_device_is_asked_and_everything_is_given_back(tmp_path: Path) -> None:
    result, balance = answer(tmp_path)
    module = str(tmp_path / "libuct_ib-0a1b2c3d.so.0")
    opened = {"listed": True, "opened": "", "registered": "", "shared_queues": 7}
    assert result == {
        "module": module,
        "libibverbs": module,
        "offered": OFFERED,
        "answers": {
            "mlx5_0": opened,
            "mlx5_1": {**opened, "opened": "Permission denied", "shared_queues": None},
            "mlx5_2": {**opened, "registered": "Cannot allocate memory", "shared_queues": None},
            "mlx5_3": {**opened, "registered": "it does not say why"},
            "mlx5_4": {**opened, "opened": "it does not say why", "shared_queues": None},
            "mlx5_9": {**opened, "listed": False, "shared_queues": None},
        },
    }
    assert balance == [0, 0]


@pytest.mark.parametrize(("options", "offered"), [({}, OFFERED), ({"reads": 1}, {}), ({"starts": 1}, {})])
def test_without_its_module_or_its_start_ucx_offers_less(
    tmp_path: Path, options: dict[str, int], offered: dict[str, list[str]]
) -> None:
    result = answer(tmp_path, module=False, **options)
    assert result == ({"module": "", "libibverbs": "", "offered": offered, "answers": {}}, [0])


def test_a_host_without_devices_and_a_process_without_ucx_are_not_asked(devices: list[str]) -> None:
    assert has_devices()
    assert ask_ucx_rdma(lambda: ["/a/libuct_ib.so.0"]) is None
    devices.clear()
    assert not has_devices()
