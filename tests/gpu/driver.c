// SPDX-License-Identifier: Apache-2.0
// A stand-in for libcuda.so.1 that UCX takes for the driver, for tests on machines without a GPU. Its "GPUs" are host
// memory, and its kernels are kernels.cu, compiled for this processor. It is strict where a real driver would be:
// - Each allocation is a memfd that is mapped twice. Its device address has no access, so that a host access to it is a
//   SIGSEGV or EFAULT, as with a GPU. Only this file uses the other mapping.
// - Contexts are per thread, memory belongs to a context, a copy must lie inside one allocation.
// - A copy on a stream is made when somebody waits for it or asks for its event, not when it is issued.
// A variable with a list, such as STANDIN_MEMORY=1073741824,65536, has a value for each GPU, by its place on the bus; the
// last one is for all that follow. Any function that has a device or a context returns what STANDIN_FUNCTION says, such as
// STANDIN_cuLaunchKernel=0,719, unless that is 0.
// Variables: STANDIN_GPUS (how many; 2), STANDIN_NAME (each GPU's name), STANDIN_MEMORY (bytes of each; 1 GiB; 0: not even for a context), STANDIN_CUDA (the CUDA version; 12090),
// STANDIN_LOG (a file for what was done), STANDIN_DMABUF (memory can be exported as DMA-BUF). Faults: STANDIN_NO_IPC (memory cannot be shared), STANDIN_CORRUPT (every
// n-th copy of 4 KiB and more on a stream changes a byte), STANDIN_STALE (every n-th one copies nothing), STANDIN_SLOW (milliseconds that each copy on a stream takes),
// STANDIN_BUSY (milliseconds that each kernel takes, as beside another process), STANDIN_LOST (a file: once it exists, every GPU is lost),
// STANDIN_INIT (the result of cuInit; 0), STANDIN_CUDA_HANGS (cuInit never returns), STANDIN_HIDES (the last GPU is not shown).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef unsigned int u32;
typedef struct { u32 x, y, z; } dim3;
static dim3 gridDim, blockDim, blockIdx, threadIdx;
static void atomicAdd(unsigned long long *at, unsigned long long value) { *at += value; }
static void atomicMin(unsigned long long *at, unsigned long long value) { *at = value < *at ? value : *at; }
#include KERNELS

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_STARTED = 3, NO_DEVICE = 100, BAD_DEVICE = 101, NO_IMAGE = 200,
       NO_CONTEXT = 201, BAD_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, BAD_ADDRESS = 700,
       REGISTERED = 712, NOT_REGISTERED = 713, LOST = 719, UNSUPPORTED = 801 };
enum { MOST = 16, ROOMS = 4096, DEEP = 64 };
#define PAGE 4096ull

typedef struct { int device; u64 id; u32 flags; } Context;                 // id 0: destroyed
typedef struct Room { u64 at, size, number; char *inside; int fd, device, opened; u64 context; } Room;
typedef struct Event Event;
typedef struct Op { struct Op *next; char *to; const char *from; size_t size; Event *event; } Op;
typedef struct Stream { struct Stream *next; u64 context; Op *first, **last; } Stream;
struct Event { u64 context; Stream *stream; bool pending; };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static void unlock(int *_) { (void)_; pthread_mutex_unlock(&mutex); }
#define LOCKED __attribute__((cleanup(unlock), unused)) int locked_ = pthread_mutex_lock(&mutex)

static int devices = -1, physical[MOST];
static Context primary[MOST];
static long retained[MOST];
static u64 taken[MOST], numbers, contexts;
static Room rooms[ROOMS];
static struct { u64 at, size; } pinned[ROOMS];
static Stream *streams;
static __thread Context *stack[DEEP];
static __thread int depth = 1;                                             // stack[0] is what cuCtxSetCurrent sets

static u64 number(const char *name, int gpu, u64 usual) {                  // the value for a GPU: the last one is for all that follow
    const char *list = getenv(name);
    if (!list) return usual;
    for (const char *next; gpu-- > 0 && (next = strchr(list, ',')); list = next + 1);
    return strtoull(list, NULL, 10);
}
static int answer(const char *call, int device) {                          // STANDIN_cuMemAlloc_v2=0,2
    char name[80];
    snprintf(name, sizeof name, "STANDIN_%s", call);
    return number(name, physical[device], OK);
}
static u64 capacity(int device) { return number("STANDIN_MEMORY", physical[device], 1ull << 30); }
#define ANSWER(device) if (answer(__func__, device)) return answer(__func__, device)
static Context *current(void) { Context *c = stack[depth - 1]; return c && c->id ? c : NULL; }

