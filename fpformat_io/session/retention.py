"""Removing checkpoints, and moving them out of the way.

A checkpoint is first renamed out of sight and the rename made durable; only then its files go,
by their derived names alone, so that a crash in between leaves trash and never half a checkpoint
under a checkpoint's name. One that holds a file of somebody else's is never removed.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from fpformat.errors import FormatError
from fpformat.names import aside_name, superseded_name, trash_name
from fpformat.publish.durability import sync_directory
from fpformat.publish.leftovers import is_derived, remove_derived
from fpformat.read.reader import open_checkpoint
from fpformat.records.manifest import check_editor
from fpformat_io.session.latest import step_of

_LOG: Final = logging.getLogger("fpformat_io")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _rename(path: Path, name: str) -> Path:
    """Give a directory another name beside it, durably, and return where it is now."""
    moved = path.with_name(name)
    os.rename(path, moved)
    # Without this a power cut could bring the old name back after the next step.
    sync_directory(path.parent, _LOG.debug)
    return moved


def retire(path: Path, save_id: bytes) -> None:
    """Remove a checkpoint.

    Args:
        path: Its directory.
        save_id: The save id in its manifest.

    Raises:
        OSError: It could not be renamed, or not be removed after that; the error says where it is.
    """
    trash = _rename(path, trash_name(save_id))
    descriptor = os.open(trash, _DIRECTORY)
    try:
        remove_derived(trash, descriptor)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; it is now {trash}") from error
    finally:
        os.close(descriptor)


def move_aside(path: Path, save_id: bytes) -> Path:
    """Rename a directory that cannot be loaded, to free its name for the save `save_id`.

    Returns:
        Where it is now.

    Raises:
        OSError: It could not be renamed.
    """
    aside = _rename(path, aside_name(path.name, save_id))
    _LOG.warning("%s cannot be loaded; moved to %s", path, aside.name)
    return aside


def supersede(path: Path, mark: bytes) -> Path:
    """Rename a checkpoint that a run which went back leaves behind, so that no search finds it.

    spec: COM-27

    Args:
        path: Its directory.
        mark: 16 random bytes that stand for this going back.

    Returns:
        Where it is now.

    Raises:
        OSError: It could not be renamed.
    """
    moved = _rename(path, superseded_name(path.name, mark))
    _LOG.warning("%s is superseded; moved to %s", path, moved.name)
    return moved


class Retention:
    """Keeps the newest checkpoints of a root and retires older ones.

    Only directories that are named after the step in their manifest and can be loaded count, and
    only those are removed, and only if they are older than the checkpoint that was just saved. One
    with a feature that an editor would have to know, or with a file that is not the format's, is
    none of them.
    """

    def __init__(self, root: Path, keep: int | None) -> None:
        self._root = root
        self._keep = keep
        self._save_ids: dict[str, bytes] = {}
        self._warned: set[str] = set()

    def add(self, path: Path, save_id: bytes) -> None:
        """Note a checkpoint that is known to be durable."""
        self._save_ids[path.name] = save_id

    def prune(self, newest: Path) -> tuple[Path, ...]:
        """Retire the checkpoints below `newest` but for the `keep` - 1 highest of them.

        Args:
            newest: The checkpoint that just became durable; it stays, and so does all above it.

        Returns:
            The checkpoints that were retired; one that cannot be is logged and stays.
        """
        if self._keep is None:
            return ()
        steps = {name: step_of(name) for name in os.listdir(self._root)}
        limit = step_of(newest.name)
        assert limit is not None
        older = [name for name, step in steps.items() if step is not None and step < limit]
        older.sort(key=lambda name: steps[name] or 0, reverse=True)
        loadable = [name for name in older if self._is_loadable(name)]
        retired = [self._root / name for name in loadable[self._keep - 1 :] if self._retire(name)]
        return tuple(retired)

    def _is_loadable(self, name: str) -> bool:
        if (self._root / name).is_symlink():
            return False
        if name not in self._save_ids:
            path = self._root / name
            with suppress(FormatError), open_checkpoint(path) as checkpoint:
                check_editor(checkpoint.manifest, str(path))
                if checkpoint.manifest.step == step_of(name):
                    self._save_ids[name] = checkpoint.manifest.save_id
        return name in self._save_ids

    def _retire(self, name: str) -> bool:
        path = self._root / name
        try:
            foreign = sorted(entry for entry in os.listdir(path) if not is_derived(entry))
            if foreign:
                self._warn(path, f"holds {', '.join(foreign[:3])}, which is not the format's")
                return False
            retire(path, self._save_ids.pop(name))
        except FileNotFoundError:
            return False  # somebody else was faster
        except OSError as error:
            self._warn(path, error.strerror or str(error))
            return False
        return True

    def _warn(self, path: Path, reason: str) -> None:
        text = f"{path}: stays, and cannot be removed: {reason}"
        if text not in self._warned:
            self._warned.add(text)
            _LOG.warning("%s", text)
