"""Saves in the background, one at a time, and what their callers hold meanwhile.

Each save runs in a thread of its own that is not a daemon: the interpreter waits for it at exit,
so the last save of a script is committed without anybody waiting for it. An error is raised once,
by whoever asks first: the handle, the next save, or closing. After that a save is tried again.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fpformat_io.errors import EngineError, engine_error

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


class SaveHandle:
    """A save that was accepted. Its state was copied, so the caller may change it at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._durable = threading.Event()
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
        """

    def wait_durable(self, timeout: float | None = None) -> SaveReport:
        """Return the report once the checkpoint survives a power cut.

        Args:
            timeout: Seconds to wait at most; None waits as long as it takes.

        Raises:
            TimeoutError: The save goes on.
            EngineError: The save failed; the cause is chained.
        """
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

    def _unknown_error(self) -> EngineError | None:
        """Return the error of the save unless it was raised before."""
        error = None if self._is_error_known else self._error
        self._is_error_known = True
        return error


class SaveSession:
    """Runs saves one after the other, each in the background of the caller."""

    def __init__(self) -> None:
        self._handle: SaveHandle | None = None
        self._is_idle = threading.Event()
        self._is_idle.set()

    def wait_idle(self) -> None:
        """Return when no save is running.

        Raises:
            EngineError: The save before failed, and nobody was told yet.
        """
        self.settle()
        failure = self._handle and self._handle._unknown_error()
        if failure:
            raise type(failure)(f"an earlier save failed: {failure}") from failure

    def settle(self) -> None:
        """Return when no save is running; an error of it was logged when it happened.

        An event is waited for and not the thread: an interrupt during `Thread.join` can leave a
        thread that is taken for ended, and nothing would wait for it any more.
        """
        self._is_idle.wait()

    def start(
        self, path: Path, work: Callable[[], SaveReport], after: Callable[[SaveReport], None]
    ) -> SaveHandle:
        """Run `work` in the background; call only after `wait_idle`.

        Args:
            path: The checkpoint, for messages.
            work: Writes and commits.
            after: Called when the save is durable and its handle was told.
        """
        self._handle = handle = SaveHandle(path)

        def run() -> None:
            try:
                _run(handle, work, after)
            finally:
                self._is_idle.set()

        # Not a daemon: threads of daemons die at exit and would leave the last save uncommitted.
        thread = threading.Thread(target=run, name=f"fpformat {path.name}", daemon=False)
        self._is_idle.clear()
        try:
            thread.start()
        except BaseException:
            self._is_idle.set()
            raise
        return handle


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