static void tell(const char *what, u64 much) {
    static int log = -2;                                                   // -1: there is none
    const char *path = getenv("STANDIN_LOG");
    if (log == -2) log = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
    if (log >= 0) dprintf(log, "%s %llu\n", what, much);
}

static Room *room(u64 address, u64 size) {
    for (Room *r = rooms; r < rooms + ROOMS; r++)
        if (r->at && r->at <= address && address + size <= r->at + r->size && address < r->at + r->size) return r;
    return NULL;
}
static bool touches(u64 address, u64 size) {
    for (Room *r = rooms; r < rooms + ROOMS; r++)
        if (r->at && address < r->at + r->size && r->at < address + size) return true;
    return false;
}
static bool is_pinned(u64 address) {
    for (int i = 0; i < ROOMS; i++)
        if (pinned[i].size && pinned[i].at <= address && address < pinned[i].at + pinned[i].size) return true;
    return false;
}
static char *inside(u64 address, u64 size) { Room *r = room(address, size); return r ? r->inside + (address - r->at) : NULL; }

static int place(Room *r, int fd, u64 size, int device, u64 context) {     // map a memfd twice
    u64 whole = (size + PAGE - 1) / PAGE * PAGE;
    char *in = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *out = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (in == MAP_FAILED || out == MAP_FAILED) return NO_MEMORY;
    *r = (Room){(u64)out, size, ++numbers, in, fd, device, 0, context};
    return OK;
}
static void leave(Room *r) {
    u64 whole = (r->size + PAGE - 1) / PAGE * PAGE;
    munmap(r->inside, whole), munmap((void *)r->at, whole), close(r->fd);
    r->at = 0;
}
static Room *vacant(void) { for (Room *r = rooms; r < rooms + ROOMS; r++) if (!r->at) return r; return NULL; }

static bool lost(void) { const char *file = getenv("STANDIN_LOST"); return file && !access(file, F_OK); }

static bool every(long number, const char *variable) {                    // of as many as the variable says
    const char *value = getenv(variable);
    return value && atol(value) > 0 && number % atol(value) == 0;
}
static void move(char *to, const char *from, size_t size) {               // for a stream
    const char *slow = getenv("STANDIN_SLOW");
    long ms = slow ? atol(slow) : 0;
    if (ms) nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
    static long copies;
    copies += size >= 4096;
    if (size < 4096 || !every(copies, "STANDIN_STALE")) memcpy(to, from, size);
    if (size >= 4096 && every(copies, "STANDIN_CORRUPT")) to[size / 2] += 1;
}
static void drain(Stream *s) {
    while (s->first) {
        Op *op = s->first;
        if (op->event) op->event->pending = false; else move(op->to, op->from, op->size);
        s->first = op->next;
        free(op);
    }
    s->last = &s->first;
}
static void drain_all(void) { for (Stream *s = streams; s; s = s->next) drain(s); }
static void issue(Stream *s, Op op) {
    Op *made = malloc(sizeof op);
    *made = op, made->next = NULL;
    *s->last = made, s->last = &made->next;
}
static Stream *stream_of(void *handle) { for (Stream *s = streams; s; s = s->next) if (s == handle) return s; return NULL; }

// Start, versions, devices

