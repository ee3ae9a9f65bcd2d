"""Threads that work off a list of transfers, each inside one native call from start to end.

They live as long as one list, so that a process that forks between saves has
nothing to inherit. The caller waits in the interpreter, where a signal reaches it; whatever
happens, a `Crew` does not end before its last worker has left, since they write into its file.
"""

import _thread
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from types import TracebackType
from typing import Any, Final

import numpy as np

from fpformat_io.config import EngineConfig
from fpformat_io.control import SaveControl
from fpformat_io.errors import WriteError
from fpformat_io.native.columns import (
    CALLS,
    CURSOR,
    DESCRIPTOR,
    DONE_NBYTES,
    ERRNO,
    ERRNO_LOCATION,
    ERROR_NBYTES,
    ERROR_OFFSET,
    NBYTES,
    PWRITE,
    SELF,
    SHARED_CELLS,
    STOP,
    SYNC_FLAGS,
    SYNC_RANGE,
    WRITE_ALIGN,
    Row,
    Table,
)
from fpformat_io.native.kernels import run_transfers
from fpformat_io.write.aligned import AlignedMemory
from fpformat_io.write.pulls import HALF_COUNT
from fpformat_io.write.volume import Volume, native_calls, sync_flags

_BUFFERED_NBYTES: Final = 2 * 1024 * 1024
_BUFFERED_WORKERS: Final = 2


