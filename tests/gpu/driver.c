// SPDX-License-Identifier: Apache-2.0
// A stand-in for libcuda.so.1, for tests on machines without a GPU: its "GPUs" are host memory, and its kernels are
// kernels.cu, compiled for this processor. STANDIN_GPUS is how many there are, STANDIN_LOG a file for what they gave. It is strict where a real driver would be: memory belongs to the context that
// is current, a copy must lie inside one allocation, and what is freed must have been allocated.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int u32;
typedef struct { u32 x, y, z; } dim3;

static dim3 gridDim, blockDim, blockIdx, threadIdx;
static void atomicAdd(unsigned long long *at, unsigned long long value) { *at += value; }
static void atomicMin(unsigned long long *at, unsigned long long value) { *at = value < *at ? value : *at; }
#include KERNELS

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_STARTED = 3, NO_DEVICE = 100, BAD_DEVICE = 101, NO_IMAGE = 200,
       NO_CONTEXT = 201, NOT_FOUND = 500, BAD_ADDRESS = 700 };

static const u64 MEMORY = 1ull << 30;
static int devices = -1;
static long current = 0, retained[16];
static struct { char *at; u64 size; long context; } rooms[256];
static u64 taken;

static void tell(const char *what, u64 much) {
    const char *path = getenv("STANDIN_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%s %llu\n", what, much);
        fclose(log);
    }
}

static int room(u64 address, u64 size) {
    for (int i = 0; i < 256; i++)
        if (rooms[i].at && (u64)rooms[i].at <= address && address + size <= (u64)rooms[i].at + rooms[i].size)
            return i;
    return -1;
}

int cuInit(u32 flags) {
    const char *count = getenv("STANDIN_GPUS");
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    devices = visible && !*visible ? 0 : count ? atoi(count) : 2;
    return flags ? INVALID : devices ? OK : NO_DEVICE;
}

int cuDriverGetVersion(int *version) { *version = 13000; return OK; }

int cuGetErrorName(int code, const char **name) {
    *name = code == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : code == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == NO_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : code == BAD_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : code ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_SUCCESS";
    return OK;
}

int cuGetErrorString(int code, const char **text) { *text = code ? "made by a stand-in" : "no error"; return OK; }

int cuDeviceGetCount(int *count) { *count = devices; return devices < 0 ? NOT_STARTED : OK; }

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal < 0 || ordinal >= devices ? BAD_DEVICE : OK;
}

int cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, length, "Stand-in %d", device);
    return OK;
}

int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 0x10 + device, 16); return OK; }

int cuDeviceGetPCIBusId(char *id, int length, int device) {
    snprintf(id, length, "0000:%02X:00.0", 0x1A + device);
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(long)(device + 1);
    tell("retain", ++retained[device]);
    return OK;
}

int cuCtxSetCurrent(void *context) { current = (long)context; return OK; }
int cuCtxSynchronize(void) { return current ? OK : NO_CONTEXT; }

int cuMemAlloc_v2(u64 *address, size_t size) {
    if (!current) return NO_CONTEXT;
    if (!size) return INVALID;
    if (taken + size > MEMORY) return NO_MEMORY;
    for (int i = 0; i < 256; i++)
        if (!rooms[i].at) {
            rooms[i].at = memset(aligned_alloc(256, (size + 255) / 256 * 256), 0xAA, size);
            rooms[i].size = size;
            rooms[i].context = current;
            *address = (u64)rooms[i].at;
            taken += size;
            tell("allocate", size);
            return OK;
        }
    return NO_MEMORY;
}

int cuMemFree_v2(u64 address) {
    int i = room(address, 0);
    if (i < 0 || (u64)rooms[i].at != address) return INVALID;
    if (rooms[i].context != current) return NO_CONTEXT;
    free(rooms[i].at);
    taken -= rooms[i].size;
    tell("free", rooms[i].size);
    rooms[i].at = NULL;
    return OK;
}

int cuMemsetD8_v2(u64 to, unsigned char value, size_t size) {
    if (room(to, size) < 0) return BAD_ADDRESS;
    memset((void *)to, value, size);
    return OK;
}

int cuMemcpyHtoD_v2(u64 to, const void *from, size_t size) {
    if (room(to, size) < 0 || room((u64)from, size) >= 0) return INVALID;
    memcpy((void *)to, from, size);
    return current ? OK : NO_CONTEXT;
}

int cuMemcpyDtoH_v2(void *to, u64 from, size_t size) {
    if (room(from, size) < 0 || room((u64)to, size) >= 0) return INVALID;
    memcpy(to, (void *)from, size);
    return current ? OK : NO_CONTEXT;
}

int cuPointerGetAttribute(void *data, int attribute, u64 address) {
    int i = room(address, 0);
    if (attribute != 9 || i < 0) return INVALID; // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    *(int *)data = rooms[i].context - 1;
    return OK;
}

int cuModuleLoadData(void **module, const char *image) {
    *module = (void *)image;
    return current && strstr(image, ".entry nixl_fill(") && strstr(image, ".entry nixl_compare(") ? OK : NO_IMAGE;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = !strcmp(name, "nixl_fill") ? (void *)nixl_fill : !strcmp(name, "nixl_compare") ? (void *)nixl_compare : NULL;
    return *function ? OK : NOT_FOUND;
}

int cuLaunchKernel(void *function, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared, void *stream,
                   void **arguments, void **extra) {
    u64 a[5];
    if (!current) return NO_CONTEXT;
    if (extra || stream || shared || gy != 1 || gz != 1 || by != 1 || bz != 1 || !gx || !bx || bx > 1024) return INVALID;
    for (int i = 0; i < 5; i++) a[i] = *(u64 *)arguments[i];
    u64 tile = 8 * ((a[1] + 7) / 8 < TILE ? (a[1] + 7) / 8 : TILE);
    int here = room(a[0], a[1]), there = room(a[2], tile);
    if (here < 0 || there < 0 || rooms[here].context != current || rooms[there].context != current) return BAD_ADDRESS;
    gridDim = (dim3){gx, 1, 1}, blockDim = (dim3){bx, 1, 1};
    for (u32 block = 0; block < gx; block++)
        for (u32 thread = 0; thread < bx; thread++) {
            blockIdx = (dim3){block, 0, 0}, threadIdx = (dim3){thread, 0, 0};
            if (function == (void *)nixl_fill) nixl_fill((u8 *)a[0], a[1], (u64 *)a[2], a[3], a[4]);
            else if (room(a[4], 16) < 0) return BAD_ADDRESS;
            else nixl_compare((u8 *)a[0], a[1], (u64 *)a[2], a[3], (u64 *)a[4]);
        }
    return OK;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, u64 flags, int *status) {
    char newer[128];
    void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    snprintf(newer, sizeof newer, "%s_v2", name);
    *function = dlsym(self, newer);
    if (!*function) *function = dlsym(self, name);
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}
