// SPDX-License-Identifier: Apache-2.0
// A library for LD_PRELOAD that spoils some of the copies that UCX makes between two processes by cma. All others are
// real. BAD_COPIES_FLIP=n: every n-th copy of 4 KiB and more changes a byte. BAD_COPIES_STALE=n: every n-th one
// copies nothing, but says that it has.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

typedef ssize_t Copy(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long, unsigned long);
enum { LEAST = 4096 };
static long copies;

static bool every(const char *variable) {
    const char *value = getenv(variable);
    return value && atol(value) > 0 && copies % atol(value) == 0;
}
static size_t bytes_of(const struct iovec *parts, unsigned long count) {
    size_t size = 0;
    for (unsigned long i = 0; i < count; i++) size += parts[i].iov_len;
    return size;
}
static ssize_t copy(const char *name, pid_t pid, const struct iovec *local, unsigned long locals,
                    const struct iovec *remote, unsigned long remotes, unsigned long flags) {
    Copy *real = (Copy *)dlsym(RTLD_NEXT, name);
    size_t size = bytes_of(local, locals);
    if (size < LEAST) return real(pid, local, locals, remote, remotes, flags);
    __sync_add_and_fetch(&copies, 1);
    if (every("BAD_COPIES_STALE")) return size;
    ssize_t done = real(pid, local, locals, remote, remotes, flags);
    if (done <= 0 || !every("BAD_COPIES_FLIP")) return done;
    char byte;                                                             // of the destination, wherever it is
    struct iovec here = {&byte, 1}, there = {(char *)remote[0].iov_base + done / 2, 1};
    if (!strcmp(name, "process_vm_readv")) {
        ((char *)local[0].iov_base)[done / 2] ^= 1;
    } else {
        Copy *look = (Copy *)dlsym(RTLD_NEXT, "process_vm_readv");
        if (look(pid, &here, 1, &there, 1, 0) == 1) byte ^= 1, real(pid, &here, 1, &there, 1, 0);
    }
    return done;
}
ssize_t process_vm_readv(pid_t pid, const struct iovec *local, unsigned long locals, const struct iovec *remote,
                         unsigned long remotes, unsigned long flags) {
    return copy("process_vm_readv", pid, local, locals, remote, remotes, flags);
}
ssize_t process_vm_writev(pid_t pid, const struct iovec *local, unsigned long locals, const struct iovec *remote,
                          unsigned long remotes, unsigned long flags) {
    return copy("process_vm_writev", pid, local, locals, remote, remotes, flags);
}
