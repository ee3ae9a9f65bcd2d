"""Outputs that appear whole or not at all.

What is written stands under a temporary name beside the target; it is synced, renamed onto the
target, and the directory is synced. A target that exists is refused before anything is read, and
again at the end, without a moment in which it could be replaced. After any error, also after an
interrupt, the temporary name is removed. Its owner holds a lock on it, so that after a kill the
next conversion into the same directory knows that it is dead, and removes it.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from fpformat.publish.durability import lock_own, sync_directory
from fpformat_tools.errors import TargetError
from fpformat_tools.streams.leftovers import collect, temporary_name
from fpformat_tools.text import nbytes_text

_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# File systems without hard links say so in one of these ways.
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class OutputFile:
    """An output that is being written front to back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.descriptor = os.open(path, _CREATE, 0o666)

    def write(self, buffer: "bytes | memoryview") -> None:
        """Append bytes."""
        view = memoryview(buffer).cast("B")
        while view:
            count = os.write(self.descriptor, view)
            self.position += count
            view = view[count:]

    def finish(self) -> None:
        """Make everything durable and close."""
        try:
            os.fsync(self.descriptor)
        finally:
            self.close()

    def close(self) -> None:
        """Close; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _folder(target: Path) -> Path:
    """Return the directory of a target; TargetError where there is no working directory."""
    try:
        return target.absolute().parent
    except OSError as error:
        detail = f"has no place: there is no working directory ({error.strerror})"
        raise TargetError("io", str(target), detail) from error


def refuse_existing(target: Path) -> None:
    """Raise if anything stands at `target`, or if its directory does not exist."""
    if os.path.lexists(target):
        raise TargetError("invalid", str(target), "exists already; nothing is ever overwritten")
    if not _folder(target).is_dir():
        raise TargetError("io", str(target), "its directory does not exist")


def check_space(target: Path, *, nbytes: int) -> None:
    """Raise if the file system of `target` has no room for `nbytes`; unknown room passes."""
    try:
        status = os.statvfs(_folder(target))
    except OSError:
        return
    free = status.f_bavail * status.f_frsize
    if status.f_blocks and nbytes > free:
        detail = f"needs {nbytes_text(nbytes)}, the file system has {nbytes_text(free)} free"
        raise TargetError("io", str(target), detail)


def _prepare(target: Path, warn: Callable[[str], None]) -> Path:
    """Clear what dead conversions left beside the target, and return a temporary path there."""
    folder = _folder(target)
    with suppress(OSError):  # to tidy up is a courtesy
        for path in collect(folder, warn=warn):
            warn(f"removed {path}, which a writer that died left behind")
    return folder / temporary_name()


@contextmanager
def new_file(target: Path, *, warn: Callable[[str], None]) -> Iterator[OutputFile]:
    """Yield an output that becomes `target` when the block ends without an error.

    Args:
        target: Where it will stand.
        warn: Takes what the user should know, such as what the file system cannot do.

    Raises:
        TargetError: The system refused to write, or `target` came to exist meanwhile.
    """
    temporary = _prepare(target, warn)
    try:
        output = OutputFile(temporary)
        try:
            lock_own(output.descriptor, temporary, warn)
            yield output
            output.finish()
            _publish_file(temporary, target, warn)
        finally:
            output.close()
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _failure(target, error) from error


def _publish_file(temporary: Path, target: Path, warn: Callable[[str], None]) -> None:
    # A link, unlike a rename, never replaces what is there.
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        refuse_existing(target)
        os.rename(temporary, target)
    sync_directory(_folder(target), warn)


@contextmanager
def new_directory(target: Path, *, warn: Callable[[str], None]) -> Iterator[Path]:
    """Yield a directory that becomes `target` when the block ends without an error.

    Whoever writes files into it finishes (and so syncs) each of them.

    Args:
        target: Where it will stand.
        warn: Takes what the user should know, such as what the file system cannot do.

    Raises:
        TargetError: The system refused to write, or `target` came to exist meanwhile.
    """
    temporary = _prepare(target, warn)
    try:
        temporary.mkdir()
        descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock_own(descriptor, temporary, warn)
            yield temporary
            sync_directory(temporary, warn)
            refuse_existing(target)
            os.rename(temporary, target)
            sync_directory(_folder(target), warn)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(descriptor)
    except OSError as error:
        raise _failure(target, error) from error


def _failure(target: Path, error: OSError) -> TargetError:
    if error.errno == errno.EEXIST:
        return TargetError("invalid", str(target), "came to exist meanwhile; it was left alone")
    detail = f"writing failed: {error.strerror or error}; nothing was left behind"
    return TargetError("io", str(target), detail)
