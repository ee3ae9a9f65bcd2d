"""What a writer asks of a file system beyond writing: names that last, and a sign that it lives.

Not every file system can. Where one says that it has no locks, or that it cannot sync a directory,
a save goes on and its report says so; every other error is an error of the save.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

# Lustre mounted without its option, 9p and older FUSE file systems answer in these ways.
_NO_LOCKS: Final = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL})
_NO_DIRECTORY_SYNC: Final = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EINVAL})
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

Warn = Callable[[str], None]


def lock(descriptor: int) -> bool:
    """Take the exclusive lock that tells others that the owner of a file or directory lives.

    Returns:
        Whether the file system has locks at all.

    Raises:
        BlockingIOError: Somebody else has it.
        OSError: Any other error.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def lock_own(descriptor: int, path: Path, warn: Warn) -> None:
    """Lock what this process just created; without locks, warn that nobody can see that it lives.

    spec: COM-2

    Raises:
        OSError: Any error but that there are no locks.
    """
    if not lock(descriptor):
        warn(
            f"{path.parent}: its file system has no locks; for others a save that runs and one "
            "that died look alike until a day has passed"
        )


def sync_names(descriptor: int, path: Path, warn: Warn) -> None:
    """Make the names in an open directory durable; warn where the file system cannot.

    Raises:
        OSError: Any error but that it cannot.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
        warn(
            f"{path}: its file system cannot sync directories ({error.strerror}); whether new "
            "names in it survive a power cut is up to it"
        )


def sync_directory(path: Path, warn: Warn) -> None:
    """Open a directory and make the names in it durable; see `sync_names`."""
    descriptor = os.open(path, _DIRECTORY)
    try:
        sync_names(descriptor, path, warn)
    finally:
        os.close(descriptor)


def make_directories(path: Path, warn: Warn) -> None:
    """Create a directory with its parents, each name durable; one that exists is fine.

    Args:
        path: The directory, absolute.
        warn: Takes what the file system cannot do.

    Raises:
        OSError: It cannot be created, or something else stands there.
    """
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent, warn)