static u32 byte_of(int gpu) { return 0x10 + gpu; }                         // each byte of its UUID
static int by_uuid(const char *entry, size_t length, int all) {            // the only GPU with this beginning of a UUID
    int match = -1;
    for (int gpu = 0; gpu < all; gpu++) {
        char uuid[48] = "GPU";
        for (int k = 0; k < 16; k++)
            sprintf(uuid + strlen(uuid), k == 0 || (k % 2 == 0 && k >= 4 && k <= 10) ? "-%02x" : "%02x", byte_of(gpu));
        if (length > 4 && !strncasecmp(uuid, entry, length)) { if (match >= 0) return -1; match = gpu; }
    }
    return match;
}
int cuInit(u32 flags) {
    LOCKED;
    const char *count = getenv("STANDIN_GPUS"), *visible = getenv("CUDA_VISIBLE_DEVICES"), *code = getenv("STANDIN_INIT");
    int all = count ? atoi(count) : 2, shown = 0;
    if (getenv("STANDIN_CUDA_HANGS")) for (;;) pause();
    if (code && atoi(code)) return atoi(code);
    all = all < MOST ? all : MOST;
    if (!visible) for (; shown < all; shown++) physical[shown] = shown;
    else for (const char *next; *visible && shown < MOST; visible = *next ? next + 1 : next) {
        char *end;
        next = visible + strcspn(visible, ",");
        long one = strtol(visible, &end, 10);
        if (!strncmp(visible, "GPU-", 4)) one = by_uuid(visible, next - visible, all);
        else if (end == visible) break;
        if (one < 0 || one >= all) break;
        for (int i = 0; i < shown; i++) if (physical[i] == one) return BAD_DEVICE;   // as driver 580 answers
        physical[shown++] = one;
    }
    if (getenv("STANDIN_HIDES") && shown) shown--;
    devices = shown ? shown : -1;                                          // without a GPU it has not started
    return flags ? INVALID : shown ? OK : NO_DEVICE;
}
int cuDriverGetVersion(int *version) { const char *told = getenv("STANDIN_CUDA"); *version = told ? atoi(told) : 12090; return OK; } // nixl chooses nixl_cu12 or nixl_cu13 by it
int cuGetErrorName(int code, const char **name) {
    *name = code == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : code == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == NO_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : code == BAD_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : code == LOST ? "CUDA_ERROR_LAUNCH_FAILED" : code == UNSUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED" : code ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_SUCCESS";
    return OK;
}
int cuGetErrorString(int code, const char **text) {
    static __thread char told[64];
    if (!code) *text = "no error"; else snprintf(told, sizeof told, "stand-in error %d", code), *text = told;
    return OK;
}
int cuDeviceGetCount(int *count) { *count = devices; return devices < 0 ? NOT_STARTED : OK; }
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return devices < 0 ? NOT_STARTED : ordinal < 0 || ordinal >= devices ? BAD_DEVICE : OK;
}
#define DEVICE if (device < 0 || device >= devices) return BAD_DEVICE; ANSWER(device)
int cuDeviceGetName(char *name, int length, int device) {
    DEVICE;
    const char *list = getenv("STANDIN_NAME");
    for (int i = physical[device]; list && i > 0 && strchr(list, ','); i--) list = strchr(list, ',') + 1;
    if (list) snprintf(name, length, "%.*s", (int)strcspn(list, ","), list); else snprintf(name, length, "Stand-in %d", physical[device]);
    return OK;
}
int cuDeviceGetUuid(char *uuid, int device) { DEVICE; memset(uuid, byte_of(physical[device]), 16); return OK; }
int cuDeviceGetUuid_v2(char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
int cuDeviceGetPCIBusId(char *id, int length, int device) {
    DEVICE; snprintf(id, length, "0000:%02X:00.0", 0x1A + physical[device]); return OK;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { DEVICE; *bytes = capacity(device); return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    DEVICE;
    switch (attribute) {
    case 16: *value = 132; break;                                          // multiprocessors
    case 33: *value = 0x1A + physical[device]; break;                      // PCI bus
    case 34: case 50: *value = 0; break;                                   // PCI device, domain
    case 41: *value = 1; break;                                            // unified addressing
    case 75: *value = getenv("STANDIN_CC") ? atoi(getenv("STANDIN_CC")) : 9; break;
    case 124: *value = getenv("STANDIN_DMABUF") != NULL; break;            // DMA-BUF
    default: *value = 0;                                                   // all else: not supported
    }
    return OK;
}
int cuDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer; return OK; }

// Contexts

int cuDevicePrimaryCtxRetain(Context **context, int device) {
    DEVICE; LOCKED;
    if (!capacity(device)) return NO_MEMORY;
    if (!retained[device]++) primary[device] = (Context){device, ++contexts, 0};
    *context = &primary[device];
    tell("retain", retained[device]);
    return OK;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    DEVICE; LOCKED;
    if (!retained[device]) return NO_CONTEXT;
    tell("release", retained[device]);
    if (--retained[device]) return OK;
    drain_all();
    for (Room *r = rooms; r < rooms + ROOMS; r++)
        if (r->at && r->context == primary[device].id) taken[r->device] -= r->opened ? 0 : r->size, leave(r);
    primary[device].id = 0;
    tell("destroy", device);
    return OK;
}
int cuDevicePrimaryCtxGetState(int device, u32 *flags, int *active) {
    DEVICE; *flags = primary[device].flags; *active = retained[device] > 0; return OK;
}
int cuCtxSetCurrent(Context *context) { if (context && !context->id) return NO_CONTEXT; stack[depth - 1] = context; return OK; }
int cuCtxGetCurrent(Context **context) { *context = current(); return devices < 0 ? NOT_STARTED : OK; }
int cuCtxPushCurrent_v2(Context *context) {
    if (!context || !context->id) return NO_CONTEXT;
    if (depth == DEEP) return INVALID;
    if (depth == 1 && !stack[0]) stack[0] = NULL;
    stack[depth++] = context;
    return OK;
}
int cuCtxPopCurrent_v2(Context **context) {
    if (!current()) return NO_CONTEXT;
    if (context) *context = stack[depth - 1];
    if (depth > 1) depth--; else stack[0] = NULL;
    return OK;
}
int cuCtxGetDevice(int *device) { Context *c = current(); if (!c) return NO_CONTEXT; *device = c->device; return OK; }
int cuCtxGetFlags(u32 *flags) { Context *c = current(); if (!c) return NO_CONTEXT; *flags = c->flags; return OK; }
int cuCtxSetFlags(u32 flags) { Context *c = current(); if (!c) return NO_CONTEXT; c->flags = flags; return OK; }
int cuCtxGetId(Context *context, u64 *id) {
    if (!context) context = current();
    if (!context || !context->id) return NO_CONTEXT;
    *id = context->id;
    return OK;
}
int cuCtxSynchronize(void) {
    Context *c = current();
    if (!c) return NO_CONTEXT;
    ANSWER(c->device);
    LOCKED;
    for (Stream *s = streams; s; s = s->next) if (s->context == c->id) drain(s);
    return OK;
}

// Memory

int cuMemAlloc_v2(u64 *address, size_t size) {
    Context *c = current();
    if (!c) return NO_CONTEXT;
    if (lost()) return LOST;
    if (!size) return INVALID;
    ANSWER(c->device);
    LOCKED;
    if (taken[c->device] + size > capacity(c->device)) return NO_MEMORY;
    Room *r = vacant();
    char name[32];
    snprintf(name, sizeof name, "standin-gpu-%llu", numbers + 1);
    int fd = r ? memfd_create(name, MFD_CLOEXEC) : -1;
    if (fd < 0 || ftruncate(fd, (size + PAGE - 1) / PAGE * PAGE) || place(r, fd, size, c->device, c->id)) return NO_MEMORY;
    memset(r->inside, 0xAA, size);
    *address = r->at, taken[c->device] += size;
    tell("allocate", size);
    return OK;
}
int cuMemFree_v2(u64 address) {
    LOCKED;
    Room *r = room(address, 0);
    if (!r || r->at != address || r->opened) return INVALID;
    if (!current()) return NO_CONTEXT;
    drain_all();
    taken[r->device] -= r->size;
    tell("free", r->size);
    leave(r);
    return OK;
}
int cuMemGetInfo_v2(size_t *left, size_t *all) {
    Context *c = current();
    if (!c) return NO_CONTEXT;
    ANSWER(c->device);
    *all = capacity(c->device), *left = *all - taken[c->device];
    return OK;
}
int cuMemGetAddressRange_v2(u64 *base, size_t *size, u64 address) {
    LOCKED;
    Room *r = room(address, 0);
    if (!current()) return NO_CONTEXT;
    if (!r) return NOT_FOUND;
    if (base) *base = r->at;
    if (size) *size = r->size;
    return OK;
}
int cuMemHostRegister_v2(void *at, size_t size, u32 flags) {
    LOCKED;
    if (!current()) return NO_CONTEXT;
    if (!size || touches((u64)at, size)) return INVALID;
    if (is_pinned((u64)at) || is_pinned((u64)at + size - 1)) return REGISTERED;
    for (int i = 0; i < ROOMS; i++)
        if (!pinned[i].size) { pinned[i].at = (u64)at, pinned[i].size = size; tell("pin", size); return OK; }
    return NO_MEMORY;
}
int cuMemHostUnregister(void *at) {
    LOCKED;
    for (int i = 0; i < ROOMS; i++)
        if (pinned[i].size && pinned[i].at == (u64)at) { drain_all(); tell("unpin", pinned[i].size); pinned[i].size = 0; return OK; }
    return NOT_REGISTERED;
}

static int attribute(void *data, int which, u64 address) {
    Room *r = room(address, 0);
    bool host = !r && is_pinned(address);
    switch (which) {
    case 1: *(void **)data = r ? &primary[r->device] : NULL; break;        // context
    case 2: *(u32 *)data = r ? 2 : host ? 1 : 0; break;                    // memory type
    case 3: *(u64 *)data = address; break;                                 // device pointer
    case 4: *(u64 *)data = host ? address : 0; break;                      // host pointer
    case 6: *(u32 *)data = r != NULL; break;                               // synchronous operations
    case 7: *(u64 *)data = r ? r->number : 0; break;                       // buffer id
    case 8: *(u32 *)data = 0; break;                                       // managed (UCX gives 4 bytes for it)
    case 9: *(int *)data = r ? r->device : -2; break;                      // device
    case 10: *(u32 *)data = r && !getenv("STANDIN_NO_IPC"); break;         // legacy IPC (UCX gives 4 bytes)
    case 11: *(u64 *)data = r ? r->at : 0; break;
    case 12: *(u64 *)data = r ? r->size : 0; break;
    case 13: *(u32 *)data = r || host; break;                              // mapped
    case 14: *(u64 *)data = 0; break;                                      // handle types
    case 15: *(u32 *)data = r != NULL; break;                              // GPUDirect RDMA
    case 16: *(u32 *)data = r || host ? 3 : 0; break;                      // access
    case 17: *(void **)data = NULL; break;                                 // pool
    default: return INVALID;
    }
    return r || host ? OK : INVALID;
}
int cuPointerGetAttribute(void *data, int which, u64 address) {
    LOCKED;
    return devices < 0 ? NOT_STARTED : !room(address, 0) && !is_pinned(address) ? INVALID : attribute(data, which, address);
}
int cuPointerGetAttributes(u32 count, int *which, void **data, u64 address) {
    LOCKED;
    if (devices < 0) return NOT_STARTED;
    for (u32 i = 0; i < count; i++) if (data[i]) attribute(data[i], which[i], address);
    return OK;                                                             // unknown memory: zeros, and no error
}
int cuPointerSetAttribute(const void *value, int which, u64 address) { LOCKED; return which == 6 && room(address, 0) ? OK : INVALID; }

static int copy(u64 to, u64 from, size_t size, Stream *s) {
    char *in = inside(to, size), *out = inside(from, size);
    if ((!in && touches(to, size)) || (!out && touches(from, size))) return INVALID;
    bool pageable = (!in && !is_pinned(to)) || (!out && !is_pinned(from));
    Op op = {NULL, in ? in : (char *)to, out ? out : (char *)from, size, NULL};
    if (s) tell(!in ? "to-host" : !out ? "from-host" : "on-gpu", size);
    if (s && !pageable) issue(s, op);
    else if (s) drain(s), move(op.to, op.from, size);
    else memcpy(op.to, op.from, size);
    return OK;
}
#define COPY(to, from, size, stream, need) { \
    LOCKED; \
    if (!current()) return NO_CONTEXT; \
    ANSWER(current()->device); \
    if (lost()) return LOST; \
    Stream *s = (void *)(stream) == NULL ? NULL : stream_of(stream); \
    if ((stream) && !s) return BAD_HANDLE; \
    if (!(need)) return INVALID; \
    return copy((u64)(to), (u64)(from), size, s); }
