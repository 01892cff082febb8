// SPDX-License-Identifier: Apache-2.0
// A stand-in for NVML (libnvidia-ml.so.1), for tests on machines without a GPU. Names and structures are those of NVML's
// header. The GPUs are those of driver.c: STANDIN_GPUS (2).
// A variable with a list, such as STANDIN_NVLINKS=18,17, has a value for each GPU; the last one is for all that follow:
// STANDIN_MEMORY (bytes; 1 GiB), STANDIN_NVLINKS (active NVLinks; 0), STANDIN_DOWN (NVLinks that are down; 0), STANDIN_LINK_RATE (KiB that active NVLinks carry each second; 0), STANDIN_ECC_ERRORS (uncorrectable ones; 0),
// STANDIN_ECC (1), STANDIN_PERSISTENCE (1), STANDIN_BAR1 (bytes; as the memory), STANDIN_P2P (0: others' memory can be
// read; 1: the chipset does not support it), STANDIN_CC (the compute capability, major; 9; 0: not supported).
// STANDIN_MIG (1: MIG mode, in which no other GPU's memory can be read; 0), STANDIN_INSTANCES (of a GPU in MIG mode; 1),
// STANDIN_HANDLE (an error code of asking for the
// GPU's handle; 0), STANDIN_CALLS (an error code of every call with that handle; 0).
// STANDIN_NAME (its name). One call with the GPU's handle returns what STANDIN_FUNCTION says, such as
// STANDIN_nvmlDeviceGetPersistenceMode=0,3, unless that is 0.
// STANDIN_REMAP (1: rows of memory are replaced at the next reset; 2: that failed; 0), STANDIN_CLOCKS (why clocks are slow, as
// the bits of NVML; 1: it is idle), STANDIN_FABRIC (1: not started; 2: in progress; 3: joined), STANDIN_FABRIC_STATUS (an
// error code of joining; 0), STANDIN_COMPUTE_MODE (2: prohibited; 3: exclusive process; 0).
// For all GPUs: STANDIN_CONFIDENTIAL (1: confidential computing is on; 0), STANDIN_DRIVER (the driver's version), STANDIN_CUDA (12090), STANDIN_NVML (an error code
// of nvmlInit, such as 18: the library and the kernel's driver have different versions), STANDIN_NVML_HANGS (nvmlInit
// never returns), STANDIN_COUNT (an error code of
// asking how many GPUs there are). Codes of NVML's header: 4 no permission, 9 no driver, 15 the GPU is lost, 16 it needs a
// reset, 999 unknown.
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { u32 field, scope; long long time, latency; u32 type; int code; union { u32 u; u64 l; double d; } value; } Field;
enum { OK = 0, INVALID = 2, UNSUPPORTED = 3, SHORT = 7, MISMATCH = 18 };

static u64 number(const char *name, int gpu, u64 usual) {
    const char *told = getenv(name);
    if (!told) return usual;
    for (const char *next; gpu-- > 0 && (next = strchr(told, ',')); told = next + 1);
    return strtoull(told, NULL, 10);
}
static const char *text(const char *name, const char *usual) { const char *told = getenv(name); return told ? told : usual; }
static int gpus(void) { return number("STANDIN_GPUS", 0, 2); }
static int index_of(void *handle) { long i = (long)handle - 1; return i < 0 || i >= gpus() ? -1 : (int)i; }
static int answer(const char *call, int gpu) {
    char name[96];
    snprintf(name, sizeof name, "STANDIN_%s", call);
    return number(name, gpu, number("STANDIN_CALLS", gpu, OK));
}
#define GPU(handle) int i = index_of(handle); if (i < 0) return INVALID; if (answer(__func__, i)) return answer(__func__, i)
static int say(char *to, u32 length, const char *what) { snprintf(to, length, "%s", what); return strlen(what) < length ? OK : SHORT; }
static void pci(Pci *to, int bus) {
    memset(to, 0, sizeof *to);
    to->bus = bus, to->id = 0x233010DE;
    snprintf(to->legacy, sizeof to->legacy, "0000:%02X:00.0", bus & 0xFF);
    snprintf(to->bus_id, sizeof to->bus_id, "00000000:%02X:00.0", bus & 0xFF);
}

