"""How a segment is written on the volume it lies on: past the page cache or through it.

The kernel is asked for the alignments of direct I/O (``statx(2)``, STATX_DIOALIGN); where it does
not say, 4096 is assumed. What it says is not trusted: the first write is the probe, and when the
volume refuses it the segment is written again through the page cache.
"""

import ctypes
import errno
import fcntl
import os
import struct
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from fpformat_io.config import Mode

_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_STATX_NBYTES: Final = 256
_DIO_FIELDS: Final = struct.Struct("<II")
_DIO_OFFSET: Final = 152
_ASSUMED_ALIGN: Final = 4096
_SYNC_FILE_RANGE_WRITE: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """What was decided for the files of one save on one volume.

    Attributes:
        mode: ``"direct"`` or ``"buffered"``.
        memory_align: What addresses must be multiples of.
        offset_align: What offsets and sizes must be multiples of.
        reason: Why, for the report and the log.
    """

    mode: str
    memory_align: int
    offset_align: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCalls:
    """Addresses of the C functions that kernels call."""

    pwrite: int
    errno_location: int
    sync_range: int


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


@cache
def native_calls() -> NativeCalls:
    """Return the functions of the C library; one that is missing has the address 0."""
    return NativeCalls(
        pwrite=_address("pwrite64") or _address("pwrite"),
        errno_location=_address("__errno_location") or _address("__error"),
        sync_range=_address("sync_file_range"),
    )


def _address(name: str) -> int:
    try:
        return ctypes.cast(getattr(_libc(), name), ctypes.c_void_p).value or 0
    except AttributeError:
        return 0


def stated_alignment(descriptor: int) -> tuple[int, int] | None:
    """Return the alignment of memory and of offsets for direct I/O, None when nobody knows.

    Zeros mean that the file system has no direct I/O. Source: statx(2), Linux 6.1.
    """
    buffer = ctypes.create_string_buffer(_STATX_NBYTES)
    try:
        result = _libc().statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer)
    except AttributeError:
        return None
    if result or not int.from_bytes(buffer.raw[:4], "little") & _STATX_DIOALIGN:
        return None
    memory, offset = _DIO_FIELDS.unpack_from(buffer.raw, _DIO_OFFSET)
    return memory, offset


def decide(descriptor: int, *, mode: Mode, align: int) -> Volume:
    """Decide how a new file is written, and prepare its descriptor for that.

    Args:
        descriptor: The file, open for writing, empty.
        mode: What the caller wants.
        align: The block size of the segment: every write is a multiple of it.
    """
    if mode == "buffered":
        return buffered("as configured")
    stated = stated_alignment(descriptor)
    if stated and 0 in stated:
        return buffered("the file system has no direct I/O")
    memory, offset = stated or (_ASSUMED_ALIGN, _ASSUMED_ALIGN)
    if align % offset or align % memory:
        return buffered(f"direct I/O needs multiples of {max(offset, memory)} bytes")
    try:
        _set_direct(descriptor, os.O_DIRECT)
    except OSError as error:
        return buffered(f"the file system refuses O_DIRECT ({error.strerror})")
    reason = "as the file system states" if stated else "alignment assumed"
    return Volume(mode="direct", memory_align=memory, offset_align=offset, reason=reason)


def preallocate(descriptor: int, nbytes: int) -> None:
    """Allocate the first bytes of a file where the file system can.

    Writes that do not extend the file run side by side, and a full disk shows before the first of
    them. ``posix_fallocate`` would write zeros where the file system cannot allocate.

    Raises:
        OSError: There is no room (ENOSPC, EDQUOT, EFBIG).
    """
    try:
        function = _libc().fallocate64
    except AttributeError:
        return
    if function(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))


def buffered(reason: str) -> Volume:
    """Return the way through the page cache, which always works."""
    return Volume(mode="buffered", memory_align=1, offset_align=1, reason=reason)


def fall_back(descriptor: int, volume: Volume, reason: str) -> Volume:
    """Turn direct I/O off again for a file whose first writes the volume refused."""
    _set_direct(descriptor, 0)
    return replace(volume, mode="buffered", memory_align=1, offset_align=1, reason=reason)


def _set_direct(descriptor: int, flag: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag)


def sync_flags(volume: Volume) -> int:
    """Return the flags of early write-back, 0 where there is nothing to write back."""
    return _SYNC_FILE_RANGE_WRITE if volume.mode == "buffered" else 0