int cuMemcpyHtoD_v2(u64 to, const void *from, size_t size) COPY(to, from, size, NULL, inside(to, size) && !touches((u64)from, size))
int cuMemcpyDtoH_v2(void *to, u64 from, size_t size) COPY(to, from, size, NULL, inside(from, size) && !touches((u64)to, size))
int cuMemcpyDtoD_v2(u64 to, u64 from, size_t size) COPY(to, from, size, NULL, inside(from, size) && inside(to, size))
int cuMemcpy(u64 to, u64 from, size_t size) COPY(to, from, size, NULL, true)
int cuMemcpyAsync(u64 to, u64 from, size_t size, void *stream) COPY(to, from, size, stream, true)
int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t size, void *stream) COPY(to, from, size, stream, inside(to, size))
int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t size, void *stream) COPY(to, from, size, stream, inside(from, size))
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t size, void *stream) COPY(to, from, size, stream, inside(from, size) && inside(to, size))
int cuMemsetD8_v2(u64 to, unsigned char value, size_t size) {
    LOCKED;
    char *in = inside(to, size);
    if (!current()) return NO_CONTEXT;
    if (!in) return BAD_ADDRESS;
    memset(in, value, size);
    return OK;
}

// Streams and events

int cuStreamCreate(Stream **stream, u32 flags) {
    Context *c = current();
    if (!c) return NO_CONTEXT;
    LOCKED;
    Stream *s = *stream = calloc(1, sizeof *s);
    s->context = c->id, s->last = &s->first, s->next = streams, streams = s;
    return OK;
}
int cuStreamDestroy_v2(Stream *stream) {
    LOCKED;
    for (Stream **at = &streams; *at; at = &(*at)->next)
        if (*at == stream) { drain(stream); *at = stream->next; free(stream); return OK; }
    return BAD_HANDLE;
}
int cuStreamSynchronize(void *stream) {
    LOCKED;
    if (!stream) return OK;
    Stream *s = stream_of(stream);
    if (!s) return BAD_HANDLE;
    drain(s);
    return OK;
}
int cuStreamAddCallback(Stream *stream, void (*call)(Stream *, int, void *), void *with, u32 flags) {
    { LOCKED; if (stream) drain(stream); }
    call(stream, OK, with);
    return OK;
}
int cuEventCreate(Event **event, u32 flags) {
    Context *c = current();
    if (!c) return NO_CONTEXT;
    *event = calloc(1, sizeof **event);
    (*event)->context = c->id;
    return OK;
}
int cuEventDestroy_v2(Event *event) { LOCKED; if (event->pending) drain(event->stream); free(event); return OK; }
int cuEventRecord(Event *event, Stream *stream) {
    LOCKED;
    if (stream && (!stream_of(stream) || event->context != stream->context)) return BAD_HANDLE;
    event->stream = stream, event->pending = stream != NULL;
    if (stream) issue(stream, (Op){.event = event});
    return OK;
}
int cuEventQuery(Event *event) {
    LOCKED;
    if (!event->pending) return OK;
    drain(event->stream);
    return NOT_READY;                                                      // done at the next question
}
int cuEventSynchronize(Event *event) { LOCKED; if (event->pending) drain(event->stream); return OK; }

