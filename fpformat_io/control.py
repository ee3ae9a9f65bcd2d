"""What a running save and its caller tell each other: that all sources were read, and "stop".

A save is stopped between two transfers, and not any more once its commit has begun.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fpformat.arguments import check_timeout
from fpformat.publish.latch import Latch
from fpformat_io.errors import CancelledError


class SaveControl:
    """The line between one save and its caller; give a new one to each save."""

    def __init__(self) -> None:
        self._staged = Latch()
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._stops: list[Callable[[], None]] = []

    @property
    def is_staged(self) -> bool:
        """Whether the save reads no source any more, because it read all of them or has ended."""
        return self._staged.is_set()

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the save reads no source any more; return whether that is so.

        Raises:
            PlanError: The timeout makes no sense.
        """
        check_timeout(timeout)
        return self._staged.wait(timeout)

    def note_staged(self) -> None:
        """Tell whoever waits that the sources may change again."""
        self._staged.set()

    def cancel(self) -> None:
        """Stop the save; it ends with CancelledError unless its commit has begun."""
        with self._lock:
            self._is_cancelled = True
            for stop in self._stops:
                stop()

    def check(self) -> None:
        """Raise CancelledError when the save was told to stop."""
        if self._is_cancelled:
            raise CancelledError("the save was cancelled; nothing was committed")

    @contextmanager
    def watch(self, stop: Callable[[], None]) -> Iterator[None]:
        """Let `cancel` call `stop` while the work inside goes on.

        Raises:
            CancelledError: The save was told to stop, before or meanwhile.
        """
        with self._lock:
            self.check()
            self._stops.append(stop)
        try:
            yield
        finally:
            with self._lock:
                self._stops.remove(stop)
        self.check()
