"""Where bytes come from: memory, and files. The only module that opens for reading.

Files are opened below a directory descriptor, without following links unless asked, and only when
they are regular files. A checkpoint's directory is opened once: whatever happens to its name, all
files come from that one directory. Reads continue after short reads; an early end is a fault, not a
crash.
"""

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

from fpformat.arguments import (
    check_kind,
    checked_flag,
    checked_int,
    checked_path,
    checked_paths,
    wrong,
)
from fpformat.errors import PlanError, TruncatedError, UncommittedError, fault, storage_fault
from fpformat.limits import MAX_MANIFEST_NBYTES
from fpformat.names import MANIFEST_NAME, segment_name

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_READ_LIMIT: Final = 1 << 30


class BytesSource:
    """A shard in memory: any C-contiguous buffer."""

    def __init__(self, buffer: Any) -> None:
        """Keep the buffer.

        Raises:
            PlanError: It is none, or not C-contiguous.
        """
        try:
            view = memoryview(buffer)
            self._view = view.cast("B") if view.nbytes else memoryview(b"")
        except (TypeError, ValueError, BufferError) as error:
            raise wrong("buffer", buffer, f"a C-contiguous buffer ({error})") from error

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
        """Keep the place.

        Args:
            descriptor: Of a file that stays open.
            offset: Where the shard begins, in bytes.
            where: The file, for messages.

        Raises:
            PlanError: An argument is of a wrong kind.
        """
        self._descriptor = checked_int("descriptor", descriptor, least=0)
        self._offset = checked_int("offset", offset, least=0)
        check_kind("where", where, str, "a str")
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
            action = f"reading {len(view)} bytes at {offset} failed"
            raise storage_fault(where, action, error) from error
        if count == 0:
            detail = f"ends at {offset + done}, before byte {offset + len(view)}"
            raise TruncatedError("SEG-1", where, detail)
        done += count


def open_directory(path: str) -> int:
    """Open the directory that the caller named and return its descriptor."""
    try:
        return os.open(path, _DIRECTORY_FLAGS)
    except NotADirectoryError as error:
        raise fault("DIR-6", path, "is not a directory, so it is no checkpoint") from error
    except OSError as error:
        raise storage_fault(path, "cannot be opened", error) from error


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
        raise storage_fault(where, "cannot be opened", error) from error
    try:
        return descriptor, _regular_nbytes(descriptor, where)
    except BaseException:
        os.close(descriptor)
        raise


def _regular_nbytes(descriptor: int, where: str) -> int:
    try:
        status = os.fstat(descriptor)
    except OSError as error:
        raise storage_fault(where, "cannot be examined", error) from error
    if not stat.S_ISREG(status.st_mode):
        raise fault("DIR-5", where, "is not a regular file")
    return status.st_size


class CheckpointDirectory:
    """The open directory of a checkpoint, below which all its files are opened.

    Attributes:
        path: The directory as the caller named it, for messages.
    """

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        *,
        volumes: Sequence[str] = (),
        follow_symlinks: bool = False,
    ) -> None:
        """Open the directory.

        Raises:
            PlanError: An argument is of a wrong kind.
            FormatError: DIR-6 or DIR-7.
        """
        self.path = checked_path(path)
        self._volumes = checked_paths("volumes", volumes)
        self._follow = checked_flag("follow_symlinks", follow_symlinks)
        self._absolute = self.path
        with suppress(OSError):
            self._absolute = os.path.join(os.getcwd(), self.path)
        self._descriptor: int | None = open_directory(self.path)

    def __enter__(self) -> "CheckpointDirectory":
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close the directory; nothing below it can be opened any more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _opened(self) -> int:
        if self._descriptor is None:
            raise PlanError(f"{self.path}: the checkpoint is closed")
        return self._descriptor

    def is_in_place(self) -> bool:
        """Return whether its path still leads to the directory that was opened."""
        try:
            return os.path.samestat(os.stat(self._absolute), os.fstat(self._opened()))
        except OSError:
            return False

    def _missing(self, clause: str, where: str, detail: str) -> UncommittedError:
        if not self.is_in_place():
            detail += f": {self.path} was removed or replaced after it had been opened"
        return UncommittedError(clause, where, detail)

    def read_manifest(self) -> bytes:
        """Return the bytes of the manifest, bounded by the size limit."""
        where = os.path.join(self.path, MANIFEST_NAME)
        try:
            descriptor, nbytes = open_regular(
                self._opened(),
                MANIFEST_NAME,
                follow_symlinks=self._follow,
                where=where,
                absent="DIR-1",
            )
        except UncommittedError as error:
            raise self._missing(error.clause, where, error.detail) from error
        try:
            if nbytes > MAX_MANIFEST_NBYTES:
                raise fault("MAN-4", where, f"has {nbytes} bytes; the limit is 16 MiB")
            document = bytearray(nbytes)
            read_exact(descriptor, document, offset=0, where=where)
        finally:
            os.close(descriptor)
        return bytes(document)

    def open_segment(self, ordinal: int, save_id: bytes) -> tuple[int, int]:
        """Open a segment here or, when it is not here, on one of the other volumes.

        A further volume keeps segments in a directory named after the save id, below its root.

        Returns:
            Descriptor and size in bytes.

        Raises:
            FormatError: DIR-2, DIR-5 or DIR-7.
        """
        name = segment_name(ordinal)
        where = os.path.join(self.path, name)
        found = self._open_in(self._opened(), name, where)
        for root in self._volumes:
            found = found or self._open_on(os.path.join(root, save_id.hex()), name)
        if found is None:
            roots = f" here or under {', '.join(self._volumes)}" if self._volumes else ""
            raise self._missing("DIR-2", where, f"is listed in the manifest but missing{roots}")
        return found

    def _open_in(self, directory: int, name: str, where: str) -> tuple[int, int] | None:
        try:
            return open_regular(
                directory, name, follow_symlinks=self._follow, where=where, absent="DIR-2"
            )
        except UncommittedError:
            return None

    def _open_on(self, folder: str, name: str) -> tuple[int, int] | None:
        try:
            directory = os.open(folder, _DIRECTORY_FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_fault(folder, "cannot be opened", error) from error
        try:
            return self._open_in(directory, name, os.path.join(folder, name))
        finally:
            os.close(directory)
