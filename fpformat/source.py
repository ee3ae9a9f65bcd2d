"""Where bytes come from: memory, and files. The only module that opens for reading.

Files are opened below a directory descriptor, without following links unless asked, and only when
they are regular files. Reads continue after short reads; an early end is a fault, not a crash.
"""

import errno
import os
import stat
from collections.abc import Sequence
from typing import Any, Final

from fpformat.errors import TruncatedError, UncommittedError, fault
from fpformat.limits import MAX_MANIFEST_NBYTES
from fpformat.names import MANIFEST_NAME

_READ_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_READ_LIMIT: Final = 1 << 30


class BytesSource:
    """A shard in memory: any C-contiguous buffer."""

    def __init__(self, buffer: Any) -> None:
        self._view = memoryview(buffer).cast("B")

    @property
    def buffer(self) -> memoryview:
        """The bytes of the whole shard."""
        return self._view

    def read(self, *, offset: int, nbytes: int) -> memoryview:
        """Return a view of the buffer, without a copy."""
        return self._view[offset : offset + nbytes]


class FileSource:
    """A shard that lies in a range of an open file."""

    def __init__(self, descriptor: int, *, offset: int, where: str) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self._where = where

    def read(self, *, offset: int, nbytes: int) -> memoryview:
        """Read the bytes from the file; TruncatedError when it ends before them."""
        buffer = bytearray(nbytes)
        read_exact(self._descriptor, buffer, offset=self._offset + offset, where=self._where)
        return memoryview(buffer)


def read_exact(descriptor: int, buffer: Any, *, offset: int, where: str) -> None:
    """Fill `buffer` from byte `offset` of a file.

    Raises:
        TruncatedError: SEG-1, when the file ends first.
        StorageError: DIR-7, when the operating system reports an error.
    """
    view = memoryview(buffer).cast("B")
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done : done + _READ_LIMIT]], offset + done)
        except OSError as error:
            detail = f"reading {len(view)} bytes at {offset} failed: {error.strerror}"
            raise fault("DIR-7", where, detail) from error
        if count == 0:
            detail = f"ends at {offset + done}, before byte {offset + len(view)}"
            raise TruncatedError("SEG-1", where, detail)
        done += count


def open_directory(path: "str | os.PathLike[str]") -> int:
    """Open the directory that the caller named and return its descriptor."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError as error:
        detail = "is not a directory, so it is no checkpoint"
        raise fault("DIR-6", os.fspath(path), detail) from error
    except OSError as error:
        raise fault("DIR-7", os.fspath(path), f"cannot be opened: {error.strerror}") from error
    except ValueError as error:
        raise fault("DIR-7", repr(os.fspath(path)), f"is no path: {error}") from error


def open_regular(
    directory: int, name: str, *, follow_symlinks: bool, where: str, absent: str
) -> tuple[int, int]:
    """Open a regular file of a directory and return its descriptor and its size in bytes.

    Args:
        directory: Descriptor of the directory.
        name: A derived name, never one that was read.
        follow_symlinks: Whether the caller allows the name to be a symbolic link.
        where: Path of the file for messages.
        absent: The clause to cite when there is no such file.

    Raises:
        FormatError: `absent`, DIR-5 or DIR-7.
    """
    flags = _READ_FLAGS | (0 if follow_symlinks else os.O_NOFOLLOW)
    try:
        descriptor = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError as error:
        raise fault(absent, where, "is missing") from error
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_symlinks:
            detail = "is a symbolic link; they are followed only on request"
            raise fault("DIR-5", where, detail) from error
        if error.errno == errno.ENXIO:
            raise fault("DIR-5", where, "is not a regular file") from error
        raise fault("DIR-7", where, f"cannot be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise fault("DIR-5", where, "is not a regular file")
    return descriptor, status.st_size


def read_manifest(
    path: "str | os.PathLike[str]", directory: int, *, follow_symlinks: bool
) -> bytes:
    """Return the bytes of a checkpoint's manifest, bounded by the size limit."""
    where = os.path.join(os.fspath(path), MANIFEST_NAME)
    descriptor, nbytes = open_regular(
        directory, MANIFEST_NAME, follow_symlinks=follow_symlinks, where=where, absent="DIR-1"
    )
    try:
        if nbytes > MAX_MANIFEST_NBYTES:
            raise fault("MAN-4", where, f"has {nbytes} bytes; the limit is 16 MiB")
        document = bytearray(nbytes)
        read_exact(descriptor, document, offset=0, where=where)
    finally:
        os.close(descriptor)
    return bytes(document)


def open_segment(
    directory: int,
    name: str,
    *,
    volumes: Sequence[str],
    save_id: bytes,
    follow_symlinks: bool,
    where: str,
) -> tuple[int, int]:
    """Open a segment in the checkpoint or, when it is not there, on one of the other volumes.

    A further volume keeps segments in a directory named after the save id, below its root.
    """
    try:
        return open_regular(
            directory, name, follow_symlinks=follow_symlinks, where=where, absent="DIR-2"
        )
    except UncommittedError:
        pass
    for root in volumes:
        folder = os.path.join(root, save_id.hex())
        try:
            other = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise fault("DIR-7", folder, f"cannot be opened: {error.strerror}") from error
        try:
            return open_regular(
                other,
                name,
                follow_symlinks=follow_symlinks,
                where=os.path.join(folder, name),
                absent="DIR-2",
            )
        except UncommittedError:
            continue
        finally:
            os.close(other)
    roots = f" here or under {', '.join(volumes)}" if volumes else ""
    raise fault("DIR-2", where, f"is listed in the manifest but missing{roots}")