// Memory of other processes

typedef struct { u64 magic, number, size; int pid, fd, device; char rest[28]; } Handle;
_Static_assert(sizeof(Handle) == 64, "CUipcMemHandle");
int cuIpcGetMemHandle(Handle *handle, u64 address) {
    LOCKED;
    Room *r = room(address, 0);
    if (getenv("STANDIN_NO_IPC")) return UNSUPPORTED;
    if (!r || r->opened) return INVALID;
    *handle = (Handle){0x47505553u, r->number, r->size, getpid(), r->fd, physical[r->device], ""};
    tell("export", r->size);
    return OK;
}
int cuIpcOpenMemHandle_v2(u64 *address, Handle handle, u32 flags) {
    Context *c = current();
    if (!c) return NO_CONTEXT;
    if (handle.magic != 0x47505553u || handle.pid == getpid()) return NO_CONTEXT;
    LOCKED;
    char path[64], name[64] = "", wanted[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    snprintf(wanted, sizeof wanted, "/memfd:standin-gpu-%llu (deleted)", handle.number);
    if (readlink(path, name, sizeof name - 1) < 0 || strcmp(name, wanted)) return INVALID; // freed, or dead
    Room *r = vacant();
    int fd = r ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0 || place(r, fd, handle.size, c->device, c->id)) return INVALID;
    r->opened = 1, *address = r->at;
    tell("open", r->size);
    return OK;
}
int cuIpcCloseMemHandle(u64 address) {
    LOCKED;
    Room *r = room(address, 0);
    if (!r || !r->opened) return INVALID;
    drain_all();
    tell("close", r->size);
    leave(r);
    return OK;
}

