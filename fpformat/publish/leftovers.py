"""What writers that died left beside checkpoints, and its removal.

A writer that lives holds a lock on what it creates (clause COM-2), so whatever can be locked is
dead, but for the moment between creation and lock. Where there are no locks, or the writer may be
on another machine, nobody can tell, and only what nothing changed for a day is taken for dead.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from fpformat.names import MANIFEST_NAME
from fpformat.publish.durability import is_local, lock

_LEFT_BEHIND: Final = re.compile(r"\.fps-(trash-)?[0-9a-f]{32}")
_SEGMENT: Final = re.compile(r"seg-\d{6,}\.fps")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
STALE_AGE_S: Final = 1.0
STALE_UNLOCKED_AGE_S: Final = 24 * 60 * 60.0


def leftovers(root: Path) -> list[Path]:
    """Return the staging and trash directories below `root` by name, dead or not.

    Raises:
        OSError: It cannot be listed.
    """
    return [root / name for name in sorted(os.listdir(root)) if _LEFT_BEHIND.fullmatch(name)]


def is_derived(name: str) -> bool:
    """Return whether a checkpoint or a staging directory has such a name by the format."""
    return name == MANIFEST_NAME or _SEGMENT.fullmatch(name) is not None


@contextmanager
def claimed(path: Path, flags: int, *, min_age_s: float) -> Iterator[int | None]:
    """Open and lock what may be dead; yield its descriptor, or None when its owner may live.

    Args:
        path: A file or directory whose owner, if it lives, has a lock on it.
        flags: To open it with.
        min_age_s: For how long nothing may have changed, at least.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(path, flags)
    try:
        yield descriptor if _is_dead(path, descriptor, min_age_s) else None
    finally:
        os.close(descriptor)


def _is_dead(path: Path, descriptor: int, min_age_s: float) -> bool:
    if _age_s(os.fstat(descriptor).st_mtime) < min_age_s:
        return False
    try:
        has_locks = lock(descriptor)
    except BlockingIOError:
        return False
    # Since it was opened, others may have removed it and made another one of that name.
    if not os.path.samestat(os.fstat(descriptor), os.lstat(path)):
        return False
    return (has_locks and is_local(path)) or _age_s(
        _latest_change(descriptor)
    ) >= STALE_UNLOCKED_AGE_S


def _age_s(mtime: float) -> float:
    # The clock of a file server may run ahead of ours.
    return abs(time.time() - mtime)


def _latest_change(descriptor: int) -> float:
    """Return when a file, or a directory or something in it, was last changed."""
    latest = os.fstat(descriptor).st_mtime
    with suppress(NotADirectoryError), os.scandir(descriptor) as entries:
        return max([latest, *(entry.stat(follow_symlinks=False).st_mtime for entry in entries)])
    return latest


def dead(root: Path, *, min_age_s: float = STALE_AGE_S) -> list[Path]:
    """Return the staging and trash directories below `root` whose writers are dead."""
    found = []
    for path in leftovers(root):
        with suppress(OSError), claimed(path, _DIRECTORY, min_age_s=min_age_s) as descriptor:
            if descriptor is not None:
                found.append(path)
    return found


def collect(
    root: Path, *, warn: Callable[[str], None], min_age_s: float = STALE_AGE_S
) -> tuple[Path, ...]:
    """Remove staging directories of dead writers, and trash.

    spec: COM-18

    Args:
        root: The directory that holds them.
        warn: Takes one line for each that cannot be removed; it is left.
        min_age_s: For how long nothing may have changed, at least.

    Returns:
        The directories that are gone.

    Raises:
        OSError: `root` cannot be listed.
    """
    gone: list[Path] = []
    for path in leftovers(root):
        try:
            with claimed(path, _DIRECTORY, min_age_s=min_age_s) as descriptor:
                if descriptor is not None:
                    remove_derived(path, descriptor)
                    gone.append(path)
        except FileNotFoundError:
            continue  # somebody else was faster
        except OSError as error:
            warn(f"{path}: cannot be removed: {error.strerror}")
    return tuple(gone)


def remove_derived(path: Path, descriptor: int) -> None:
    """Remove manifest and segments, then the directory if nothing else is in it.

    spec: COM-14, COM-17

    Raises:
        OSError: Something cannot be removed, or the directory holds something else.
    """
    # The manifest first: what is left after a crash must not look complete.
    for name in sorted(os.listdir(descriptor), key=lambda name: name != MANIFEST_NAME):
        if is_derived(name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
    os.rmdir(path)
