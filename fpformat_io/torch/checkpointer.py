"""Checkpoints of a training run: one directory for each step, the newest few kept."""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from fpformat.arguments import checked_int, checked_path
from fpformat.errors import FormatError, PlanError, SaveError
from fpformat.limits import MAX_INT, SAVE_ID_NBYTES
from fpformat.names import step_name
from fpformat.publish.durability import make_directories
from fpformat.publish.leftovers import collect
from fpformat.read.reader import open_checkpoint
from fpformat.read.verify import verify_checkpoint
from fpformat_io.control import SaveControl
from fpformat_io.errors import engine_error
from fpformat_io.session.latest import LatestCheckpoint, latest
from fpformat_io.session.retention import Retention, move_aside
from fpformat_io.session.rewind import check_newest, go_back
from fpformat_io.session.saves import SaveHandle, SaveReport, SaveSession
from fpformat_io.torch.plan import Prepared, prepare
from fpformat_io.torch.sources import copied_sources
from fpformat_io.torch.write import report_of, write

_LOG: Final = logging.getLogger("fpformat_io")
# What these classes describe can never become loadable. A file system that fails now, and a
# checkpoint that only a newer version reads, are no reason to move anything.
_UNLOADABLE: Final = frozenset({"incomplete", "corrupt", "malformed", "invalid", "not_fpformat"})


class Checkpointer:
    """Saves states of a run below one root, in the background, and retires the oldest.

    One object for one root at a time. A save copies the state to host memory at the call, so the
    memory needed is that of the state. One save runs at a time: the next call waits for it.
    """

    def __init__(
        self,
        root: "str | os.PathLike[str]",
        *,
        keep: int | None = None,
        resume_from: int | None = None,
    ) -> None:
        """Open a root, which is created when it does not exist.

        Staging directories of writers that died, and trash, are removed.

        Args:
            root: Directory of the checkpoints.
            keep: How many loadable checkpoints stay, at least 1: with each one saved, older ones
                beyond this number are removed, also those of an earlier run. None keeps all.
            resume_from: The step that the run goes on from, when that is not the latest:
                checkpoints above it are renamed to ``<name>.superseded-<id>``, where no search
                finds them. None leaves all names alone.

        Raises:
            PlanError: An argument is something else.
            EngineError: The root cannot be created, listed or changed.
        """
        text = checked_path(root, "root")
        if keep is not None:
            checked_int("keep", keep, least=1)
        if resume_from is not None:
            _check_step(resume_from, name="resume_from")
        try:
            # Absolute: saves go on in the background while the working directory may change.
            self.root = Path(os.path.abspath(text))
            make_directories(self.root, _LOG.warning)
            for path in collect(self.root, warn=_LOG.warning):
                _LOG.warning("removed %s, which a writer that died left behind", path)
            if resume_from is not None:
                go_back(self.root, resume_from)
        except OSError as error:
            raise engine_error(SaveError(text, "opening the root", error)) from error
        self._retention = Retention(self.root, keep)
        self._session = SaveSession()
        self._is_closed = False
        self._highest_step: int | None = None

    def save(
        self, step: int, state: Any, *, metadata: Mapping[str, str] | None = None
    ) -> SaveHandle:
        """Copy the state and save it in the background.

        Waits first for a save that still runs; threads that save at once take turns. When this
        returns, the state may change. Called when the interpreter exits already, as by an exit
        handler, it returns when the save is durable.

        Args:
            step: Training step; the directory is named after it. Not below one that was saved.
            state: See `fpformat_io.torch.save`.
            metadata: Strings for the manifest.

        Returns:
            A handle to wait on. An error of the save is raised by its `wait_durable`; by the
            next `save` or by `close` only when nobody asked the handle. The `save` after that
            tries again.

        Raises:
            PlanError: The state cannot be stored, or there is a sound checkpoint of this step or
                of a higher one already; a directory of its name that is damaged is moved aside.
                Nothing was written.
            EngineError: A save before failed and nobody was told, or the state cannot be copied.
        """
        begin = time.perf_counter()
        _check_step(step, name="step")
        with self._session.turn():
            if self._is_closed:
                raise PlanError("the Checkpointer is closed")
            path = self.root / step_name(step)
            save_id = os.urandom(SAVE_ID_NBYTES)
            self._check_newest(step)
            is_in_the_way = _is_unloadable(path)
            ready = prepare(state, step=step, metadata=metadata, sources=copied_sources)
            if is_in_the_way:
                _free(path, save_id)
            stall_seconds = time.perf_counter() - begin
            work = _Work(path, ready, save_id, begin, stall_seconds)
            return self._session.start(
                path,
                work,
                after=lambda report: self._settle(report, step, save_id),
                stop=work.control.cancel,
            )

    def _check_newest(self, step: int) -> None:
        """Refuse a step that would not become the latest; the root is only searched once."""
        if self._highest_step is None or step < self._highest_step:
            check_newest(self.root, step)

    def _settle(self, report: SaveReport, step: int, save_id: bytes) -> None:
        self._highest_step = step
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
        with self._session.turn():
            pass

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
        self, path: Path, ready: Prepared, save_id: bytes, begin: float, stall_seconds: float
    ) -> None:
        self._path = path
        self._ready: list[Prepared] = [ready]
        self._save_id = save_id
        self._begin = begin
        self._stall_seconds = stall_seconds
        self.control = SaveControl()

    def __call__(self) -> SaveReport:
        ready = self._ready.pop()
        written = write(self._path, ready, self._save_id, self.control)
        return report_of(written, ready, begin=self._begin, stall_seconds=self._stall_seconds)


def _check_step(step: int, *, name: str) -> None:
    if type(step) is not int or not 0 <= step <= MAX_INT:
        raise PlanError(f"{name}={step!r}: expected an int from 0 to 2^53-1")


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