int cuMemGetHandleForAddressRange(int *fd, u64 address, size_t size, int type, u64 flags) {
    LOCKED;
    Room *r = room(address, size);
    if (!getenv("STANDIN_DMABUF")) return UNSUPPORTED;
    if (!r || type != 1) return INVALID;                                   // 1: a file descriptor of a DMA-BUF
    tell("dma-buf", size);
    *fd = fcntl(r->fd, F_DUPFD_CLOEXEC, 0);
    return *fd < 0 ? INVALID : OK;
}

// Kernels

int cuModuleLoadData(void **module, const char *image) {
    *module = (void *)image;
    if (current()) ANSWER(current()->device);
    return current() && strstr(image, ".entry nixl_fill(") && strstr(image, ".entry nixl_compare(") ? OK : NO_IMAGE;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = !strcmp(name, "nixl_fill") ? (void *)nixl_fill : !strcmp(name, "nixl_compare") ? (void *)nixl_compare : NULL;
    return *function ? OK : NOT_FOUND;
}
int cuLaunchKernel(void *function, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared, void *stream,
                   void **arguments, void **extra) {
    u64 a[5];
    Context *c = current();
    if (!c) return NO_CONTEXT;
    ANSWER(c->device);
    if (lost()) return LOST;
    const char *busy = getenv("STANDIN_BUSY");
    if (busy) nanosleep(&(struct timespec){0, atol(busy) * 1000000}, NULL);
    if (extra || stream || shared || gy != 1 || gz != 1 || by != 1 || bz != 1 || !gx || !bx || bx > 1024) return INVALID;
    LOCKED;
    for (int i = 0; i < 5; i++) a[i] = *(u64 *)arguments[i];
    u64 tile = 8 * ((a[1] + 7) / 8 < TILE ? (a[1] + 7) / 8 : TILE);
    Room *here = room(a[0], a[1]), *there = room(a[2], tile);
    if (!here || !there || here->device != c->device || there->device != c->device) return BAD_ADDRESS;
    u8 *at = (u8 *)inside(a[0], a[1]);
    u64 *tiles = (u64 *)inside(a[2], tile), *found = (u64 *)inside(a[4], 16);
    if (function != (void *)nixl_fill && !found) return BAD_ADDRESS;
    gridDim = (dim3){gx, 1, 1}, blockDim = (dim3){bx, 1, 1};
    for (u32 block = 0; block < gx; block++)
        for (u32 thread = 0; thread < bx; thread++) {
            blockIdx = (dim3){block, 0, 0}, threadIdx = (dim3){thread, 0, 0};
            if (function == (void *)nixl_fill) nixl_fill(at, a[1], tiles, a[3], a[4]);
            else nixl_compare(at, a[1], tiles, a[3], found);
        }
    return OK;
}

