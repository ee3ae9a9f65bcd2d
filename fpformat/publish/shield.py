"""Work that a signal must not tear apart: it runs to its end, and the interrupt is raised after it.

Python runs signal handlers in the main thread, between any two of its steps; one that raises, as
that of Ctrl-C does, can leave any function half done, also one that cleans up after another. So
such work runs in a thread of its own, which no handler ever enters, while the main thread waits.
Should an interrupt get it out of its wait, the thread goes on all the same, and the interpreter
waits for it at exit.
"""

import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from fpformat.publish.latch import Latch

T = TypeVar("T")


class _Task(Generic[T]):
    """Work with its result or its error."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = [work]
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.ended = Latch()

    def run(self) -> None:
        """Do the work, unless another thread took it."""
        try:
            work = self._work.pop()
        except IndexError:
            return
        try:
            self._result.append(work())
        except BaseException as error:  # noqa: BLE001  raised again by who waits
            self._error = error
        finally:
            self.ended.set()

    def outcome(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                # The traceback refers to this frame, and so to the error: a circle.
                self._error = None
        return self._result.pop()


def is_over() -> bool:
    """Return whether the interpreter is past the point where it waits for threads."""
    return sys.is_finalizing() or not threading.main_thread().is_alive()


def _start(task: _Task[T]) -> None:
    """Start a thread with the task; a second one, after an interrupt, finds the work taken."""
    try:
        threading.Thread(target=task.run, name="fpformat", daemon=False).start()
    except RuntimeError:  # there are too many threads
        task.run()


def run_whole(work: Callable[[], T], *, stop: Callable[[], None] = lambda: None) -> T:
    """Return what `work` returns, or raise what it raises; signals do not reach it.

    Outside the main thread, where signals are never handled, and at the end of the interpreter,
    where no thread can be started, it simply runs.

    Args:
        work: What must not be torn apart.
        stop: Called at an interrupt, to tell the work that it may end early.

    Raises:
        BaseException: What a signal handler raised meanwhile, once the work has ended; the
            error of the work, if any, is chained.
    """
    if threading.current_thread() is not threading.main_thread() or is_over():
        return work()
    task = _Task(work)
    interrupt: BaseException | None = None
    is_started = False
    while True:
        try:
            if interrupt is not None:
                stop()
            if not is_started:
                _start(task)
                is_started = True
            task.ended.wait()
            break
        except BaseException as error:  # noqa: BLE001  raised below
            interrupt = error
    if interrupt is None:
        return task.outcome()
    try:
        task.outcome()
    except Exception as error:
        raise interrupt from error
    raise interrupt
