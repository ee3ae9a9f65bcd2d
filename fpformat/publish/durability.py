"""What a writer asks of a file system beyond writing: names that last, and a sign that it lives.

Not every file system can. Where there is no lock to be had, or a directory cannot be synced, a save
goes on and its report says so; every other error is an error of the save.
"""

import errno
import fcntl
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

# Lustre mounted without its option, 9p and older FUSE file systems answer in these ways.
_NO_DIRECTORY_SYNC: Final = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EINVAL})
_LOCAL: Final = frozenset(
    [
        "bcachefs",
        "btrfs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "jfs",
        "overlay",
        "ramfs",
        "tmpfs",
        "xfs",
        "zfs",
    ]
)
_MOUNTS: Final = "/proc/self/mountinfo"
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

Warn = Callable[[str], None]


def lock(descriptor: int) -> bool:
    """Take the exclusive lock that tells others that the owner of a file or directory lives.

    Returns:
        Whether there are locks at all: file systems, mount options and security modules that refuse
        them say so in a dozen ways.

    Raises:
        BlockingIOError: Somebody else has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def lock_own(descriptor: int, path: Path, warn: Warn) -> None:
    """Lock what this process just created; without locks, warn that nobody can see that it lives.

    spec: COM-2

    Raises:
        BlockingIOError: Somebody else has the lock.
    """
    if not lock(descriptor):
        warn(
            f"{path.parent}: its file system has no locks; for others a save that runs and one "
            "that died look alike until a day has passed"
        )


def is_local(path: Path) -> bool:
    """Return whether a path is certainly on a file system that only this machine uses.

    Of others, such as NFS, this machine may see no lock that another one holds.
    """
    place = os.path.realpath(path)
    kinds: dict[str, str] = {}
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                # Of several on one directory the last is seen.
                before, _, after = line.partition(" - ")
                kinds[_ESCAPED.sub(_unescaped, before.split(" ")[4])] = after.split(" ")[0]
    except OSError:
        return False
    while place not in kinds and place != "/":
        place = os.path.dirname(place)
    return kinds.get(place) in _LOCAL


def _unescaped(match: "re.Match[str]") -> str:
    return chr(int(match[1], 8))


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