// What it does not have

int cuMemRetainAllocationHandle(u64 *handle, void *address) { return INVALID; } // no memory is of the VMM functions
#define NONE(name) int name(void) { return UNSUPPORTED; }
NONE(cuMemAddressFree) NONE(cuMemAddressReserve) NONE(cuMemAllocManaged) NONE(cuMemCreate) NONE(cuMemExportToShareableHandle)
NONE(cuMemGetAllocationGranularity) NONE(cuMemGetAllocationPropertiesFromHandle) NONE(cuMemImportFromShareableHandle)
NONE(cuMemMap) NONE(cuMemPoolDestroy) NONE(cuMemPoolExportPointer) NONE(cuMemPoolExportToShareableHandle)
NONE(cuMemPoolImportFromShareableHandle) NONE(cuMemPoolImportPointer) NONE(cuMemPoolSetAccess) NONE(cuMemRangeGetAttribute)
NONE(cuMemRelease) NONE(cuMemSetAccess) NONE(cuMemUnmap) NONE(cuMemFreeAsync) NONE(cuMemAllocAsync)

int cuGetProcAddress_v2(const char *name, void **function, int version, u64 flags, int *status) {
    char newer[128];
    void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    snprintf(newer, sizeof newer, "%s_v2", name);
    *function = dlsym(self, newer);
    if (!*function) *function = dlsym(self, name);
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}