class StagingRing:
    """The staging buffers of one save: one for each worker, the rest to read sources into.

    Attributes:
        buffer_nbytes: Size of a staging buffer.
        worker_count: How many workers have one.
        pull_nbytes: Size of the rest.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Map the memory; pages that no save touches are never taken.

        Raises:
            StagingError: There is not enough address space.
        """
        self.buffer_nbytes = config.buffer_nbytes
        buffer_count = config.staging_nbytes // config.buffer_nbytes
        self.worker_count = min(config.worker_count, buffer_count - HALF_COUNT)
        self._memory = AlignedMemory(buffer_count * config.buffer_nbytes)
        self._pull_offset = self.worker_count * config.buffer_nbytes
        self.pull_nbytes = self._memory.nbytes - self._pull_offset

    def buffer(self, worker: int) -> int:
        """Return the address of a worker's staging buffer."""
        return self._memory.address + worker * self.buffer_nbytes

    def transfer_nbytes(self, volume: Volume) -> int:
        """Return the size to cut transfers to: through the page cache small ones stay in ours."""
        return self.buffer_nbytes if volume.mode == "direct" else _BUFFERED_NBYTES

    def pull_memory(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Return the memory that sources are read into."""
        return self._memory.view(self._pull_offset, self.pull_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a list of transfers.

    Attributes:
        errno: 0, or the first error.
        offset: Position of the transfer that failed.
        nbytes: Its size.
        done_nbytes: Bytes written.
        calls: Number of system calls that wrote.
    """

    errno: int
    offset: int
    nbytes: int
    done_nbytes: int
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The open file that transfers go to."""

    descriptor: int
    volume: Volume


class Crew:
    """Workers of one open file, on one list at a time; a context that none of them outlives.

    Inside the context the caller may do other work between `start` and `finish`.
    """

    def __init__(self, target: Target, ring: StagingRing, control: SaveControl) -> None:
        self._shared = _shared(target)
        self._ring = ring
        self._control = control
        self._watch = control.watch(self._stop)
        # A file takes one write at a time through the page cache; more workers would only spin.
        most = _BUFFERED_WORKERS if target.volume.mode == "buffered" else ring.worker_count
        self._most = min(ring.worker_count, most)
        self._works: list[tuple[Any, ...]] = []
        self._threads = _Threads()
        self._expected_nbytes = 0

    def __enter__(self) -> "Crew":
        """Return itself, once the save may go on."""
        self._watch.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop workers that nobody waited for, and wait.

        Raises:
            CancelledError: The save was told to stop.
        """
        try:
            self._stop()
            self._threads.wait(self._stop)
        finally:
            self._watch.__exit__(kind, error, trace)

    def start(self, transfers: Table, fragments: Table, checksums: Row) -> None:
        """Let workers write a list; see `fpformat_io.native.kernels.run_transfers` for the arrays.

        A list of one transfer is written by `finish`: that is faster than starting a thread.
        """
        shared = self._shared
        shared[CURSOR] = 0
        self._expected_nbytes += int(transfers[:, NBYTES].sum())
        count = max(min(self._most, len(transfers)), 1)
        self._works = [
            (transfers, fragments, checksums, shared, self._ring.buffer(worker))
            for worker in range(count)
        ]
        if len(transfers) > 1 and self._threads.start(self._works, self._stop):
            self._works = []

    def finish(self) -> Outcome:
        """Wait for the workers and return what they did since the context began.

        Raises:
            CancelledError: The save was told to stop.
            WriteError: A worker ended without having done its work and without an error of the
                system.
        """
        shared = self._shared
        works, self._works = self._works, []
        if works:
            run_transfers(*works[0])
        self._threads.wait(self._stop)
        self._control.check()
        if not shared[ERRNO] and shared[DONE_NBYTES] != self._expected_nbytes:
            # An exception in a thread only goes to stderr; a save with a hole is not committed.
            done = f"{shared[DONE_NBYTES]} of {self._expected_nbytes} bytes were written"
            raise WriteError(f"a worker died: {done}")
        return Outcome(
            errno=int(shared[ERRNO]),
            offset=int(shared[ERROR_OFFSET]),
            nbytes=int(shared[ERROR_NBYTES]),
            done_nbytes=int(shared[DONE_NBYTES]),
            calls=int(shared[CALLS]),
        )

    def _stop(self) -> None:
        self._shared[STOP] = 1


def _shared(target: Target) -> Row:
    calls = native_calls()
    shared = np.zeros(SHARED_CELLS, dtype=np.int64)
    shared[SELF] = shared.ctypes.data
    shared[DESCRIPTOR] = target.descriptor
    shared[PWRITE] = calls.pwrite
    shared[ERRNO_LOCATION] = calls.errno_location
    shared[SYNC_FLAGS] = sync_flags(target.volume)
    shared[SYNC_RANGE] = calls.sync_range if shared[SYNC_FLAGS] else 0
    shared[WRITE_ALIGN] = target.volume.offset_align
    return shared


class _Threads:
    """The threads of one list."""

    def __init__(self) -> None:
        self._locks: list[_thread.LockType] = []
        self._left: list[bool] = []
        self._started: list[int] = []

    def start(self, works: "list[tuple[Any, ...]]", stop: Callable[[], None]) -> bool:
        """Start a worker with each of the arguments; what cannot be started is left to the others.

        Returns:
            Whether there is a worker at all.
        """
        self._locks = [_thread.allocate_lock() for _ in works]
        for lock in self._locks:
            lock.acquire()
        self._left = [False] * len(works)
        self._started = []
        arguments = [
            (lock, self._left, worker, works[worker]) for worker, lock in enumerate(self._locks)
        ]
        try:
            # Not threading.Thread: its start waits for the new thread to get the interpreter
            # lock, twice the switch interval each when the main thread is busy. And no loop: an
            # interrupt between a start and its note would leave a worker that nobody waits for.
            self._started.extend(map(_thread.start_new_thread, repeat(_run), arguments))
        except RuntimeError:
            return bool(self._started)
        except BaseException:
            stop()
            raise
        return True

    def wait(self, stop: Callable[[], None]) -> None:
        """Return when every worker has left; an interrupt stops them and is raised after that.

        What a worker notes decides, not the lock: an interrupt may be raised just after the lock
        was acquired, and acquiring it once more would never end.
        """
        interrupt: BaseException | None = None
        for worker, lock in enumerate(self._locks[: len(self._started)]):
            while not self._left[worker]:
                try:
                    lock.acquire()
                except BaseException as error:  # noqa: BLE001  raised below
                    # A worker that goes on would write into a file that is closed by then.
                    interrupt = error
                    stop()
        if interrupt:
            raise interrupt


def _run(lock: _thread.LockType, left: list[bool], worker: int, arguments: tuple[Any, ...]) -> None:
    try:
        run_transfers(*arguments)
    finally:
        left[worker] = True
        lock.release()


def os_error(outcome: Outcome) -> OSError:
    """Return the error of a failed list as Python would have raised it."""
    return OSError(outcome.errno, os.strerror(outcome.errno))
