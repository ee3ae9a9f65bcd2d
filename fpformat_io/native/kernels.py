"""Everything that runs without the interpreter: checksums, copies, and the loop that writes.

A worker calls `run_transfers` once and stays in it until its whole list is done, so a main thread
that is busy in Python neither slows it nor is slowed by it. A **transfer** is one aligned range of
a segment; it is written from a staging buffer, into which its **fragments** are copied, or straight
from the memory of its source. A checksum is taken in the same pass as a copy, three lanes at a
time, since the instruction has three times the throughput that one chain of it can use.

Arguments are int64 and C-contiguous arrays of int64, nothing else, so each kernel is compiled for
one signature. Errors of the system are numbers in `shared`; nothing here raises.
"""

from collections.abc import Callable
from errno import EINTR, EINVAL, EIO
from inspect import signature
from typing import Any, Final, TypeVar, cast

import numpy as np
from numba import njit, types

from fpformat.records.checksum import crc32c
from fpformat_io.native.cache import KernelCache
from fpformat_io.native.columns import (
    ADDRESS,
    AT,
    CALLS,
    COUNT,
    CURSOR,
    DESCRIPTOR,
    DONE_NBYTES,
    ERRNO,
    ERRNO_LOCATION,
    ERROR_NBYTES,
    ERROR_OFFSET,
    FIRST,
    FRAGMENT_NBYTES,
    IS_STRAIGHT,
    NBYTES,
    NUMBER,
    OFFSET,
    PWRITE,
    SELF,
    SHARED_CELLS,
    STOP,
    SYNC_FLAGS,
    SYNC_RANGE,
    TRANSFER_COLUMNS,
    WRITE_ALIGN,
    Row,
    Table,
)
from fpformat_io.native.crc_tables import (
    LONG_LANE_NBYTES,
    SHORT_LANE_NBYTES,
    lane_tables,
    power_columns,
    word_tables,
)
from fpformat_io.native.intrinsics import (
    HAS_CRC_INSTRUCTION,
    IS_INTERPRETED,
    atomic_add,
    atomic_load,
    call_errno,
    call_pwrite,
    call_sync_range,
    crc_word,
    fence,
    load_byte,
    load_word,
    prefetch,
    store_byte,
    stream_word,
    zero,
)

F = TypeVar("F", bound=Callable[..., Any])

_TYPES: Final = {
    int: types.int64,
    Row: types.Array(types.int64, 1, "C"),
    Table: types.Array(types.int64, 2, "C"),
}
_LANES: Final = lane_tables()
_WORDS: Final = word_tables()
_POWERS: Final = power_columns()
_LONG, _SHORT = 0, 1
_ONES: Final = 0xFFFFFFFF
# The processor's own prefetching loses its way among three lanes of a few pages each.
_LINE: Final = 64
_AHEAD: Final = 2048


def kernel(function: F) -> F:
    """Compile for running without the interpreter lock, with the type kept and the code cached."""
    if IS_INTERPRETED:
        return function
    dispatcher: Any = njit(nogil=True)(function)
    dispatcher._cache = KernelCache(function)
    kinds = [function.__annotations__[name] for name in signature(function).parameters]
    dispatcher.compile(tuple(_TYPES[kind] for kind in kinds))
    # One signature for all calls: numba would compile again for each literal argument.
    dispatcher.disable_compile()
    return cast(F, dispatcher)


@kernel
def slice_word(state: int, word: int) -> int:
    """Return a CRC state after eight more bytes, by tables ("slicing by 8")."""
    word ^= state
    after: int = (
        _WORDS[7, word & 0xFF]
        ^ _WORDS[6, (word >> 8) & 0xFF]
        ^ _WORDS[5, (word >> 16) & 0xFF]
        ^ _WORDS[4, (word >> 24) & 0xFF]
        ^ _WORDS[3, (word >> 32) & 0xFF]
        ^ _WORDS[2, (word >> 40) & 0xFF]
        ^ _WORDS[1, (word >> 48) & 0xFF]
        ^ _WORDS[0, (word >> 56) & 0xFF]
    )
    return after


_step = crc_word if HAS_CRC_INSTRUCTION else slice_word


@kernel
def _shift(state: int, lane: int) -> int:
    after: int = (
        _LANES[lane, 0, state & 0xFF]
        ^ _LANES[lane, 1, (state >> 8) & 0xFF]
        ^ _LANES[lane, 2, (state >> 16) & 0xFF]
        ^ _LANES[lane, 3, state >> 24]
    )
    return after


@kernel
def _sum_lanes(state: int, source: int, lane_nbytes: int, lane: int) -> int:
    second = third = 0
    for line in range(source, source + lane_nbytes, _LINE):
        prefetch(line + _AHEAD)
        prefetch(line + _AHEAD + lane_nbytes)
        prefetch(line + _AHEAD + 2 * lane_nbytes)
        for at in range(line, line + _LINE, 8):
            state = _step(state, load_word(at))
            second = _step(second, load_word(at + lane_nbytes))
            third = _step(third, load_word(at + 2 * lane_nbytes))
    return _shift(_shift(state, lane) ^ second, lane) ^ third


