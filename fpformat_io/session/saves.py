"""Saves in the background, one at a time, and what their callers hold meanwhile.

Each save runs in a thread of its own that is not a daemon: the interpreter waits for it at exit,
so the last save of a script is committed without anybody waiting for it. A save that begins when
the interpreter waits for nobody any more, as from an exit handler, runs in its caller's thread.
An error is raised once, by whoever asks first: the handle, the next save, or closing. After that a
save is tried again.

A child of a process that saves inherits the objects, but neither threads nor saves: in it every
session is idle, and the handle of a save that ran says where the save is.
"""

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fpformat.arguments import check_timeout
from fpformat.publish.latch import Latch
from fpformat.publish.shield import is_over
from fpformat_io.errors import EngineError, StagingError, WriteError, engine_error

_LOG: Final = logging.getLogger("fpformat_io")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a committed save amounts to.

    Attributes:
        path: The checkpoint.
        checkpoint_id: SHA-256 in hex that names the whole state.
        nbytes: Size of all its files.
        data_nbytes: Bytes of tensors and of the state tree.
        tensor_count: Names of tensors and arrays, tied ones included.
        seconds: From the call until it was durable.
        stall_seconds: Time that the caller was held up.
        mode: How it was written: ``"direct"``, past the page cache, or ``"buffered"``.
        bandwidth_bytes_per_s: Of the writing alone, from its beginning until it was durable.
        untied: Names that shared memory and were stored apart, because a common base would have
            been more than four times as large, or could not be described.
        warnings: What the file system could not do, such as to lock or to sync a directory.
    """

    path: Path
    checkpoint_id: str
    nbytes: int
    data_nbytes: int
    tensor_count: int
    seconds: float
    stall_seconds: float
    mode: str
    bandwidth_bytes_per_s: float
    untied: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class SaveHandle:
    """A save that was accepted. Its state was copied, so the caller may change it at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._durable = Latch()
        self._report: SaveReport | None = None
        self._error: EngineError | None = None
        self._is_error_known = False

    @property
    def done(self) -> bool:
        """Whether the save is durable or has failed."""
        return self._durable.is_set()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when the source may change again.

        The state is copied before `save` returns, so this never blocks.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            PlanError: The timeout makes no sense.
        """
        check_timeout(timeout)

    def wait_durable(self, timeout: float | None = None) -> SaveReport:
        """Return the report once the checkpoint survives a power cut.

        Args:
            timeout: Seconds to wait at most; None waits as long as it takes.

        Raises:
            PlanError: The timeout makes no sense.
            TimeoutError: The save goes on.
            EngineError: The save failed, and the cause is chained; or it runs in the process that
                this one was forked from.
        """
        check_timeout(timeout)
        if not self._durable.wait(timeout):
            raise TimeoutError(f"{self.path}: not durable after {timeout} seconds")
        if self._error:
            self._is_error_known = True
            raise self._error
        assert self._report is not None
        return self._report

    def _end(self, report: SaveReport | None, error: EngineError | None = None) -> None:
        self._report, self._error = report, error
        self._durable.set()

    def _take_error(self) -> EngineError | None:
        """Return the error of the save unless it was raised before."""
        error = None if self._is_error_known else self._error
        self._is_error_known = True
        return error

    def _orphan(self) -> None:
        """End, in a child, the handle of a save that its parent runs."""
        if self.done:
            return
        detail = "this save runs in the process that this one was forked from"
        self._end(None, WriteError(f"{self.path}: {detail}; only that one learns how it ends"))
        self._is_error_known = True


class _Job:
    """A save on its way: its handle, and what runs it."""

    def __init__(
        self,
        handle: SaveHandle,
        work: Callable[[], SaveReport],
        after: Callable[[SaveReport], None],
        stop: Callable[[], None],
    ) -> None:
        self.handle = handle
        self.stop = stop
        self.is_launched = False
        self.ended = Latch()
        self._work = [work]
        self._after = after

    def withdraw(self) -> bool:
        """Take the work back; return False when a thread was faster."""
        try:
            self._work.pop()
        except IndexError:
            return False
        # Whoever started it gets the exception that it is withdrawn for.
        self.handle._is_error_known = True
        self._leave()
        return True

    def run(self) -> None:
        """Do the work, unless it was withdrawn."""
        try:
            work = self._work.pop()
        except IndexError:
            return
        try:
            _run(self.handle, work, self._after)
        finally:
            self._leave()

    def _leave(self) -> None:
        """Let nobody wait any more, whatever came of the work."""
        if not self.handle.done:
            self.handle._end(None, WriteError(f"{self.handle.path}: the save was interrupted"))
        _UNENDED.discard(self)
        self.ended.set()


class SaveSession:
    """Runs saves one after the other, each in the background of the caller; for any threads."""

    def __init__(self) -> None:
        self._job: _Job | None = None
        self._unheard: list[SaveHandle] = []
        self._lock = threading.RLock()
        _SESSIONS.add(self)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no save is running, and keep other threads out until the block ends.

        Raises:
            EngineError: A save before failed, and nobody was told yet.
        """
        with self._lock:
            self.settle()
            self._raise_unheard()
            yield

    def _raise_unheard(self) -> None:
        waiting, self._unheard = self._unheard, []
        for place, handle in enumerate(waiting):
            failure = handle._take_error()
            if failure:
                self._unheard += waiting[place + 1 :]
                raise type(failure)(f"an earlier save failed: {failure}") from failure

    def settle(self) -> None:
        """Return when no save is running; an error of it was logged when it happened.

        A latch is waited for and not the thread: an interrupt during `Thread.join` can leave a
        thread that is taken for ended, and nothing would wait for it any more. A save that an
        interrupt kept from getting its thread, or that is about to get it when a signal handler
        saves too, is made here.
        """
        while (job := self._job) is not None and not job.ended.is_set():
            if not job.is_launched:
                job.run()
            job.ended.wait()

    def start(
        self,
        path: Path,
        work: Callable[[], SaveReport],
        *,
        after: Callable[[SaveReport], None],
        stop: Callable[[], None],
    ) -> SaveHandle:
        """Run `work` in the background; call only inside `turn`.

        Args:
            path: The checkpoint, for messages.
            work: Writes and commits.
            after: Called when the save is durable and its handle was told.
            stop: Called to tell `work` that it should give up.

        Raises:
            StagingError: No thread can be started.
            EngineError: The save failed; only where it had to run in this thread.
        """
        handle = SaveHandle(path)
        job = _Job(handle, work, after, stop)
        try:
            self._occupy(job)
            if is_over():
                job.run()
                handle.wait_durable()
                return handle
            self._unheard.append(handle)
            _UNENDED.add(job)
            # Not a daemon: threads of daemons die at exit and the last save would not be committed.
            threading.Thread(target=job.run, name=f"fpformat {path.name}", daemon=False).start()
            job.is_launched = True
        except BaseException as error:
            # After an interrupt the thread may be there or not: who takes the work decides.
            if job.withdraw() and isinstance(error, RuntimeError | MemoryError):
                raise StagingError(f"{path}: no thread can be started: {error}") from error
            raise
        return handle

    def _occupy(self, job: _Job) -> None:
        """Make `job` the one that runs.

        Once more only when nothing runs: a signal handler that saves may have come between. No
        call stands between the look and the assignment, so none can come there.
        """
        while True:
            self.settle()
            current = self._job
            if current is None or current.ended.is_set():
                self._job = job
                return

    def _forget(self) -> None:
        """Be idle, in a child that has none of its parent's threads."""
        self._job = None
        self._unheard = []
        self._lock = threading.RLock()


