"""Faults for the engine's writes: a function in place of pwrite, and a library to preload."""

import ctypes
import errno
import os
import subprocess
from dataclasses import replace

from fpformat_io.write import volume, workers

_KIND = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int64,
    use_errno=True,
)


def real_pwrite(descriptor, address, nbytes, offset):
    """Write as the C library does; the callback's errno is set on an error."""
    try:
        return os.pwrite(descriptor, (ctypes.c_char * nbytes).from_address(address), offset)
    except OSError as error:
        ctypes.set_errno(error.errno)
        return -1


def failing(code):
    """Set errno and return what a failed call returns."""
    ctypes.set_errno(code)
    return -1


def replace_pwrite(monkeypatch, function):
    """Let kernels call a Python function instead of ``pwrite``."""
    callback = _KIND(function)
    calls = replace(
        volume.native_calls(), pwrite=ctypes.cast(callback, ctypes.c_void_p).value, sync_range=0
    )

    def native_calls():
        assert callback
        return calls

    monkeypatch.setattr(workers, "native_calls", native_calls)


INJECTOR = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Environment: FAULT_DIRECT=1 refuses to set O_DIRECT; FAULT_ERRNO=e fails the write number
   FAULT_AT (0 is the first); FAULT_SHORT=n lets at most n bytes pass; FAULT_EINTR=1 interrupts
   every third write. Only pwrite is affected: Python's own writes go through write. */
static long setting(const char *name) { const char *s = getenv(name); return s ? atol(s) : -1; }
static long calls;
typedef ssize_t (*writer)(int, const void *, size_t, off_t);

static ssize_t gate(int fd, const void *b, size_t n, off_t o,
                    writer real) {
    long call = __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
    if (setting("FAULT_EINTR") > 0 && call % 3 == 1) { errno = EINTR; return -1; }
    if (setting("FAULT_ERRNO") > 0 && call == setting("FAULT_AT")) {
        errno = setting("FAULT_ERRNO"); return -1;
    }
    long most = setting("FAULT_SHORT");
    if (most > 0 && n > (size_t)most) {
        n = most;
        if ((fcntl(fd, F_GETFL) & O_DIRECT) && n > 512) n = n / 512 * 512;
    }
    return real(fd, b, n, o);
}
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) {
    return gate(fd, b, n, o, (writer)dlsym(RTLD_NEXT, "pwrite"));
}
ssize_t pwrite64(int fd, const void *b, size_t n, off_t o) {
    return gate(fd, b, n, o, (writer)dlsym(RTLD_NEXT, "pwrite64"));
}
static int control(const char *name, int fd, int command, long value) {
    int (*real)(int, int, ...) = (int (*)(int, int, ...))dlsym(RTLD_NEXT, name);
    if (command == F_SETFL && (value & O_DIRECT) && setting("FAULT_DIRECT") > 0) {
        errno = EINVAL; return -1;
    }
    return real(fd, command, value);
}
#define CONTROL(name) int name(int fd, int command, ...) { \
    va_list list; va_start(list, command); long value = va_arg(list, long); va_end(list); \
    return control(#name, fd, command, value); }
CONTROL(fcntl)
CONTROL(fcntl64)
"""


def build_injector(folder):
    """Compile the library and return its path."""
    source, library = folder / "faults.c", folder / "faults.so"
    source.write_text(INJECTOR)
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


ERRORS = (errno.EIO, errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