int nvmlInit_v2(void) { if (getenv("STANDIN_NVML_HANGS")) for (;;) pause(); return number("STANDIN_NVML", 0, OK); }
int nvmlInitWithFlags(u32 flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) {
    return code == OK ? "Success" : code == UNSUPPORTED ? "Not Supported"
         : code == MISMATCH ? "Driver/library version mismatch" : "stand-in error";
}
int nvmlSystemGetDriverVersion(char *to, u32 length) { return say(to, length, text("STANDIN_DRIVER", "580.95.05")); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = number("STANDIN_CUDA", 0, 12090), OK; }
int nvmlDeviceGetCount_v2(u32 *count) { return *count = gpus(), number("STANDIN_COUNT", 0, OK); }
int nvmlDeviceGetHandleByIndex_v2(u32 which, void **handle) {
    *handle = (void *)(long)(which + 1);
    return index_of(*handle) < 0 ? INVALID : number("STANDIN_HANDLE", which, OK);
}
int nvmlDeviceGetHandleByIndex(u32 which, void **handle) { return nvmlDeviceGetHandleByIndex_v2(which, handle); }
int nvmlDeviceGetName(void *handle, char *to, u32 length) {
    GPU(handle);
    char name[96];
    const char *list = getenv("STANDIN_NAME");
    for (int gpu = i; list && gpu > 0 && strchr(list, ','); gpu--) list = strchr(list, ',') + 1;
    if (list) snprintf(name, sizeof name, "%.*s", (int)strcspn(list, ","), list); else snprintf(name, sizeof name, "Stand-in %d", i);
    return say(to, length, name);
}
int nvmlDeviceGetUUID(void *handle, char *to, u32 length) {
    GPU(handle);
    u32 b = 0x10 + i;
    char uuid[48] = "GPU";
    for (int k = 0; k < 16; k++) sprintf(uuid + strlen(uuid), k == 0 || (k % 2 == 0 && k >= 4 && k <= 10) ? "-%02x" : "%02x", b & 0xFF);
    return say(to, length, uuid);
}
int nvmlDeviceGetPciInfo_v3(void *handle, Pci *to) { GPU(handle); return pci(to, 0x1A + i), OK; }
int nvmlDeviceGetMemoryInfo(void *handle, u64 *to) {
    GPU(handle);
    return to[0] = to[1] = number("STANDIN_MEMORY", i, 1 << 30), to[2] = 0, OK;
}
int nvmlDeviceGetBAR1MemoryInfo(void *handle, u64 *to) {
    GPU(handle);
    return to[0] = to[1] = number("STANDIN_BAR1", i, number("STANDIN_MEMORY", i, 1 << 30)), to[2] = 0, OK;
}
int nvmlDeviceGetEccMode(void *handle, u32 *now, u32 *later) { GPU(handle); return *now = *later = number("STANDIN_ECC", i, 1), OK; }
int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int since, u64 *count) {
    GPU(handle);
    return *count = kind == 1 ? number("STANDIN_ECC_ERRORS", i, 0) : 0, number("STANDIN_ECC", i, 1) ? OK : UNSUPPORTED;
}
int nvmlDeviceGetPersistenceMode(void *handle, u32 *on) { GPU(handle); return *on = number("STANDIN_PERSISTENCE", i, 1), OK; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    GPU(handle);
    *major = number("STANDIN_CC", i, 9), *minor = 0;
    return *major ? OK : UNSUPPORTED;
}
int nvmlDeviceGetNvLinkState(void *handle, u32 link, u32 *on) {
    GPU(handle);
    u64 up = number("STANDIN_NVLINKS", i, 0);
    *on = link < up;
    return link < up + number("STANDIN_DOWN", i, 0) ? OK : UNSUPPORTED;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, u32 link, Pci *to) {
    GPU(handle);
    if (link >= number("STANDIN_NVLINKS", i, 0)) return INVALID;
    return pci(to, 0x1A + (i + 1) % gpus()), OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo(void *handle, u32 link, Pci *to) { return nvmlDeviceGetNvLinkRemotePciInfo_v2(handle, link, to); }
int nvmlDeviceGetMigMode(void *handle, u32 *now, u32 *later) { GPU(handle); return *now = *later = number("STANDIN_MIG", i, 0), OK; }
int nvmlDeviceGetMaxMigDeviceCount(void *handle, u32 *count) { GPU(handle); return *count = 7, OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, u32 which, void **part) {
    GPU(handle);
    *part = (void *)(1000L + which);
    return which < number("STANDIN_INSTANCES", i, 1) ? OK : 6;                  // 6: not found
}
int nvmlDeviceGetP2PStatus(void *handle, void *other, int what, int *status) {
    GPU(handle);
    bool parts = number("STANDIN_MIG", i, 0) || number("STANDIN_MIG", index_of(other), 0);
    return *status = parts ? 5 : number("STANDIN_P2P", i, 0), OK;                // 5: not supported
}
int nvmlDeviceGetGpuFabricInfoV(void *handle, void *to) { return UNSUPPORTED; }
typedef struct { unsigned char cluster[16]; int status; u32 clique, state; } Fabric;
int nvmlDeviceGetGpuFabricInfo(void *handle, Fabric *to) {
    GPU(handle);
    return *to = (Fabric){{0}, number("STANDIN_FABRIC_STATUS", i, OK), 0, number("STANDIN_FABRIC", i, 3)}, OK;
}
int nvmlDeviceGetRemappedRows(void *handle, u32 *correctable, u32 *uncorrectable, u32 *pending, u32 *failed) {
    GPU(handle);
    u64 state = number("STANDIN_REMAP", i, 0);
    return *correctable = *uncorrectable = 0, *pending = state == 1, *failed = state == 2, OK;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, u64 *reasons) { GPU(handle); return *reasons = number("STANDIN_CLOCKS", i, 1), OK; }
int nvmlDeviceGetComputeMode(void *handle, u32 *mode) { GPU(handle); return *mode = number("STANDIN_COMPUTE_MODE", i, 0), OK; }
int nvmlSystemGetConfComputeState(u32 *state) { return state[0] = state[2] = 0, state[1] = number("STANDIN_CONFIDENTIAL", 0, 0), OK; }
int nvmlDeviceGetFieldValues(void *handle, int count, Field *fields) {
    GPU(handle);
    for (Field *each = fields; each < fields + count; each++) {
        u64 rate = number("STANDIN_LINK_RATE", i, 0);
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        bool counts = (each->field == 138 || each->field == 139) && each->scope < number("STANDIN_NVLINKS", i, 0);
        each->code = each->field == 91 || counts ? OK : UNSUPPORTED; // NVML_FI_DEV_NVLINK_LINK_COUNT
        if (counts) each->type = 3, each->value.l = now.tv_sec * rate; // NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _RX
        else if (!each->code) each->type = 1, each->value.u = number("STANDIN_NVLINKS", i, 0);
    }
    return OK;
}
