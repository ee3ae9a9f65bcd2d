"""An event that an interrupt cannot break.

`threading.Event` is made of a condition in Python: an exception that a signal handler raises in the
main thread just after its lock was taken leaves it taken, and then everybody waits for ever.
"""

import _thread
from contextlib import suppress
from threading import TIMEOUT_MAX
from typing import Final


class Latch:
    """Something that happens once; any number of threads wait for it."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: Final[list[_thread.LockType]] = []

    def is_set(self) -> bool:
        """Return whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """Let it happen; once more changes nothing."""
        self._is_set = True
        for own in tuple(self._waiting):
            with suppress(RuntimeError):  # it was released before
                own.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether it has happened, as soon as it has or after `timeout` seconds.

        Who waits brings a lock of its own, which only `set` releases. An interrupt at any point
        leaves behind at most a lock that nobody waits for.
        """
        own = _thread.allocate_lock()
        own.acquire()
        self._waiting.append(own)
        # What happened before the lock was there is seen here; what happens after that releases it.
        if not self._is_set:
            own.acquire(timeout=-1 if timeout is None else max(0, min(timeout, TIMEOUT_MAX)))
        with suppress(ValueError):
            self._waiting.remove(own)
        return self._is_set
