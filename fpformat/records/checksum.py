"""CRC-32C: of bytes, of concatenations, and in the masked form that structures store of themselves.

`crc32c` is the fast one, from a package that uses the processor's instruction. `combine` works on
checksums alone: with `zeros(n)` the operator that appends n zero bytes (a 32 x 32 matrix over
GF(2), built by squaring), crc(a + b) = zeros(len b) applied to crc(a), xor crc(b).
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, Final, TypeAlias

_POLYNOMIAL: Final = 0x82F63B78  # reflected
_MASK_DELTA: Final = 0xA282EAD8
_Matrix: TypeAlias = tuple[int, ...]


def crc32c(buffer: "bytes | bytearray | memoryview", start: int = 0) -> int:
    """Return the CRC-32C of `buffer`, continued from the checksum `start`.

    spec: SUM-1
    """
    return _fast_crc32c()(buffer, start)


@cache
def _fast_crc32c() -> Callable[[Any, int], int]:
    """Import the package at the first checksum: it looks up its own version, which is slow."""
    from crc32c import crc32c as fast

    return fast


def slow_crc32c(buffer: bytes, start: int = 0) -> int:
    """Return the same as `crc32c`, bit by bit from the definition; for tests."""
    state = start ^ 0xFFFFFFFF
    for byte in buffer:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (_POLYNOMIAL if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def mask(checksum: int) -> int:
    """Return the form in which a structure stores its own checksum.

    spec: SUM-6. A structure that ends in its plain CRC leaves the same CRC state whatever it
    holds, which would blind every checksum that runs over it.
    """
    return ((checksum >> 15 | checksum << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _apply(matrix: _Matrix, vector: int) -> int:
    result = 0
    for column in matrix:
        if vector & 1:
            result ^= column
        vector >>= 1
    return result


@lru_cache(maxsize=64)
def _zeros_power(power: int) -> _Matrix:
    """Return the operator that appends 2**power zero bytes."""
    if power:
        half = _zeros_power(power - 1)
        return tuple(_apply(half, column) for column in half)
    one_bit = (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    matrix: _Matrix = tuple(1 << bit for bit in range(32))
    for _ in range(8):
        matrix = tuple(_apply(one_bit, column) for column in matrix)
    return matrix


def combine(first: int, second: int, *, second_nbytes: int) -> int:
    """Return the CRC-32C of two byte strings laid end to end, from the checksums of both."""
    power = 0
    while second_nbytes:
        if second_nbytes & 1:
            first = _apply(_zeros_power(power), first)
        second_nbytes >>= 1
        power += 1
    return first ^ second


def piece_checksums(buffer: memoryview, *, piece_nbytes: int) -> Sequence[int]:
    """Return the CRC-32C of each piece of `buffer`, the last one possibly shorter."""
    return [
        crc32c(buffer[start : start + piece_nbytes])
        for start in range(0, len(buffer), piece_nbytes)
    ]