@kernel
def checksum(source: int, nbytes: int) -> int:
    """Return the CRC-32C of memory."""
    state = _ONES
    stop = source + nbytes
    while stop - source >= 3 * LONG_LANE_NBYTES:
        state = _sum_lanes(state, source, LONG_LANE_NBYTES, _LONG)
        source += 3 * LONG_LANE_NBYTES
    while stop - source >= 3 * SHORT_LANE_NBYTES:
        state = _sum_lanes(state, source, SHORT_LANE_NBYTES, _SHORT)
        source += 3 * SHORT_LANE_NBYTES
    while stop - source >= 8:
        state = _step(state, load_word(source))
        source += 8
    while source < stop:
        state = (state >> 8) ^ _WORDS[0, (state ^ load_byte(source)) & 0xFF]
        source += 1
    return state ^ _ONES


@kernel
def _copy_word(state: int, source: int, target: int) -> int:
    word = load_word(source)
    stream_word(target, word)
    return _step(state, word)


@kernel
def _copy_lanes(state: int, source: int, target: int, lane_nbytes: int, lane: int) -> int:
    second = third = 0
    for line in range(0, lane_nbytes, _LINE):
        prefetch(source + line + _AHEAD)
        prefetch(source + line + _AHEAD + lane_nbytes)
        prefetch(source + line + _AHEAD + 2 * lane_nbytes)
        for at in range(line, line + _LINE, 8):
            far, farther = at + lane_nbytes, at + 2 * lane_nbytes
            state = _copy_word(state, source + at, target + at)
            second = _copy_word(second, source + far, target + far)
            third = _copy_word(third, source + farther, target + farther)
    return _shift(_shift(state, lane) ^ second, lane) ^ third


@kernel
def copy_checksum(source: int, target: int, nbytes: int) -> int:
    """Copy memory to `target`, a multiple of 8, and return its CRC-32C. Needs `fence` later."""
    state = _ONES
    stop = source + nbytes
    shift = target - source
    while stop - source >= 3 * LONG_LANE_NBYTES:
        state = _copy_lanes(state, source, source + shift, LONG_LANE_NBYTES, _LONG)
        source += 3 * LONG_LANE_NBYTES
    while stop - source >= 3 * SHORT_LANE_NBYTES:
        state = _copy_lanes(state, source, source + shift, SHORT_LANE_NBYTES, _SHORT)
        source += 3 * SHORT_LANE_NBYTES
    while stop - source >= 8:
        state = _copy_word(state, source, source + shift)
        source += 8
    while source < stop:
        byte = load_byte(source)
        store_byte(source + shift, byte)
        state = (state >> 8) ^ _WORDS[0, (state ^ byte) & 0xFF]
        source += 1
    return state ^ _ONES


@kernel
def _append(state: int, nbytes: int) -> int:
    power = 0
    while nbytes:
        if nbytes & 1:
            result = 0
            for bit in range(32):
                result ^= _POWERS[power, bit] & -((state >> bit) & 1)
            state = result
        nbytes >>= 1
        power += 1
    return state


