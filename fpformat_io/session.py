"""Saves in the background, one at a time, and what their callers hold meanwhile.

Each save runs in a thread of its own that is not a daemon: the interpreter waits for it at exit,
so the last save of a script is committed without anybody waiting for it. The first error poisons
the session: every later save is refused with it, so that a failing disk cannot go unnoticed.
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
            raise self._error
        assert self._report is not None
        return self._report

    def finish(self, report: SaveReport) -> None:
        """Note that the save is durable."""
        self._report = report
        self._durable.set()

    def fail(self, error: EngineError) -> None:
        """Note that the save failed."""
        self._error = error
        self._durable.set()


class SaveSession:
    """Runs saves one after the other, each in the background of the caller."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: EngineError | None = None

    def wait_idle(self) -> None:
        """Return when no save is running.

        Raises:
            EngineError: A save of this session failed.
        """
        self.settle()
        if self._error:
            error = engine_error(self._error)
            raise error from self._error

    def settle(self) -> None:
        """Return when no save is running; an error of it was logged when it happened."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def start(
        self, path: Path, work: Callable[[], SaveReport], after: Callable[[SaveReport], None]
    ) -> SaveHandle:
        """Run `work` in the background; call only after `wait_idle`.

        Args:
            path: The checkpoint, for messages.
            work: Writes and commits.
            after: Called when the save is durable and its handle was told.
        """
        handle = SaveHandle(path)

        def run() -> None:
            try:
                report = work()
            except Exception as error:  # noqa: BLE001  whatever it is must reach the caller
                failure = error if isinstance(error, EngineError) else engine_error(error)
                if failure is not error:
                    failure.__cause__ = error
                self._error = failure
                handle.fail(failure)
                _LOG.error("save failed: %s", failure)
                return
            handle.finish(report)
            after(report)

        # Not a daemon: threads of daemons die at exit and would leave the last save uncommitted.
        self._thread = threading.Thread(target=run, name=f"fpformat {path.name}", daemon=False)
        self._thread.start()
        return handle
