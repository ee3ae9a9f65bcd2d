"""Threads that work off a list of transfers, each inside one native call from start to end.

They live as long as the call of `run_workers`, so that a process that forks between saves has
nothing to inherit. The caller waits in the interpreter, where a signal reaches it; whatever
happens, it does not return before the last worker has left, since they write into its file.
"""

import _thread
import os
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

import numpy as np

from fpformat_io.aligned import AlignedMemory
from fpformat_io.config import EngineConfig
from fpformat_io.control import SaveControl
from fpformat_io.errors import WriteError
from fpformat_io.kernels import (
    CALLS,
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
    run_transfers,
)
from fpformat_io.volume import Volume, native_calls, sync_flags

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
        self.worker_count = min(config.worker_count, buffer_count - 1)
        self._memory = AlignedMemory(buffer_count * config.buffer_nbytes)
        self._pull_offset = self.worker_count * config.buffer_nbytes
        self.pull_nbytes = self._memory.nbytes - self._pull_offset

    def buffer(self, worker: int) -> int:
        """Return the address of a worker's staging buffer."""
        return self._memory.address + worker * self.buffer_nbytes

    def transfer_nbytes(self, volume: Volume) -> int:
        """Return the size to cut transfers to: through the page cache small ones stay in ours."""
        return self.buffer_nbytes if volume.mode == "direct" else _BUFFERED_NBYTES

    def pull_view(self, offset: int, nbytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Return a part of the memory that sources are read into."""
        return self._memory.view(self._pull_offset + offset, nbytes)

    @property
    def pull_address(self) -> int:
        """Address of the memory that sources are read into."""
        return self._memory.address + self._pull_offset


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


def run_workers(
    transfers: Table,
    fragments: Table,
    checksums: Row,
    *,
    target: Target,
    ring: StagingRing,
    control: SaveControl,
) -> Outcome:
    """Write transfers; see `fpformat_io.kernels.run_transfers` for the arrays.

    Raises:
        CancelledError: The save was told to stop.
        WriteError: A worker ended without having done its work and without an error of the system.
    """
    shared = _shared(target)
    count = max(min(ring.worker_count, len(transfers)), 1)
    if target.volume.mode == "buffered":
        # A file takes one write at a time through the page cache; more workers would only spin.
        count = min(count, _BUFFERED_WORKERS)
    works = [
        (transfers, fragments, checksums, shared, ring.buffer(worker)) for worker in range(count)
    ]
    with control.watch(lambda: shared.__setitem__(STOP, 1)):
        if count == 1:
            run_transfers(*works[0])
        else:
            _Crew(shared).run(works)
    expected = int(transfers[:, NBYTES].sum())
    if not shared[ERRNO] and shared[DONE_NBYTES] != expected:
        # An exception in a thread only goes to stderr; a save with a hole must not be committed.
        raise WriteError(f"a worker died: {shared[DONE_NBYTES]} of {expected} bytes were written")
    return Outcome(
        errno=int(shared[ERRNO]),
        offset=int(shared[ERROR_OFFSET]),
        nbytes=int(shared[ERROR_NBYTES]),
        done_nbytes=int(shared[DONE_NBYTES]),
        calls=int(shared[CALLS]),
    )


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


class _Crew:
    """The workers of one list."""

    def __init__(self, shared: Row) -> None:
        self._shared = shared

    def run(self, arguments: "list[tuple[Any, ...]]") -> None:
        """Run a worker with each of the arguments; what cannot be started is left to the others."""
        locks = [_thread.allocate_lock() for _ in arguments]
        for lock in locks:
            lock.acquire()
        started: list[int] = []
        left = [False] * len(locks)
        works = [(lock, left, worker, arguments[worker]) for worker, lock in enumerate(locks)]
        try:
            # Not threading.Thread: its start waits for the new thread to get the interpreter
            # lock, twice the switch interval each when the main thread is busy. And no loop: an
            # interrupt between a start and its note would leave a worker that nobody waits for.
            started.extend(map(_thread.start_new_thread, repeat(_run), works))
        except RuntimeError:
            if not started:
                run_transfers(*arguments[0])
        except BaseException:
            self._shared[STOP] = 1
            raise
        finally:
            self._wait(locks[: len(started)], left)

    def _wait(self, locks: "list[_thread.LockType]", left: list[bool]) -> None:
        """Return when every worker has left; an interrupt is raised after that.

        What a worker notes decides, not the lock: an interrupt may be raised just after the lock
        was acquired, and acquiring it once more would never end.
        """
        interrupt: BaseException | None = None
        for worker, lock in enumerate(locks):
            while not left[worker]:
                try:
                    lock.acquire()
                except BaseException as error:  # noqa: BLE001  raised below
                    # A worker that goes on would write into a file that is closed by then.
                    interrupt = error
                    self._shared[STOP] = 1
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