_SESSIONS: Final[weakref.WeakSet[SaveSession]] = weakref.WeakSet()
_UNENDED: Final[set[_Job]] = set()


def _run(
    handle: SaveHandle, work: Callable[[], SaveReport], after: Callable[[SaveReport], None]
) -> None:
    try:
        report = work()
    except Exception as error:  # noqa: BLE001  whatever it is must reach the caller
        failure = error if isinstance(error, EngineError) else engine_error(error)
        if failure is not error:
            failure.__cause__ = error
        _LOG.error("save failed: %s", failure)
        handle._end(None, failure)
    else:
        handle._end(report)
        try:
            after(report)
        except Exception:
            _LOG.exception("%s is durable, but retiring older checkpoints failed", report.path)


def _leave_to_parent() -> None:
    for session in _SESSIONS:
        session._forget()
    for job in _UNENDED:
        job.handle._orphan()
    _UNENDED.clear()


def _give_up() -> None:
    """Stop saves that still run when the interpreter has stopped waiting for its threads.

    It waits for them before it calls exit handlers, so there are some only when its wait was
    interrupted. They would die with it in the middle of a write and leave what they wrote.
    """
    for job in list(_UNENDED):
        if job.withdraw():
            continue
        while not job.ended.is_set():
            with suppress(BaseException):
                job.stop()
                job.ended.wait()
        if job.handle._error is not None:
            sys.stderr.write(
                f"fpformat: interrupted at exit; the save of {job.handle.path} was given up, and "
                "what it had written is removed\n"
            )


os.register_at_fork(after_in_child=_leave_to_parent)
atexit.register(_give_up)
