// SPDX-License-Identifier: Apache-2.0
// A stand-in for NVML (libnvidia-ml.so.1), for tests on machines without a GPU: two GPUs, of which the second one cannot
// be read by the first and has errors, a link that is down and a small BAR1. Names and structures are those of NVML's header.
#include <stdio.h>
#include <string.h>

typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
typedef struct {
    unsigned long long total, free, used;
} amounts;

static int gpus[2] = {0, 1};

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned int flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned int size) { return snprintf(text, size, "570.133.20"), 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 12080, 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { return *count = 2, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, int **gpu) { return *gpu = &gpus[index], 0; }
int nvmlDeviceGetName(int *gpu, char *text, unsigned int size) { return snprintf(text, size, "NVIDIA H100 80GB HBM3"), 0; }
int nvmlDeviceGetPciInfo_v3(int *gpu, nvmlPciInfo_t *pci) {
    memset(pci, 0, sizeof *pci);
    return snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", 0x53 + *gpu), 0;
}
int nvmlDeviceGetMemoryInfo(int *gpu, amounts *memory) { return memory->total = 80ULL << 30, 0; }
int nvmlDeviceGetBAR1MemoryInfo(int *gpu, amounts *bar1) { return bar1->total = *gpu ? 256ULL << 20 : 128ULL << 30, 0; }
int nvmlDeviceGetEccMode(int *gpu, unsigned int *now, unsigned int *later) { return *now = *later = 1, 0; }
int nvmlDeviceGetPersistenceMode(int *gpu, unsigned int *on) { return *on = !*gpu, 0; }
int nvmlDeviceGetTotalEccErrors(int *gpu, int kind, int since, unsigned long long *count) {
    return *count = kind == 1 && *gpu ? 2 : 0, 0;
}
int nvmlDeviceGetCudaComputeCapability(int *gpu, int *major, int *minor) {
    return *gpu ? 3 : (*major = 9, *minor = 0, 0); // NVML_ERROR_NOT_SUPPORTED of the second GPU
}
int nvmlDeviceGetNvLinkState(int *gpu, unsigned int link, unsigned int *up) {
    return link < 18 ? (*up = link || !*gpu, 0) : 3; // NVML_ERROR_NOT_SUPPORTED
}
int nvmlDeviceGetP2PStatus(int *one, int *other, int caps, int *status) { return *status = *one ? 0 : 1, 0; }
const char *nvmlErrorString(int code) { return "not supported"; }
