"""Removing checkpoints and what dead writers left behind.

A checkpoint is first renamed out of sight and the rename made durable; only then its files go,
by their derived names alone, so that a crash in between leaves trash and never half a checkpoint
under a checkpoint's name. Whatever else lies in such a directory stays, and the directory with it.
"""

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from fpformat.errors import FormatError
from fpformat.manifest import check_editor
from fpformat.names import MANIFEST_NAME, aside_name, trash_name
from fpformat.publish import sync_directory
from fpformat.reader import open_checkpoint
from fpformat_io.find import step_of

_LOG: Final = logging.getLogger("fpformat_io")
_LEFT_BEHIND: Final = re.compile(r"\.fps-(trash-)?[0-9a-f]{32}")
_SEGMENT: Final = re.compile(r"seg-\d{6,}\.fps")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
STALE_AGE_S: Final = 1.0


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, _DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_derived(path: Path, descriptor: int) -> None:
    """Remove manifest and segments, then the directory if nothing else is in it."""
    names = os.listdir(descriptor)
    for name in sorted(names, key=lambda name: name != MANIFEST_NAME):
        if name == MANIFEST_NAME or _SEGMENT.fullmatch(name):
            os.unlink(name, dir_fd=descriptor)
    os.rmdir(path)


def collect(root: Path, *, min_age_s: float = STALE_AGE_S) -> tuple[Path, ...]:
    """Remove staging directories of dead writers, and trash.

    A writer that lives holds a lock on its staging directory. The age covers the moment between
    making the directory and locking it.

    Returns:
        The directories that are gone. One that cannot be removed is left, with a line in the log.
    """
    gone: list[Path] = []
    for name in sorted(os.listdir(root)):
        if _LEFT_BEHIND.fullmatch(name):
            path = root / name
            try:
                if _collect_one(path, min_age_s):
                    gone.append(path)
            except OSError as error:
                _LOG.warning("%s: cannot be removed: %s", path, error.strerror)
    return tuple(gone)


def _collect_one(path: Path, min_age_s: float) -> bool:
    with _opened(path) as descriptor:
        if abs(time.time() - os.fstat(descriptor).st_mtime) < min_age_s:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        _remove_derived(path, descriptor)
    return True


def retire(path: Path, save_id: bytes) -> None:
    """Remove a checkpoint.

    Args:
        path: Its directory.
        save_id: The save id in its manifest.

    Raises:
        OSError: It could not be renamed, or not be removed after that.
    """
    trash = path.with_name(trash_name(save_id))
    os.rename(path, trash)
    # Without this a power cut could bring the name back after some of the files are gone.
    sync_directory(path.parent)
    with _opened(trash) as descriptor:
        _remove_derived(trash, descriptor)


def move_aside(path: Path, save_id: bytes) -> Path:
    """Rename a directory that cannot be loaded, to free its name for the save `save_id`.

    Returns:
        Where it is now.

    Raises:
        OSError: It could not be renamed.
    """
    aside = path.with_name(aside_name(path.name, save_id))
    os.rename(path, aside)
    sync_directory(path.parent)
    _LOG.warning("%s cannot be loaded; moved to %s", path, aside.name)
    return aside


class Retention:
    """Keeps the newest checkpoints of a root and retires the others.

    Only directories named after a step that can be loaded count, and only those are removed. One
    with a feature that an editor would have to know is none of them.
    """

    def __init__(self, root: Path, keep: int | None) -> None:
        self._root = root
        self._keep = keep
        self._save_ids: dict[str, bytes] = {}

    def add(self, path: Path, save_id: bytes) -> None:
        """Note a checkpoint that is known to be durable."""
        self._save_ids[path.name] = save_id

    def prune(self, newest: Path) -> tuple[Path, ...]:
        """Retire all but the newest `keep` checkpoints.

        Args:
            newest: The checkpoint that just became durable; it stays whatever its step is.

        Returns:
            The checkpoints that were retired; one that cannot be is logged and stays.
        """
        if self._keep is None:
            return ()
        names = [name for name in os.listdir(self._root) if step_of(name) is not None]
        names.sort(key=lambda name: (name == newest.name, step_of(name)), reverse=True)
        loadable = [name for name in names if self._is_loadable(name)]
        retired: list[Path] = []
        for name in loadable[self._keep :]:
            path = self._root / name
            try:
                retire(path, self._save_ids.pop(name))
                retired.append(path)
            except OSError as error:
                _LOG.warning("%s: cannot be removed: %s", path, error.strerror)
        return tuple(retired)

    def _is_loadable(self, name: str) -> bool:
        if (self._root / name).is_symlink():
            return False
        if name not in self._save_ids:
            path = self._root / name
            with suppress(FormatError), open_checkpoint(path) as checkpoint:
                check_editor(checkpoint.manifest, str(path))
                self._save_ids[name] = checkpoint.manifest.save_id
        return name in self._save_ids
