"""Checkpoints of a training run: one directory for each step, the newest few kept."""

import os
import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from fpformat.errors import FormatError, PlanError, SaveError
from fpformat.limits import SAVE_ID_NBYTES
from fpformat.names import step_name
from fpformat.reader import open_checkpoint
from fpformat.verify import verify_checkpoint
from fpformat_io.errors import engine_error
from fpformat_io.find import LatestCheckpoint, latest, warn_of_newer
from fpformat_io.retention import Retention, collect, move_aside
from fpformat_io.session import SaveHandle, SaveReport, SaveSession
from fpformat_io.torch.capture import Capture, capture, check_step, report_of, write
from fpformat_io.torch.sources import copied_sources

# What these classes describe can never become loadable. A file system that fails now, and a
# checkpoint that only a newer version reads, are no reason to move anything.
_UNLOADABLE: Final = frozenset({"incomplete", "corrupt", "malformed", "invalid", "not_fpformat"})


class Checkpointer:
    """Saves states of a run below one root, in the background, and retires the oldest.

    One object for one root at a time. A save copies the state to host memory at the call, so the
    memory needed is that of the state. One save runs at a time: the next call waits for it.
    """

    def __init__(self, root: "str | PathLike[str]", *, keep: int | None = 3) -> None:
        """Open a root, which is created when it does not exist.

        Staging directories of writers that died, and trash, are removed.

        Args:
            root: Directory of the checkpoints.
            keep: How many loadable checkpoints stay, at least 1; None keeps all.

        Raises:
            PlanError: `keep` is something else.
            EngineError: The root cannot be created or listed.
        """
        if keep is not None and (type(keep) is not int or keep < 1):
            raise PlanError(f"keep={keep!r}: expected an int of at least 1, or None")
        # Absolute, because saves go on in the background while the working directory may change.
        self.root = Path(os.path.abspath(root))
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            collect(self.root)
        except OSError as error:
            failure = SaveError(str(self.root), "opening the root", error)
            raise engine_error(failure) from error
        self._retention = Retention(self.root, keep)
        self._session = SaveSession()
        self._is_closed = False
        self._warn_of_newer = True

    def save(
        self, step: int, state: Any, *, metadata: Mapping[str, str] | None = None
    ) -> SaveHandle:
        """Copy the state and save it in the background.

        Waits first for a save that still runs. When this returns, the state may change.

        Args:
            step: Training step; the directory is named after it.
            state: See `fpformat_io.torch.save`.
            metadata: Strings for the manifest.

        Returns:
            A handle to wait on. An error of the save is raised by its `wait_durable`; by the
            next `save` or by `close` only when nobody asked the handle. The `save` after that
            tries again.

        Raises:
            PlanError: The state cannot be stored, or there is a sound checkpoint of this step
                already; a directory of its name that is damaged is moved aside. Nothing was
                written.
            EngineError: The save before failed and nobody was told, or the state cannot be copied.
        """
        begin = time.perf_counter()
        if self._is_closed:
            raise PlanError("the Checkpointer is closed")
        self._session.wait_idle()
        check_step(step)
        if step is None:
            raise PlanError("step=None: expected an int from 0 to 2^53-1")
        if self._warn_of_newer:
            self._warn_of_newer = False
            warn_of_newer(self.root, step)
        path = self.root / step_name(step)
        save_id = os.urandom(SAVE_ID_NBYTES)
        is_in_the_way = _is_unloadable(path)
        ready = capture(state, step=step, metadata=metadata, sources=copied_sources)
        if is_in_the_way:
            _free(path, save_id)
        stall_seconds = time.perf_counter() - begin
        work = _Work(path, ready, save_id, begin, stall_seconds)
        return self._session.start(path, work, lambda report: self._settle(report, save_id))

    def _settle(self, report: SaveReport, save_id: bytes) -> None:
        self._retention.add(report.path, save_id)
        self._retention.prune(report.path)

    def latest(self) -> LatestCheckpoint | None:
        """Return the newest checkpoint that can be loaded; see `fpformat_io.torch.latest`."""
        return latest(self.root)

    def close(self) -> None:
        """Wait for the save that runs.

        Raises:
            EngineError: The last save failed and nobody was told.
        """
        self._is_closed = True
        self._session.wait_idle()

    def __enter__(self) -> "Checkpointer":
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; while another exception passes, an error of a save only goes to the log."""
        if error is None:
            self.close()
        else:
            self._is_closed = True
            self._session.settle()


class _Work:
    """The part of a save that runs in the background; drops the copied state when done."""

    def __init__(
        self, path: Path, ready: Capture, save_id: bytes, begin: float, stall_seconds: float
    ) -> None:
        self._path = path
        self._ready: list[Capture] = [ready]
        self._save_id = save_id
        self._begin = begin
        self._stall_seconds = stall_seconds

    def __call__(self) -> SaveReport:
        ready = self._ready.pop()
        written = write(self._path, ready, self._save_id)
        return report_of(written, ready, begin=self._begin, stall_seconds=self._stall_seconds)


def _is_unloadable(path: Path) -> bool:
    """Return whether a directory at `path` must be moved aside; every byte of it is checked.

    Raises:
        PlanError: A checkpoint, or something else that must not be moved, stands there.
    """
    if not os.path.lexists(path):
        return False
    if path.is_symlink() or not path.is_dir():
        raise PlanError(f"{path}: exists and is no directory")
    try:
        open_checkpoint(path).close()
        is_damaged = bool(verify_checkpoint(path).problems)
    except FormatError as error:
        if error.error_class in _UNLOADABLE:
            return True
        raise PlanError(f"{path}: exists and cannot be judged: {error}") from error
    if is_damaged:
        return True
    raise PlanError(f"{path}: this step is saved already; a checkpoint is never overwritten")


def _free(path: Path, save_id: bytes) -> None:
    try:
        move_aside(path, save_id)
    except OSError as error:
        raise engine_error(SaveError(str(path), "moving aside", error)) from error