@kernel
def combine(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32C of two byte strings laid end to end."""
    return _append(first, second_nbytes) ^ second


@kernel
def append_zeros(first: int, nbytes: int) -> int:
    """Return the CRC-32C of a byte string followed by zeros."""
    return _append(first ^ _ONES, nbytes) ^ _ONES


@kernel
def fence_stores() -> int:
    """Make what `copy_checksum` wrote visible to every reader."""
    return fence(0)


@kernel
def combine_runs(checksums: Row, nbytes: Row, groups: Row, combined: Row) -> int:
    """Combine consecutive checksums: those with the same number in `groups` into one.

    `combined` has a zero for each group; the checksum of no bytes is 0.
    """
    for row in range(len(groups)):
        group = groups[row]
        combined[group] = combine(combined[group], checksums[row], nbytes[row])
    return 0


@kernel
def _stage(row: int, transfers: Table, fragments: Table, checksums: Row, buffer: int) -> int:
    """Fill a staging buffer with a transfer; return the CRC-32C of all of it."""
    end = total = 0
    first = transfers[row, FIRST]
    for index in range(first, first + transfers[row, COUNT]):
        at, nbytes = fragments[index, AT], fragments[index, FRAGMENT_NBYTES]
        if at > end:
            zero(buffer + end, at - end)
            total = append_zeros(total, at - end)
        checksums[index] = copy_checksum(fragments[index, ADDRESS], buffer + at, nbytes)
        total = combine(total, checksums[index], nbytes)
        end = at + nbytes
    rest = transfers[row, NBYTES] - end
    if rest > 0:
        zero(buffer + end, rest)
        total = append_zeros(total, rest)
    return fence(total)


@kernel
def _sum_straight(row: int, transfers: Table, fragments: Table, checksums: Row) -> int:
    """Take the checksums of a transfer that its fragments fill without a gap, where they are."""
    total = 0
    first = transfers[row, FIRST]
    for index in range(first, first + transfers[row, COUNT]):
        nbytes = fragments[index, FRAGMENT_NBYTES]
        checksums[index] = checksum(fragments[index, ADDRESS], nbytes)
        total = combine(total, checksums[index], nbytes)
    return total


@kernel
def write_range(address: int, nbytes: int, offset: int, shared: Row) -> int:
    """Write memory to the file; return 0 or the error number.

    After a short write it goes on at the last multiple of the alignment that direct I/O needs.
    """
    done = 0
    while done < nbytes:
        count = call_pwrite(
            shared[PWRITE], shared[DESCRIPTOR], address + done, nbytes - done, offset + done
        )
        atomic_add(shared[SELF] + 8 * CALLS, 1)
        if count < 0:
            code = call_errno(shared[ERRNO_LOCATION])
            if code != EINTR:
                return code
            continue
        end = done + count
        if end < nbytes:
            end -= end % shared[WRITE_ALIGN]
            if end <= done:
                return EINVAL if count else EIO
        done = end
    if shared[SYNC_RANGE]:
        call_sync_range(shared[SYNC_RANGE], shared[DESCRIPTOR], offset, nbytes, shared[SYNC_FLAGS])
    return 0


@kernel
def run_transfers(
    transfers: Table, fragments: Table, checksums: Row, shared: Row, buffer: int
) -> int:
    """Take transfers that no other worker has until there are none; return how many it wrote.

    Args:
        transfers: Offset, nbytes, first fragment, number of fragments, whether to write straight,
            and its place among the checksums of all transfers.
        fragments: Address, nbytes, position in the transfer.
        checksums: Receives the CRC-32C of each fragment, then of each transfer.
        shared: Cells that all workers of a list share; the first error stops all of them.
        buffer: Address of this worker's staging buffer.
    """
    count = 0
    while atomic_load(shared[SELF] + 8 * STOP) == 0:
        row = atomic_add(shared[SELF] + 8 * CURSOR, 1)
        if row >= len(transfers):
            break
        if transfers[row, IS_STRAIGHT]:
            total = _sum_straight(row, transfers, fragments, checksums)
            source = fragments[transfers[row, FIRST], ADDRESS]
        else:
            total = _stage(row, transfers, fragments, checksums, buffer)
            source = buffer
        checksums[len(fragments) + transfers[row, NUMBER]] = total
        code = write_range(source, transfers[row, NBYTES], transfers[row, OFFSET], shared)
        if code:
            # Only the first error is kept; what follows is often its consequence.
            if atomic_add(shared[SELF] + 8 * STOP, 1) == 0:
                shared[ERRNO] = code
                shared[ERROR_OFFSET] = transfers[row, OFFSET]
                shared[ERROR_NBYTES] = transfers[row, NBYTES]
            break
        atomic_add(shared[SELF] + 8 * DONE_NBYTES, transfers[row, NBYTES])
        count += 1
    return count


def warm_up() -> None:
    """Compile what a save needs, or load it from the cache, and try it; fast the second time.

    Raises:
        RuntimeError: A kernel gives a wrong answer.
    """
    shared = np.zeros(SHARED_CELLS, dtype=np.int64)
    shared[SELF] = shared.ctypes.data
    none = np.zeros((0, TRANSFER_COLUMNS), dtype=np.int64)
    empty = np.zeros(0, dtype=np.int64)
    run_transfers(none, np.zeros((0, 3), dtype=np.int64), empty, shared, 0)
    _try_out()


def _try_out() -> None:
    """Compare copies and checksums with the plain ones, in long and short lanes and a rest."""
    nbytes = 77 if IS_INTERPRETED else 3 * (LONG_LANE_NBYTES + SHORT_LANE_NBYTES) + 77
    source = np.arange(nbytes, dtype=np.int64).astype(np.uint8)
    target = np.zeros(nbytes // 8 + 1, dtype=np.int64)
    expected = crc32c(source.data)
    copied = copy_checksum(source.ctypes.data, target.ctypes.data, nbytes)
    fence_stores()
    is_copied = target.view(np.uint8)[:nbytes].tobytes() == source.tobytes()
    sums = np.array([checksum(source.ctypes.data, 50), checksum(source.ctypes.data + 50, 27)])
    total = np.zeros(1, dtype=np.int64)
    combine_runs(sums, np.array([50, 27]), np.zeros(2, dtype=np.int64), total)
    zeros = append_zeros(int(total[0]), 9)
    found = (copied, checksum(source.ctypes.data, nbytes), total[0], zeros)
    first = source[:77].tobytes()
    if not is_copied or found != (expected, expected, crc32c(first), crc32c(first + bytes(9))):
        raise RuntimeError(f"kernels compute {found} where the checksum is {expected}")
